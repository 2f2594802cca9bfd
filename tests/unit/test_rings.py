"""Rings of tests: a few failures of real processes run once more and are told; others fail the ring."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "test_rings.py"
ONCE = """
from pathlib import Path


def test_{name}():
    mark = Path(__file__).with_suffix(".{name}")
    first = not mark.exists()
    mark.touch()
    assert not first
"""
HANGS = """
import threading

import pytest

pytestmark = pytest.mark.timeout(1)


@pytest.fixture
def never():
    yield
    threading.Event().wait()


def test_hangs(never):
    threading.Event().wait()


def test_after_it():
    pass
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], int]:
    """Run a ring that consists of one file."""
    spec = importlib.util.spec_from_file_location("rings", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    rings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rings)
    monkeypatch.setattr(rings, "ROOT", tmp_path)
    monkeypatch.setattr(rings, "WORKERS", {"process": 1, "unit": 1})

    def run(ring: str, tests: str) -> int:
        folder = tmp_path / "tests" / ring
        folder.mkdir(parents=True)
        (folder / "test_it.py").write_text(tests)
        code = rings.main([ring])
        assert isinstance(code, int)
        return code

    return run


def test_failure_that_does_not_come_again_is_told_and_passes(
    run: Callable[[str, str], int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("process", ONCE.format(name="stall")) == 0
    said = capfd.readouterr().out
    assert "1 failed" in said
    assert "passed, 1 at the second try" in said


@pytest.mark.parametrize(
    ("ring", "tests"),
    [
        ("process", "def test_it():\n    assert False\n"),
        ("process", "".join(ONCE.format(name=name) for name in "abc")),
        ("unit", ONCE.format(name="pure")),
    ],
    ids=["fails again", "too many", "ring without processes"],
)
def test_failure_that_is_no_stall_fails_the_ring(
    run: Callable[[str, str], int], capfd: pytest.CaptureFixture[str], ring: str, tests: str
) -> None:
    assert run(ring, tests) == 1
    assert "FAILED" in capfd.readouterr().out.splitlines()[-2]


def test_what_hangs_after_its_deadline_ends_and_is_named(
    run: Callable[[str, str], int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests").mkdir()
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path / "tests")
    assert run("unit", HANGS) == 1
    said = capfd.readouterr()
    assert "crashed while running 'tests/unit/test_it.py::test_hangs'" in said.out
    assert ", 1 passed, 1 error in " in said.out, "the others of its file go on"
    assert said.err.count("in never") == 1, "it is not tried again"
