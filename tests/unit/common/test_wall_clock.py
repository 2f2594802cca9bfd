"""Nothing waits, ends or is judged by a clock that may be set: deadlines are told in monotonic time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("services", "common", "joynexus")
READ = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}

PLACES = {
    "services/master/clock.py": "once, at the start: what a job's times count from; monotonic from there",
    "common/backup.py": "when a backup was made, for people to read",
    "common/dump.py": "of files in an archive, for people to read",
    "joynexus/keys.py": "until when a key that was replaced is let in: hours, and over restarts of the host",
    "common/blobs.py": "against times of files, days apart, and twice before anything goes",
    "common/scratch.py": "against times of files that a killed process left for a day",
    "services/health/service.py": "when a decision was made, for people to read",
    "joynexus/vla/feature_store.py": "against times of files in a cache: what goes is computed again",
}
CORES = ("services.master.core", "services.health.core", "joynexus.client._core", "common.session")
STRUCTS = {"joynexus.local", "joynexus.keys"}
"""Modules with clocks of which cores take structs alone."""
CALENDARS = {"services.master.calendar"}
"""Modules that reckon with times which they are told; that they read no clock, the first test holds."""


def test_the_clock_on_the_wall_is_read_in_few_places_each_for_a_reason() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if _reads_the_wall_clock(ast.parse(path.read_text()))
    }
    assert found == set(PLACES)


@pytest.mark.parametrize("core", CORES)
def test_cores_are_told_the_time_and_have_no_clock(core: str) -> None:
    for module in _needed(core):
        kinds = ("time",) if module in CALENDARS else ("time", "datetime")
        clocks = {name for name in _imports(module) if name.partition(".")[0] in kinds}
        assert not clocks, f"{module} imports {clocks}"


def test_a_clock_would_be_found() -> None:
    for code in (
        "import time\nx = time.time()",
        "from time import time_ns",
        "import datetime\ndatetime.datetime.now()",
    ):
        assert _reads_the_wall_clock(ast.parse(code))
    assert "time" in _imports("common.runtime") | _imports("common.worker_io")


def _reads_the_wall_clock(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and any(f".{ast.unparse(node)}".endswith(f".{name}") for name in READ):
            return True
        if isinstance(node, ast.ImportFrom) and any(f"{node.module}.{alias.name}" in READ for alias in node.names):
            return True
    return False


def _needed(first: str) -> Iterator[str]:
    """A module and what it imports of the project, and so on."""
    seen, waiting = set(), [first]
    while waiting:
        module = waiting.pop()
        if module in seen | STRUCTS or _file(module) is None:
            continue
        seen.add(module)
        yield module
        waiting += [name for name in _imports(module) if name.partition(".")[0] in PACKAGES]


def _imports(module: str) -> set[str]:
    names: set[str] = set()
    path = _file(module)
    assert path is not None
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _file(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None
