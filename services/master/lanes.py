"""Fair queues: a lane for each tenant, and next comes the tenant that has used least (a virtual token counter).

In: work by tenant, the device seconds it took, weights and priorities. Out: the next piece of work. Never: a scan over
the tenants or over what waits for a piece of work, or credit for having been idle.

The counter is S-LoRA's VTC over busy seconds (Sheng et al., "Fairness in Serving Large Language Models", 2024): it
grows with use, divided by the tenant's weight, and is lifted to the least counter in the queue when an idle tenant
comes back, so that nobody saves up a claim. A tenant with 10,000 pieces waits in its own lane. A lane of higher
priority comes before all of lower ones; the counter decides among lanes of one priority.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_ROUNDING = 1e-9
"""A counter that grew by less has not: an estimate that was right leaves a rounding error when it is trued up, and then
tenants with equal counters would all be entered anew at once."""


class Counters:
    """Use by tenant, in device seconds divided by weight. May be shared by several queues.

    Attributes:
        changes: how often a weight or priority was set.
    """

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._priorities: dict[str, int] = {}
        self.changes = 0

    def used(self, tenant: str) -> float:
        """Return a tenant's counter."""
        return self._used.get(tenant, 0.0)

    def seconds(self, tenant: str) -> float:
        """Return the device seconds that a tenant was charged."""
        return self._seconds.get(tenant, 0.0)

    def weight(self, tenant: str) -> float:
        """Return a tenant's weight."""
        return self._weights.get(tenant, 1.0)

    def priority(self, tenant: str) -> int:
        """Return a tenant's priority."""
        return self._priorities.get(tenant, 0)

    def rank(self, tenant: str) -> tuple[int, float]:
        """Return what decides who is first: the least of these."""
        return -self.priority(tenant), self.used(tenant)

    def charge(self, tenant: str, seconds: float) -> None:
        """Add use: an estimate when work is given out, the (signed) difference when its cost is known."""
        if math.isfinite(seconds):  # else a worker's clock has gone wrong, which must not confuse the order
            self._used[tenant] = self._used.get(tenant, 0.0) + seconds / self._weights.get(tenant, 1.0)
            self._seconds[tenant] = self._seconds.get(tenant, 0.0) + seconds

    def lift(self, tenant: str, floor: float) -> None:
        """Raise a counter to at least `floor`."""
        if self.used(tenant) < floor:
            self._used[tenant] = floor

    def set(self, tenant: str, weight: float, priority: int) -> None:
        """A tenant with weight 2 gets twice the share of one with weight 1; a higher priority goes first."""
        if (self.weight(tenant), self.priority(tenant)) != (weight, priority):
            self._weights[tenant] = weight
            self._priorities[tenant] = priority
            self.changes += 1


_Entry = tuple[float, int, str]


class Lanes(Generic[T]):
    """First in, first out for each tenant; among tenants the highest priority, then the least counter first.

    There is a heap for each priority (there are few), with one entry for each tenant that has work, with the counter as
    it was when the entry was made. A counter that grew meanwhile is noticed when the entry comes up; one that shrank
    (an estimate was too high) is noticed one turn later. Only a change of weights or priorities makes all entries anew.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._changes = counters.changes
        self._lanes: dict[str, deque[T]] = {}
        self._heaps: dict[int, list[_Entry]] = {}
        self._skipped: list[tuple[int, _Entry]] = []
        self._popped: str | None = None  # has more work, and no entry yet
        self._turn = 0  # breaks ties: whoever was served longest ago comes first
        self._floors: dict[int, float] = {}
        self._size = 0

    def __len__(self) -> int:
        """Number of pieces that wait."""
        return self._size

    def push(self, tenant: str, item: T) -> None:
        """Add work at the end of its tenant's lane; a tenant that had none here gets no credit for that."""
        if tenant not in self._lanes:
            self._refresh()
            priority = self._counters.priority(tenant)
            self._first(priority)  # brings the floor up to date
            self._counters.lift(tenant, self._floors.get(priority, 0.0))
        self.put_back(tenant, item, front=False)

    def put_back(self, tenant: str, item: T, *, front: bool) -> None:
        """Add work that was only just taken: its tenant was never away."""
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = deque()
            self._enter(tenant)
        if front:
            lane.appendleft(item)
        else:
            lane.append(item)
        self._size += 1

    def pop(self) -> T | None:
        """Take the next piece of work; None if there is none."""
        tenant = self.head()
        if tenant is None:
            return None
        heapq.heappop(self._heaps[self._counters.priority(tenant)])
        lane = self._lanes[tenant]
        item = lane.popleft()
        self._size -= 1
        if lane:
            self._popped = tenant
        else:
            del self._lanes[tenant]
        return item

    def remove(self, tenant: str, unwanted: Callable[[T], bool]) -> None:
        """Take out those of a tenant's pieces that nobody wants any more."""
        lane = self._lanes.get(tenant)
        if lane is None:
            return
        self._refresh()
        kept = [item for item in lane if not unwanted(item)]
        self._size -= len(lane) - len(kept)
        lane.clear()
        lane.extend(kept)
        if kept:
            return
        del self._lanes[tenant]
        for heap in self._heaps.values():
            heap[:] = [entry for entry in heap if entry[2] != tenant]
            heapq.heapify(heap)

    def head(self) -> str | None:
        """Return the tenant whose turn it is; None if nothing waits."""
        self._refresh()
        priorities = sorted(self._heaps, reverse=True) if len(self._heaps) > 1 else list(self._heaps)
        for priority in priorities:
            tenant = self._first(priority)
            if tenant is not None:
                return tenant
            del self._heaps[priority]
        return None

    def peek(self) -> T | None:
        """Return the next piece of work without taking it."""
        tenant = self.head()
        return None if tenant is None else self._lanes[tenant][0]

    def skip(self) -> None:
        """Leave the tenant out whose turn it is, until `unskip`; its place is kept."""
        tenant = self.head()
        if tenant is not None:
            priority = self._counters.priority(tenant)
            self._skipped.append((priority, heapq.heappop(self._heaps[priority])))

    def unskip(self) -> None:
        """Those who were left out take their places again."""
        for priority, entry in self._skipped:
            heapq.heappush(self._heaps.setdefault(priority, []), entry)
        self._skipped.clear()

    def waiting(self, tenant: str) -> int:
        """Number of a tenant's pieces that wait."""
        return len(self._lanes.get(tenant, ()))

    def tenants(self) -> Iterator[str]:
        """Tenants that have work here."""
        return iter(self._lanes)

    def of(self, tenant: str) -> Iterator[T]:
        """A tenant's pieces, in order."""
        return iter(self._lanes.get(tenant, ()))

    def _first(self, priority: int) -> str | None:
        """Return the tenant with the least counter among those of a priority."""
        heap = self._heaps.get(priority)
        while heap:
            counter, _, tenant = heap[0]
            used = self._counters.used(tenant)
            if not used > counter + abs(counter) * _ROUNDING:  # what was given back may leave a hair less than nothing
                if not self._skipped:  # else somebody who waits has used less
                    self._floors[priority] = max(self._floors.get(priority, 0.0), used)
                return tenant
            heapq.heappop(heap)
            self._enter(tenant)
        return None

    def _enter(self, tenant: str) -> None:
        self._turn += 1
        heap = self._heaps.setdefault(self._counters.priority(tenant), [])
        heapq.heappush(heap, (self._counters.used(tenant), self._turn, tenant))

    def _refresh(self) -> None:
        """Bring the heaps up to date; all entries are made anew if a weight or priority has changed."""
        if self._popped is not None:  # only now: meanwhile it was charged for what was taken
            self._enter(self._popped)
            self._popped = None
        if self._changes != self._counters.changes:
            self._changes = self._counters.changes
            self._heaps.clear()
            for tenant in self._lanes:
                self._enter(tenant)
