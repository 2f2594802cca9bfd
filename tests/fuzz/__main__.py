"""Fuzz the decoders and a real master's ports side by side, and write down what was found.

    python -m tests.fuzz [--minutes 60] [--seed N] [--findings FOLDER] [--out FILE]

In: how long. Out: a summary, a JSON file with host and command, a file for each finding; exit code 1 if there is one.
Never: a finding without the command that does it again.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks import _report
from tests.fuzz import decoder, sockets


def main() -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1, 10**6))
    parser.add_argument("--findings", type=Path, default=decoder.ROOT / "runs" / "fuzz")
    parser.add_argument("--out", type=Path, default=_report.RESULTS / "fuzz.json")
    chosen = parser.parse_args()
    seconds, seed, findings = 60 * chosen.minutes, chosen.seed, chosen.findings.resolve()
    print(f"seed {seed}, {chosen.minutes:g} minutes; findings go to {findings}", flush=True)
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, "-m", "tests.fuzz.sockets", "run", "--seconds", str(seconds), "--seed", str(seed)]
        ports = subprocess.Popen(
            [*command, "--findings", str(findings)], cwd=decoder.ROOT, stdin=subprocess.DEVNULL, stdout=output
        )
        try:
            engines = ["atheris", "own"] if importlib.util.find_spec("atheris") else ["own"]
            reports = [
                decoder.run(seconds / len(engines), seed=seed, findings=findings, engine=engine) for engine in engines
            ]
            code = ports.wait(seconds + 600)
        finally:
            ports.kill()
            ports.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    at_ports = _at_ports(text)
    found = [f"{why}; {decoder.replayed(Path(path))}" for each in reports for path, why in each.findings.items()]
    found += at_ports.findings if at_ports is not None else [f"the sockets' run ended with {code}: {text[-2000:]}"]
    _print(reports, at_ports)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    rows = {
        "decoders": msgspec.to_builtins(reports),
        "sockets": msgspec.to_builtins(at_ports),
        "findings": found,
        "host": _report.host(),
        "command": f"python -m tests.fuzz --minutes {chosen.minutes:g} --seed {seed}",
    }
    chosen.out.write_text(json.dumps(rows, indent=2) + "\n")
    print("\n".join([f"{len(found)} findings", *found]))
    return int(bool(found))


def _at_ports(text: str) -> sockets.Report | None:
    """Find the report behind what else was printed."""
    start = text.rfind("\n{\n") + 1 if "\n{\n" in text else 0
    try:
        return msgspec.json.decode(text[start:], type=sockets.Report)
    except msgspec.MsgspecError:
        return None


def _print(reports: list[decoder.Report], at_ports: sockets.Report | None) -> None:
    for each in reports:
        begun, most = each.rss_mib
        print(
            f"decoders, {each.engine}: {sum(each.executions.values())} inputs in {each.seconds:.0f} s, "
            f"{len(each.findings)} findings; memory {begun:.0f} to {most:.0f} MiB, {each.slope_mib_h:+.1f} MiB/h"
        )
    if at_ports is not None:
        before, most, after = at_ports.rss_mib
        print(
            f"ports: {sum(at_ports.acts.values())} acts in {at_ports.seconds:.0f} s, {len(at_ports.findings)} findings"
        )
        print(
            f"  its memory: {before:.0f} MiB, at most {most:.0f}, then {after:.0f}; {at_ports.slope_mib_h:+.1f} MiB/h"
        )
        print(f"  its descriptors: {at_ports.descriptors}; what it refused: {at_ports.refused}")
        print(
            f"  the living tenant: {at_ports.live_ops} ops, none lost or doubled; slowest {at_ports.live_slowest_s} s"
        )


if __name__ == "__main__":
    sys.exit(main())
