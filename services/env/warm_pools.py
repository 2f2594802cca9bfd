"""Pools of simulators that stand ready for the next task.

In: a task and how to run it. Out: a pool, lent for as long as it is used. Never: a simulator made anew while one that
fits stands idle, or more worker processes than the limit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from joynexus.simulation.interface import SimulatorOptions
from joynexus.simulation.pool import Deadlines, SimulatorPool
from services.env.simulators.registry import open_pool

ROWS = 8  # environments of a worker process: their questions go to the policy together


class WarmPools:
    """Pools that stand ready for the next task, one worker process each.

    Args:
        limit: pools alive at once; an idle one of another task makes room.
        deadlines: for each kind of call.
    """

    def __init__(self, limit: int, deadlines: Deadlines) -> None:
        self._limit, self._deadlines = limit, deadlines
        self._lock = threading.Lock()
        self._idle: list[tuple[tuple[str, SimulatorOptions], SimulatorPool]] = []
        self._lent = 0

    @contextmanager
    def lend(self, task: str, options: SimulatorOptions) -> Iterator[SimulatorPool]:
        """Lend a pool of `ROWS` rows; one that was in use when an exception came is thrown away."""
        key = (task, options)
        with self._lock:
            fitting = next((index for index, (other, _) in enumerate(self._idle) if other == key), None)
            pool = self._idle.pop(fitting)[1] if fitting is not None else None
            self._lent += 1
            surplus = len(self._idle) + self._lent - self._limit
            dropped = [self._idle.pop(0)[1] for _ in range(min(max(0, surplus), len(self._idle)))]
        for other in dropped:
            other.close()
        try:
            if pool is None:
                pool = open_pool(task, ROWS, options=options, deadlines=self._deadlines)
            yield pool
        except BaseException:
            if pool is not None:
                pool.close()
            with self._lock:
                self._lent -= 1
            raise
        with self._lock:
            self._lent -= 1
            self._idle.append((key, pool))

    def close(self) -> None:
        """End all idle pools."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, pool in idle:
            pool.close()
