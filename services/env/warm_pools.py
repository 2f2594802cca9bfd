"""Simulators that stand ready for the next task.

In: a task, how to run it, how many rows are of use. Out: a pool of them, lent for as long as it is used. Never: more
worker processes at work than the limit, or a simulator made anew while one that fits stands idle.

Making an environment costs seconds to a minute of CPU, an idle one costs memory alone. So as many processes again as
may work stay idle while there is memory, and two tasks that take turns do not push each other out. Who goes first is
who has been idle for longest, counted in times of its own making.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from joynexus.simulation.interface import SimulatorOptions
from joynexus.simulation.nursery import nurseries_cpu_s
from joynexus.simulation.pool import Deadlines, SimulatorPool
from services.env.simulators.registry import family_of, open_pool

_LOOK_S = 1.0
_MIN_MAKE_S = 0.1
_SHORT_OF_MEMORY = 0.2  # of the machine's memory, or of the container's
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


class _Idle(NamedTuple):
    """A pool of one process that nobody uses."""

    key: tuple[str, SimulatorOptions]
    pool: SimulatorPool
    since: float

    def times_made(self, now: float) -> float:
        """How often it could have been made while it was idle."""
        return (now - self.since) / max(self.pool.make_s, _MIN_MAKE_S)


class WarmPools:
    """Lends pools.

    Args:
        limit: worker processes at work at once.
        deadlines: for each kind of call.
    """

    def __init__(self, limit: int, deadlines: Deadlines) -> None:
        self._limit, self._deadlines = limit, deadlines
        self._changed = threading.Condition()
        self._idle: list[_Idle] = []
        self._lent = 0
        self._imported_s = nurseries_cpu_s()

    @contextmanager
    def lend(
        self,
        task: str,
        options: SimulatorOptions,
        *,
        rows: int = 1,
        alive: Callable[[], None] = lambda: None,
        busy: Callable[[float], None] = lambda seconds: None,
    ) -> Iterator[SimulatorPool]:
        """Lend a pool of a task, once a process may work.

        One that was in use when an exception came is thrown away.

        Args:
            task: its name.
            options: cameras and episode limit.
            rows: how many are of use. A pool has as many processes as that takes, but at most half of those that may
                still work, rounded up: whoever comes next finds some. Results never depend on it.
            alive: called now and then while this waits; what it raises ends the waiting.
            busy: told the CPU seconds of processes that this took, bit by bit, however it ends: of the pool while it
                was lent, of making what was not there, and of what that had to import, for all who come later.

        Raises:
            ValueError: if there is no such task.
        """
        key, family = (task, options), family_of(task)
        count, fitting = self._take(key, -(-rows // family.rows), alive)
        lent = [idle.pool for idle in fitting]
        before_s = sum(pool.cpu_s() for pool in lent)
        try:
            if len(lent) < count:
                try:
                    while len(lent) < count:
                        lent.append(open_pool(task, family.rows, options=options, deadlines=self._deadlines))
                finally:
                    busy(self._newly_imported_s())  # now: whoever is done next has imported nothing
            yield SimulatorPool.joined(lent)
        except BaseException:
            self._give_back(count, [])
            for pool in lent:
                pool.close()
            raise
        finally:
            busy(sum(pool.cpu_s() for pool in lent) - before_s)
        now = monotonic()
        self._give_back(count, [_Idle(key, pool, now) for pool in lent])

    def close(self) -> None:
        """End all idle processes."""
        with self._changed:
            idle, self._idle = self._idle, []
        for one in idle:
            one.pool.close()

    def _take(
        self, key: tuple[str, SimulatorOptions], wanted: int, alive: Callable[[], None]
    ) -> tuple[int, list[_Idle]]:
        """Return how many processes may work now, and those of them that are there; push out others for the rest."""
        with self._changed:
            while self._lent >= self._limit:
                self._changed.wait(_LOOK_S)
                alive()
            count = min(wanted, (self._limit - self._lent + 1) // 2)
            fitting = [idle for idle in reversed(self._idle) if idle.key == key][:count]
            self._lent += count
            self._idle = [idle for idle in self._idle if idle not in fitting]
            surplus = self._lent + len(self._idle) - self._limit * (1 if _short_of_memory() else 2)
            now = monotonic()
            oldest = sorted(self._idle, key=lambda idle: idle.times_made(now), reverse=True)[: max(0, surplus)]
            self._idle = [idle for idle in self._idle if idle not in oldest]
        for idle in oldest:
            idle.pool.close()
        return count, fitting

    def _newly_imported_s(self) -> float:
        """Return the CPU seconds of imports that nobody was told of."""
        with self._changed:
            imported_s = nurseries_cpu_s()
            new_s, self._imported_s = max(0.0, imported_s - self._imported_s), imported_s
            return new_s

    def _give_back(self, count: int, idle: list[_Idle]) -> None:
        with self._changed:
            self._lent -= count
            self._idle += idle
            self._changed.notify_all()


def _short_of_memory() -> bool:
    """Tell whether little memory is left on this machine or under this container's limit (Linux, cgroup v2)."""
    return any(left < _SHORT_OF_MEMORY * total for left, total in (_machines(), _containers()))


def _machines() -> tuple[int, int]:
    """Return KiB left and KiB of this machine."""
    memory = _numbers(_MEMINFO, "MemAvailable:", "MemTotal:")
    return memory.get("MemAvailable:", 0), memory.get("MemTotal:", 0)


def _containers() -> tuple[int, int]:
    """Return bytes left and bytes of this container, zeros if it has no limit; files in memory can be let go of."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # `max`: no limit
        return 0, 0
    return limit - used + _numbers(_CGROUP / "memory.stat", "inactive_file").get("inactive_file", 0), limit


def _numbers(path: Path, *names: str) -> dict[str, int]:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if line[0] in names}
