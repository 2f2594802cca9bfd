"""The table of cases tells what was found, also by several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = """
import pytest

@pytest.mark.case(7, "somebody hangs")
def test_good(verdict):
    with verdict("I1"):
        assert True
    with verdict("I3"):
        assert True

@pytest.mark.case(3, "somebody dies")
def test_bad(verdict):
    with verdict("I3"):
        assert 1 == 2
"""


@pytest.mark.parametrize("spread", [[], ["-n", "2"]], ids=["one process", "two"])
def test_table_names_outcome_and_invariants_of_each_case(tmp_path: Path, spread: list[str]) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.chaos.conftest", "-c", "/dev/null", *spread]
    command += ["--rootdir", str(tmp_path), str(tmp_path / "test_cases.py")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["3", "somebody", "dies", "FAILED", "I3:BROKEN"] in [[*line[:4], *line[5:]] for line in lines]
    assert ["7", "somebody", "hangs", "passed", "I1", "I3"] in [[*line[:4], *line[5:]] for line in lines]
