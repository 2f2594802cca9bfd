"""The dependency audit says what it found, and never passes in silence where it could find nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).resolve().parents[3] / "scripts" / "audit.py"


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SOUND = {"name": "pip", "version": "26.0", "vulns": []}
UNKNOWN = {"name": "ours", "skip_reason": "not found"}


def test_a_vulnerable_package_is_named_with_its_remedy_and_fails(audit: ModuleType) -> None:
    vuln = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.1"]}
    report = {"dependencies": [SOUND, {"name": "old", "version": "2.0", "vulns": [vuln]}, UNKNOWN]}
    lines, code = audit.judge(report, required=False)
    assert lines == [
        "old 2.0 has PYSEC-1, CVE-1: use 2.1",
        "dependency audit: 1 known vulnerabilities in 2 packages, 1 are not in the database",
    ]
    assert code == 1


def test_sound_packages_pass_with_their_number(audit: ModuleType) -> None:
    assert audit.judge({"dependencies": [SOUND]}, required=True) == (
        ["dependency audit: no known vulnerabilities in 1 packages"],
        0,
    )


@pytest.mark.parametrize("report", [{}, {"dependencies": [UNKNOWN]}])
def test_where_nothing_could_be_audited_one_line_says_so_and_fails_only_if_required(
    audit: ModuleType, report: dict[str, object]
) -> None:
    for required in (False, True):
        lines, code = audit.judge(report, required=required)
        assert len(lines) == 1
        assert "nothing was audited" in lines[0]
        assert code == required


def test_an_address_that_does_not_answer_is_not_reachable(audit: ModuleType) -> None:
    assert not audit.reachable("http://127.0.0.1:9/nothing", "id")
