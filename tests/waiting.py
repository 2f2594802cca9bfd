"""Waiting in tests: for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(true: Callable[[], object], seconds: float = 90.0) -> None:
    """Look again and again until a condition holds; fail if it does not in time."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"it never came to be within {seconds:g} s"
        time.sleep(0.01)
