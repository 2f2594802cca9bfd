"""The order of tests, and an end for those that do not end.

Files that take long come first, so that no worker has one left when the others are done. A test's deadline interrupts
it once: what hangs after that (a fixture that waits for a thread that has failed) ends with the process that runs it,
whose threads are shown; with several processes the test is named, the next one does not try it again, and others go on.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

_GRACE = 1.2
_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    assert sys.__stderr__ is not None
    config.stash[_stderr] = os.dup(sys.__stderr__.fileno())  # a test's own is taken from it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def _begun(item: pytest.Item) -> Path:
    """Return the file that is there while a test of this run is under way; it stays if its process ends in it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    return Path(tempfile.gettempdir()) / f"test-{run}-{hashlib.blake2s(item.nodeid.encode()).hexdigest()}"


def _ends(item: pytest.Item) -> Generator[None, object, object]:
    mark = item.get_closest_marker("timeout")
    seconds = float(mark.args[0] if mark else item.config.getini("timeout") or 0)
    if not seconds or item.config.getoption("usepdb"):
        return (yield)
    faulthandler.dump_traceback_later(_GRACE * seconds, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    begun = _begun(item)
    if begun.exists():  # xdist gives the file to the next process from this test on
        pytest.fail("a process has ended in this test: it is not tried again", pytrace=False)
    begun.touch()
    return (yield from _ends(item))


pytest_runtest_call = pytest.hookimpl(wrapper=True)(_ends)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield from _ends(item))
    finally:
        _begun(item).unlink(missing_ok=True)
