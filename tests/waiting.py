"""Waiting in tests: for a condition, never for a time; and what goes on meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def until(true: Callable[[], object], seconds: float = 90.0) -> None:
    """Look again and again until a condition holds; fail if it does not in time."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"it never came to be within {seconds:g} s"
        time.sleep(0.01)


@contextmanager
def meanwhile(work: Callable[[threading.Event], object], *, seconds: float = 300.0) -> Iterator[None]:
    """Do something in another thread; it must have gone well once this is over.

    Args:
        work: is told, by the event, when the block has ended.
        seconds: that it may take from then on.
    """
    over = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work(over)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(seconds)
    assert not thread.is_alive(), "it never came to an end"
    assert not failures, failures
