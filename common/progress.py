"""Is the work loop getting on? A counter, named phases with deadlines, and a watchdog that ends a wedged process.

In: calls of the threads that work (`advance`, `phase`). Out: what a beat says, and whether something is overdue.
Never: a verdict from the transport: sockets answer heartbeats even when the work loop hangs; it is judged here.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

EXIT_WEDGED = 124
"""Exit code of a process that its watchdog ended."""

_LATE_S = 1.0
"""A watchdog that looks so much later than it meant to was itself held up."""


class _Phase:
    def __init__(self, name: str, deadline_s: float, now: float) -> None:
        self.name = name
        self.deadline_s = deadline_s
        self.since = now
        self.advanced = now


class Progress:
    """Progress of one process; every thread that works reports here, each within phases of its own.

    Example::

        with progress.phase("loading", deadline_s=300):
            model = load()
        with progress.phase("working", deadline_s=60):
            for item in items:
                do(item)
                progress.advance()

    Args:
        clock: seconds, monotonic.
        cpu: busy seconds of the calling thread; on a GPU pass `lambda: 0.0` and report `add_busy` from CUDA events.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._cpu = cpu
        self._lock = threading.Lock()
        self._phases: dict[int, list[_Phase]] = {}  # per thread, the innermost last
        self._cpu_seen: dict[int, float] = {}
        self._spent: dict[int, float] = {}  # by each thread since its outermost phase began
        self._counter = 0
        self._busy_s = 0.0

    def advance(self) -> None:
        """Say that a piece of work got done; call it several times within the phase's deadline."""
        thread, now, cpu = threading.get_ident(), self._clock(), self._cpu()
        with self._lock:
            self._counter += 1
            self._count_busy(thread, cpu)
            for phase in self._phases.get(thread, ()):
                phase.advanced = now

    @contextmanager
    def phase(self, name: str, *, deadline_s: float) -> Iterator[Callable[[], float]]:
        """Work in a phase; without `advance` for `deadline_s` seconds the process is taken for wedged.

        A phase within a phase counts alone until it ends. CPU time of the thread within phases is its busy time: what
        this gives returns it, and what `add_busy` was told on this thread, since the outermost phase began.
        """
        thread, cpu = threading.get_ident(), self._cpu()
        with self._lock:
            stack = self._phases.setdefault(thread, [])
            if not stack:
                self._cpu_seen[thread], self._spent[thread] = cpu, 0.0
            stack.append(_Phase(name, deadline_s, self._clock()))
        try:
            yield self._spent_here
        finally:
            now, cpu = self._clock(), self._cpu()
            with self._lock:
                self._counter += 1
                self._count_busy(thread, cpu)
                stack.pop()
                for outer in stack:
                    outer.advanced = now
                if not stack:
                    del self._phases[thread], self._cpu_seen[thread], self._spent[thread]

    def add_busy(self, seconds: float) -> None:
        """Add busy time that this thread's CPU clock does not see: of a device, or of a child process."""
        with self._lock:
            self._add(threading.get_ident(), seconds)

    def report(self) -> tuple[int, str, float]:
        """Return counter, phase and busy seconds; the phase is `idle`, or the one that is open longest."""
        with self._lock:
            current = [stack[-1] for stack in self._phases.values()]
            phase = min(current, key=lambda phase: phase.since).name if current else "idle"
            return self._counter, phase, self._busy_s

    def overdue(self) -> str:
        """Return a sentence on the first phase that missed its deadline, or an empty string."""
        now = self._clock()
        with self._lock:
            for stack in self._phases.values():
                phase = stack[-1]
                if now - phase.advanced > phase.deadline_s:
                    return (
                        f"no progress for {now - phase.advanced:.1f} s in phase '{phase.name}', "
                        f"which allows {phase.deadline_s:g} s"
                    )
        return ""

    def longest_deadline_s(self) -> float:
        """Return the longest deadline among open phases; 0 without one."""
        with self._lock:
            return max((stack[-1].deadline_s for stack in self._phases.values()), default=0.0)

    def _count_busy(self, thread: int, cpu: float) -> None:
        if thread in self._cpu_seen:
            self._add(thread, cpu - self._cpu_seen[thread])
            self._cpu_seen[thread] = cpu

    def _add(self, thread: int, seconds: float) -> None:
        self._busy_s += seconds
        if thread in self._spent:
            self._spent[thread] += seconds

    def _spent_here(self) -> float:
        thread, cpu = threading.get_ident(), self._cpu()
        with self._lock:
            self._count_busy(thread, cpu)
            return self._spent[thread]


class Watchdog:
    """Ends the process when its progress is overdue, so that a supervisor starts it anew.

    Args:
        progress: whose deadlines count.
        exit: how to end; tests pass something milder.
        period_s: how often to look.
        native: also end the process when native code holds the interpreter for longer than any deadline allows
            (then no Python thread can look); uses the process's one `faulthandler` timer.
    """

    def __init__(
        self,
        progress: Progress,
        *,
        exit: Callable[[int], object] = os._exit,
        period_s: float = 0.5,
        native: bool = True,
    ) -> None:
        self._progress = progress
        self._exit = exit
        self._period_s = period_s
        self._native = native
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start looking."""
        self._thread.start()

    def stop(self) -> None:
        """Stop looking."""
        self._stop.set()
        self._thread.join()
        if self._native:
            faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        clock = self._progress._clock
        looked = clock()
        while not self._stop.wait(self._period_s):
            late = clock() - looked > self._period_s + _LATE_S
            looked = clock()
            if late:  # the whole process stood still (SIGSTOP, a busy host): its work gets a period to move on
                continue
            if self._native:
                # Runs out only if this loop cannot run for so long.
                faulthandler.dump_traceback_later(30.0 + self._progress.longest_deadline_s(), exit=True)
            sentence = self._progress.overdue()
            if sentence:
                faulthandler.dump_traceback(all_threads=True)
                log.critical("watchdog: %s; the process ends itself", sentence)  # last: health tells how a log ends
                self._exit(EXIT_WEDGED)
                return
