"""Fair queues: a lane for each tenant, and next comes the tenant that has used least (a virtual token counter).

In: work by tenant, and the device seconds it took. Out: the next piece of work. Never: a scan over the tenants or over
what waits, or credit for having been idle.

The counter is S-LoRA's VTC over busy seconds (Sheng et al., "Fairness in Serving Large Language Models", 2024): it
grows with use, divided by the tenant's weight, and is lifted to the least counter in the queue when an idle tenant
comes back, so that nobody saves up a claim. A tenant with 10,000 pieces waits in its own lane.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Counters:
    """Use by tenant, in device seconds divided by weight. May be shared by several queues."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def used(self, tenant: str) -> float:
        """Return a tenant's counter."""
        return self._used.get(tenant, 0.0)

    def charge(self, tenant: str, seconds: float) -> None:
        """Add use: an estimate when work is given out, the (signed) difference when its cost is known."""
        if math.isfinite(seconds):  # else a worker's clock has gone wrong, which must not confuse the order
            self._used[tenant] = self.used(tenant) + seconds / self._weights.get(tenant, 1.0)

    def lift(self, tenant: str, floor: float) -> None:
        """Raise a counter to at least `floor`."""
        if self.used(tenant) < floor:
            self._used[tenant] = floor

    def set_weight(self, tenant: str, weight: float) -> None:
        """A tenant with weight 2 gets twice the share of one with weight 1."""
        self._weights[tenant] = weight


class Lanes(Generic[T]):
    """First in, first out for each tenant; the least counter first among tenants.

    The heap holds one entry for each tenant that has work, with the counter as it was when the entry was made. A
    counter that grew meanwhile is noticed when the entry comes up; one that shrank (an estimate was too high) is
    noticed one turn later.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._lanes: dict[str, deque[T]] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._turn = 0  # breaks ties: whoever was served longest ago comes first
        self._floor = 0.0
        self._size = 0

    def __len__(self) -> int:
        """Number of pieces that wait."""
        return self._size

    def push(self, tenant: str, item: T) -> None:
        """Add work at the end of its tenant's lane; a tenant that had none here gets no credit for that."""
        if tenant not in self._lanes:
            self.head()  # brings the floor up to date
            self._counters.lift(tenant, self._floor)
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
        heapq.heappop(self._heap)
        lane = self._lanes[tenant]
        item = lane.popleft()
        self._size -= 1
        if lane:
            self._enter(tenant)
        else:
            del self._lanes[tenant]
        return item

    def head(self) -> str | None:
        """Return the tenant whose turn it is; None if nothing waits."""
        while self._heap:
            counter, _, tenant = self._heap[0]
            if self._counters.used(tenant) <= counter:
                self._floor = max(self._floor, self._counters.used(tenant))
                return tenant
            heapq.heappop(self._heap)
            self._enter(tenant)
        return None

    def peek(self) -> T | None:
        """Return the next piece of work without taking it."""
        tenant = self.head()
        return None if tenant is None else self._lanes[tenant][0]

    def waiting(self, tenant: str) -> int:
        """Number of a tenant's pieces that wait."""
        return len(self._lanes.get(tenant, ()))

    def tenants(self) -> Iterator[str]:
        """Tenants that have work here."""
        return iter(self._lanes)

    def _enter(self, tenant: str) -> None:
        self._turn += 1
        heapq.heappush(self._heap, (self._counters.used(tenant), self._turn, tenant))
