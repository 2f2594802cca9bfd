"""Busy time of a piece of work: CPU time of this thread, or time between two CUDA events.

In: a device. Out: seconds. Never: wall time of a CPU, which would charge a tenant for its neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Elapsed = Callable[[], float]
"""Returns the busy seconds since it was made."""


class BusyClock:
    """Starts measurements on one device."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def start(self) -> Elapsed:
        """Begin a measurement on the calling thread.

        Calling the result on a GPU waits until the work given to it so far is done.
        """
        if self._device.type != "cuda":
            began = time.thread_time()
            return lambda: time.thread_time() - began
        first = self._record()

        def elapsed() -> float:
            now = self._record()
            now.synchronize()
            return float(first.elapsed_time(now)) / 1000.0

        return elapsed

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record(torch.cuda.current_stream(self._device))
        return event

    def overhead(self) -> Overhead:
        """Begin to count what lies between measurements on the calling thread."""
        return Overhead(counts=self._device.type != "cuda")


class Overhead:
    """CPU time of a thread between the parts of its work that are measured one by one.

    Args:
        counts: whether it is busy time at all: on a GPU only the parts are.
    """

    def __init__(self, *, counts: bool) -> None:
        self._counts = counts
        self._began = time.thread_time()
        self._counted_s = 0.0

    def part(self, seconds: float) -> None:
        """A part has taken so many of the thread's seconds."""
        self._counted_s += seconds

    def take(self) -> float:
        """Return the seconds that were in no part, since the last call."""
        if not self._counts:
            return 0.0
        rest = max(0.0, time.thread_time() - self._began - self._counted_s)
        self._counted_s += rest
        return rest
