"""The order of tests, and an end for those that do not end.

Files that take long come first, so that no worker has one left when the others are done. A test's deadline interrupts
it once: what hangs after that (a fixture that waits for a thread that has failed) ends with the process that runs it,
whose threads are shown; with several processes the test is named and the others go on.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Generator

import pytest

_GRACE = 1.2
_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    assert sys.__stderr__ is not None
    config.stash[_stderr] = os.dup(sys.__stderr__.fileno())  # a test's own is taken from it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def _ends(item: pytest.Item) -> Generator[None, object, object]:
    mark = item.get_closest_marker("timeout")
    seconds = float(mark.args[0] if mark else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(_GRACE * seconds, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = pytest.hookimpl(wrapper=True)(_ends)
