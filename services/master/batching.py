"""When to fire: turns single requests to act into groups for one backbone forward.

In: requests of one batch key, and when replies left. Out: groups. Never: sockets, or what is in a request. The shipped
inference queue and the workload simulator both run this.

A group is sent at the target number of rows; or when the oldest request has waited `wait_s` for a worker that was free;
or as soon as a worker is free and *nobody is expected*. A session whose reply has just left is expected only if it
usually thinks for less than `wait_s` before it asks again (a robot between chunks does not), and no longer than
`wait_s`. So a lone client never waits, and clients in a closed loop are not split into half groups that alternate:
that is also why the waiting of the oldest counts from when the worker became free, not from when it came.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

import msgspec

from services.master.lanes import Counters, Lanes

_SESSIONS_REMEMBERED = 10_000
_NEW_THINK_WEIGHT = 0.5


class Request(msgspec.Struct, kw_only=True, eq=False):
    """What the batcher needs to know of a request; subclasses carry the rest.

    Attributes:
        tenant: whose lane it waits in.
        session: who asks: one conversation that asks again after its reply.
        rows, nbytes, frames: its size: rows, encoded bytes, buffers.
        alone: must not share a group (it was in a group that killed its worker).
        dropped: no longer wanted; it is skipped.
        arrived: set by the batcher.
    """

    tenant: str
    session: Hashable
    rows: int
    nbytes: int = 0
    frames: int = 0
    alone: bool = False
    dropped: bool = False
    arrived: float = 0.0


R = TypeVar("R", bound=Request)


class _Session(msgspec.Struct):
    open: int = 0
    replied: float | None = None
    think_s: float | None = None


class Batcher(Generic[R]):
    """Requests that may share a forward.

    Args:
        counters: use by tenant.
        target_rows: a group with so many rows is sent at once.
        max_rows: rows in a group at most (a larger request goes alone).
        wait_s: T, the longest wait for company.
        max_nbytes, max_frames: encoded bytes and buffers in a group at most.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        target_rows: int,
        max_rows: int,
        wait_s: float,
        max_nbytes: int = 768 * 1024,
        max_frames: int = 1024,
    ) -> None:
        self._lanes: Lanes[R] = Lanes(counters)
        self._target_rows = target_rows
        self._max_rows = max(max_rows, target_rows)
        self._wait_s = wait_s
        self._max_nbytes = max_nbytes
        self._max_frames = max_frames
        self._rows = 0
        self._waiting: Counter[str] = Counter()  # by tenant, without those that were dropped
        self._ages: OrderedDict[int, R] = OrderedDict()  # what waits, oldest first
        self._sessions: OrderedDict[Hashable, _Session] = OrderedDict()
        self._expected: OrderedDict[Hashable, float] = OrderedDict()  # session -> when its reply left, oldest first

    def __len__(self) -> int:
        """Number of requests that wait."""
        return len(self._ages)

    def waiting(self, tenant: str) -> int:
        """Number of a tenant's requests that wait."""
        return self._waiting[tenant]

    def arrivals(self, tenant: str) -> Iterator[float]:
        """When those of a tenant's requests came that wait."""
        return (request.arrived for request in self._lanes.of(tenant) if not request.dropped)

    def add(self, request: R, now: float) -> None:
        """A request came."""
        request.arrived = now
        session = self._session(request.session)
        if session.open == 0 and session.replied is not None:
            think = now - session.replied
            old = think if session.think_s is None else session.think_s
            session.think_s = old + _NEW_THINK_WEIGHT * (think - old)
        session.open += 1
        self._expected.pop(request.session, None)
        self._lanes.push(request.tenant, request)
        self._count(request)

    def give_back(self, request: R) -> None:
        """A request that was in a group could not be done and waits again, before the others of its tenant."""
        self._lanes.put_back(request.tenant, request, front=True)
        self._count(request)
        self._ages.move_to_end(id(request), last=False)

    def drop(self, request: R) -> None:
        """A waiting request is not to be sent any more (its asker gets another reply)."""
        if id(request) in self._ages:
            self._discount(request)
            request.dropped = True
            while (head := self._lanes.peek()) is not None and head.dropped:
                self._lanes.pop()  # nobody may ever ask for a group again, so it is not left to the next one

    def replied(self, request: R, now: float) -> None:
        """The reply to a request left."""
        session = self._session(request.session)
        session.open = max(0, session.open - 1)
        if session.open == 0:
            session.replied = now
            if session.think_s is not None and session.think_s < self._wait_s:
                self._expected[request.session] = now
                self._expected.move_to_end(request.session)

    def group(self, now: float, free_since: float | None) -> list[R]:
        """Return the next group; empty if it is better to wait, or nothing waits.

        Args:
            now: time in seconds.
            free_since: when the worker that would take it became free; None if it is busy and would only queue the
                group, for which only a full group is worth it.
        """
        due = self.due(now, free_since)
        return self._form() if due is not None and due <= now else []

    def due(self, now: float, free_since: float | None) -> float | None:
        """Return when a group is to be sent if nothing else happens; None if only another request can bring that."""
        if not self._ages:
            return None
        if self._rows >= self._target_rows:
            return now
        if free_since is None:
            return None
        while self._expected and next(iter(self._expected.values())) + self._wait_s <= now:
            self._expected.popitem(last=False)
        if not self._expected:
            return now
        oldest = next(iter(self._ages.values())).arrived
        nobody_expected = next(reversed(self._expected.values())) + self._wait_s
        return min(max(oldest, free_since) + self._wait_s, nobody_expected)

    def _form(self) -> list[R]:
        group: list[R] = []
        rows = nbytes = frames = 0
        while (request := self._lanes.peek()) is not None:
            if not request.dropped:
                rows, nbytes, frames = rows + request.rows, nbytes + request.nbytes, frames + request.frames
                fits = rows <= self._max_rows and nbytes <= self._max_nbytes and frames <= self._max_frames
                if group and (not fits or request.alone or group[0].alone):
                    break
                group.append(request)
                self._discount(request)
            self._lanes.pop()
        return group

    def _count(self, request: R) -> None:
        self._rows += request.rows
        self._waiting[request.tenant] += 1
        self._ages[id(request)] = request

    def _discount(self, request: R) -> None:
        self._rows -= request.rows
        self._waiting[request.tenant] -= 1
        if not self._waiting[request.tenant]:
            del self._waiting[request.tenant]
        del self._ages[id(request)]

    def _session(self, name: Hashable) -> _Session:
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = _Session()
            if len(self._sessions) > _SESSIONS_REMEMBERED:
                forgotten, _ = self._sessions.popitem(last=False)
                self._expected.pop(forgotten, None)
        else:
            self._sessions.move_to_end(name)
        return session
