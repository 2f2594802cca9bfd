"""Are packages installed that are known to be vulnerable? Part of `make lint`.

In: what is installed beside this Python; `$AUDIT`. Out: one line a vulnerability and exit code 1, or one line on what
was audited. Never: a silent pass: where no database of vulnerabilities can be reached the line says so, and with
AUDIT=required that is a failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

DATABASES = {
    "pypi": ("https://pypi.org/pypi/pip/24.0/json", "vulnerabilities"),
    "osv": ("https://api.osv.dev/v1/vulns/PYSEC-2023-228", "id"),
}
"""By pip-audit's name of each: an address, and what stands in its answer. A mirror of packages has neither."""
REACH_S = 10.0
AUDIT_S = 600.0


def reachable(address: str, field: str) -> bool:
    """Tell whether an address answers with a JSON object that has this field."""
    try:
        with urllib.request.urlopen(address, timeout=REACH_S) as answer:
            return field in json.load(answer)
    except (OSError, ValueError, TypeError):
        return False


def audit(database: str) -> dict[str, Any]:
    """Run pip-audit over what is installed here; empty if it came to no report."""
    words = ["--progress-spinner", "off", "--skip-editable", "--format", "json", "--vulnerability-service", database]
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "pip_audit", *words], capture_output=True, text=True, timeout=AUDIT_S, check=False
        )
        report: dict[str, Any] = json.loads(ran.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return {}
    return report


def judge(report: dict[str, Any], *, required: bool) -> tuple[list[str], int]:
    """Return what is to be said, and the exit code."""
    packages = report.get("dependencies", [])
    audited = [package for package in packages if "vulns" in package]
    if not audited:
        line = "dependency audit: no database of vulnerabilities can be reached from here, so nothing was audited"
        return [line + (", and AUDIT=required" if required else "")], int(required)
    lines = [
        f"{package['name']} {package['version']} has {', '.join([vuln['id'], *vuln.get('aliases', ())])}: "
        + (f"use {' or '.join(vuln['fix_versions'])}" if vuln.get("fix_versions") else "no release mends it yet")
        for package in audited
        for vuln in package["vulns"]
    ]
    count = f"dependency audit: {len(lines) or 'no'} known vulnerabilities in {len(audited)} packages"
    unknown = len(packages) - len(audited)
    return [*lines, count + f", {unknown} are not in the database" * bool(unknown)], int(bool(lines))


def main() -> int:
    """Audit with the first database that answers."""
    report: dict[str, Any] = {}
    for database, (address, field) in DATABASES.items():
        if not report and reachable(address, field):
            report = audit(database)
    lines, code = judge(report, required=os.environ.get("AUDIT") == "required")
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
