"""The master's clock: what it calls now.

In: the clock on the wall, once; the monotonic one. Out: seconds since the Unix epoch. Never: a jump, and so no silence
of others that is the master's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_S = 1.25
"""A loop that waits a second at most looks more often, unless it stands still."""


class Clock:
    """Seconds since the Unix epoch, without those for which nobody looked.

    A process that was stopped, or waited for a disk that hangs, has not read meanwhile what others said: by its clock
    they were silent for a moment.

    Args:
        wall: seconds since the Unix epoch.
        monotonic: seconds that never jump back.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._looked = monotonic()
        self._now = wall()

    def __call__(self) -> float:
        """Return the time."""
        looked = self._monotonic()
        self._now += min(looked - self._looked, LONGEST_S)
        self._looked = looked
        return self._now
