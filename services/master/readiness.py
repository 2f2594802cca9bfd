"""Which simulators env workers have ready, for whoever gives them work: setting one up may take longer than a task.

In: what workers were given. Out: whether one has ready what a task needs; how many tenants to pass over for that.
Never: a tenant that is passed over for long, or more remembered than a worker keeps.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Protocol, TypeVar

from joynexus.contract import Camera
from services.master.lanes import Counters, Lanes
from services.master.worker import Worker

Setup = tuple[str, tuple[Camera, ...]]
"""A simulator task and its cameras."""

_PASSED_OVER, _LEAD = 8, 2.0
"""A worker takes what it has ready before the work of so many tenants, if they used less by so many tasks at most."""


class Prepared(Protocol):
    """What has to be known of a piece of work."""

    setup: Setup | None


P = TypeVar("P", bound=Prepared)


class Readiness:
    """Of all workers, by name."""

    def __init__(self) -> None:
        self._ready: defaultdict[str, OrderedDict[Setup, None]] = defaultdict(OrderedDict)  # newest last

    def has(self, worker: Worker, task: Prepared | None) -> bool:
        """Tell whether a worker has ready what a task needs."""
        return task is not None and task.setup in self._ready[worker.name]

    def count(self, worker: Worker) -> int:
        """Return how many setups a worker has ready."""
        return len(self._ready[worker.name])

    def note(self, worker: Worker, task: Prepared) -> None:
        """A worker begins a task. It keeps some simulators ready: about as many as it runs at once."""
        if task.setup is None:
            return
        ready = self._ready[worker.name]
        ready[task.setup] = None
        ready.move_to_end(task.setup)
        while len(ready) > max(1, worker.register.credit.get("simulator", 1)):
            ready.popitem(last=False)

    def forget(self, worker: Worker) -> None:
        """A worker is dead."""
        self._ready.pop(worker.name, None)

    def look_ahead(self, worker: Worker, lanes: Lanes[P], counters: Counters, cost_s: float) -> int:
        """Return how many tenants to pass over, so that a worker takes what it has ready for; 0 if there is nothing.

        Nobody waits for long: each task, which takes about `cost_s`, counts for its tenant, so the one that is
        preferred soon leads by too much.
        """
        found, skips, first = False, 0, lanes.head()
        while skips <= _PASSED_OVER and first is not None and (tenant := lanes.head()) is not None:
            same = counters.priority(tenant) == counters.priority(first)
            if not same or counters.used(tenant) > counters.used(first) + _LEAD * cost_s:
                break
            if self.has(worker, lanes.peek()):
                found = True
                break
            lanes.skip()
            skips += 1
        lanes.unskip()
        return skips if found else 0
