"""A simulated clock, and processes that wait by it.

In: generators that yield what they wait for. Out: the order in which things happen: by time, then by who asked first.
Never: a real clock, a thread, or randomness: the same programme runs the same way every time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

Process = Generator["Future", Any, Any]
"""Yields futures and is sent their values."""


class Future:
    """A value that comes later."""

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self._waiting: list[Callable[[Any], None]] = []

    def resolve(self, value: Any = None) -> None:
        """The value is there."""
        assert not self.done, "a future is resolved once"
        self.done, self.value = True, value
        for call in self._waiting:
            call(value)

    def then(self, call: Callable[[Any], None]) -> None:
        """Call with the value, at once if it is there."""
        if self.done:
            call(self.value)
        else:
            self._waiting.append(call)


class Simulation:
    """The clock and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Have something happen a while from now."""
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), call))

    def sleep(self, delay_s: float) -> Future:
        """Return a future that is resolved a while from now."""
        future = Future()
        self.after(delay_s, future.resolve)
        return future

    def spawn(self, process: Process) -> Future:
        """Run a process; its future has what the process returns."""
        ended = Future()

        def step(value: Any) -> None:
            try:
                awaited = process.send(value)
            except StopIteration as stop:
                ended.resolve(stop.value)
            else:
                awaited.then(step)

        step(None)
        return ended

    def run(self, until: Callable[[], bool]) -> None:
        """Let time pass until a condition holds."""
        while not until():
            assert self._heap, f"at {self.now:.1f} s nothing is left to happen, and the condition does not hold"
            at, _, call = heapq.heappop(self._heap)
            self.now = at
            call()


def gather(futures: Sequence[Future]) -> Future:
    """Return a future of all values, in order."""
    left = len(futures)
    every = Future()

    def arrived(_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            every.resolve([future.value for future in futures])

    if not futures:
        every.resolve([])
    for future in futures:
        future.then(arrived)
    return every


class Station:
    """A device that does one piece of work at a time, in the order of asking.

    Attributes:
        busy_s: time in which it computed.
        held_s: time in which it could do nothing else (it computed, or waited for a disk).
    """

    def __init__(self, simulation: Simulation) -> None:
        self.busy_s = 0.0
        self.held_s = 0.0
        self._simulation = simulation
        self._waiting: deque[tuple[float, Future]] = deque()
        self._occupied = False

    def work(self, seconds: float, *, busy_s: float | None = None) -> Future:
        """Have a piece of work done; `busy_s` of it is computing (all of it unless said otherwise)."""
        self.held_s += seconds
        self.busy_s += seconds if busy_s is None else busy_s
        future = Future()
        self._waiting.append((seconds, future))
        self._next()
        return future

    def _next(self) -> None:
        if self._occupied or not self._waiting:
            return
        self._occupied = True
        seconds, future = self._waiting.popleft()

        def finished() -> None:
            self._occupied = False
            future.resolve()
            self._next()

        self._simulation.after(seconds, finished)
