"""When to fire: turns single requests to act into groups for one backbone forward.

In: requests of one batch key, when replies left, how long groups took. Out: groups. Never: sockets, or what is in a
request. The shipped inference queue and the workload simulator both run this.

A group is sent at the target number of rows; or when the oldest request has waited for its bound while a worker was
free; or as soon as a worker is free and *nobody is expected*.

- The bound is T, or what sharing saves if that is less: two groups cost the fixed part of a group's time twice, so
  waiting longer than that part for company loses more than it gains. On a device whose time grows with the rows alone
  there is nothing to wait for.
- A session is expected after its reply if it usually comes back within the bound: mean plus mean deviation of the time
  from reply to next request, transfers included; for a deviation longer than that, then not any more. So a lone client
  never waits, nobody waits for a robot between chunks, and clients in a closed loop are not split into groups that
  alternate. That is also why the waiting of the oldest counts from when a worker became free.
- A worker that is busy gets only a group that is full, shortly before it will be free: early enough that the device
  does not stand still, as late as possible for whoever comes meanwhile and has used less.
- Several free workers share what waits only if each part then spends longer on rows than on what it costs in addition.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

import msgspec

from services.master.device_time import DeviceTime
from services.master.lanes import Counters, Lanes

_SESSIONS_REMEMBERED = 10_000
_NEW_THINK_WEIGHT = 0.25
_DEVIATIONS = 2.0
"""Who is expected at all is not given up before this many mean deviations have passed."""
_LEAD_S = 0.010
"""A busy worker is given its next group so long before it is free: a group of pictures travels for some of it."""
_ROW_S = 0.002
"""Charged for a row until its cost is known."""
_SKIPS = 8
"""Tenants that are passed over when their next request does not fit into what is left of a group."""
_FEW = 64


class Request(msgspec.Struct, kw_only=True, eq=False):
    """What the batcher needs to know of a request; subclasses carry the rest.

    Attributes:
        tenant: whose lane it waits in.
        session: who asks: one conversation that asks again after its reply.
        rows, nbytes, frames: its size: rows, encoded bytes, buffers.
        alone: must not share a group, or a worker (one died that had it).
        dropped: no longer wanted; it is skipped.
        arrived: set by the batcher, like `estimate_s`, the seconds that it charged.
    """

    tenant: str
    session: Hashable
    rows: int
    nbytes: int = 0
    frames: int = 0
    alone: bool = False
    dropped: bool = False
    arrived: float = 0.0
    estimate_s: float = 0.0


R = TypeVar("R", bound=Request)


class _Session(msgspec.Struct):
    """Requests under way, when the last reply left, how long it is away after one, until when it is expected."""

    open: int = 0
    replied: float | None = None
    away_s: float | None = None
    deviation_s: float = 0.0
    until: float | None = None


class Batcher(Generic[R]):
    """Requests that may share a forward.

    Args:
        counters: use by tenant.
        target_rows: a group with so many rows is sent at once.
        max_rows: rows in a group at most (a larger request goes alone).
        wait_s: T, the longest wait for company.
        max_nbytes, max_frames: encoded bytes and buffers in a group at most.

    Attributes:
        device: what is known about how long groups take.
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
        self.device = DeviceTime()
        self._counters = counters
        self._lanes: Lanes[R] = Lanes(counters)
        self._target_rows = target_rows
        self._max_rows = max(max_rows, target_rows)
        self._wait_s = wait_s
        self._max_nbytes = max_nbytes
        self._max_frames = max_frames
        self._rows = 0
        self._row_s = _ROW_S
        self._waiting: Counter[str] = Counter()  # by tenant, without those that were dropped
        self._ages: OrderedDict[int, R] = OrderedDict()  # what waits, oldest first
        self._sessions: OrderedDict[Hashable, _Session] = OrderedDict()
        self._expected = 0  # sessions with an `until`, passed or not
        self._latest: list[tuple[float, int, _Session]] = []  # (-until, ...), a heap with outdated entries
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Number of requests that wait."""
        return len(self._ages)

    def oldest(self) -> float | None:
        """When the oldest of the requests came that wait; None if none waits."""
        return min((at for tenant in self._lanes.tenants() for at in self.arrivals(tenant)), default=None)

    def waiting(self, tenant: str) -> int:
        """Number of a tenant's requests that wait."""
        return self._waiting[tenant]

    def arrivals(self, tenant: str) -> Iterator[float]:
        """When those of a tenant's requests came that wait."""
        return (request.arrived for request in self._lanes.of(tenant) if not request.dropped)

    # Requests

    def add(self, request: R, now: float) -> None:
        """A request came."""
        request.arrived = now
        session = self._session(request.session)
        if session.open == 0 and session.replied is not None:
            self._came_back(session, now - session.replied)
        session.open += 1
        self._lanes.push(request.tenant, request)
        self._count(request)

    def give_back(self, request: R) -> None:
        """A request that was in a group could not be done and waits again, before the others of its tenant."""
        self._counters.charge(request.tenant, -request.estimate_s)
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
            if session.away_s is not None and session.away_s + session.deviation_s <= self._bound():
                self._expect(session, now + session.away_s + _DEVIATIONS * session.deviation_s)

    def settle(self, request: R, seconds: float) -> None:
        """A request has taken so many device seconds: true up what was charged for it."""
        self._counters.charge(request.tenant, seconds - request.estimate_s)
        self._row_s += 0.1 * (max(seconds, 0.0) / request.rows - self._row_s)

    # Groups

    def group(self, now: float, free_since: float | None, *, free_at: float | None = None, workers: int = 1) -> list[R]:
        """Return the next group; empty if it is better to wait, or nothing waits.

        Args:
            now: time in seconds.
            free_since: since when a worker has been free; None if the one that would take the group is busy.
            free_at: when that one is expected to be free.
            workers: workers that are free.
        """
        due = self.due(now, free_since, free_at=free_at)
        if due is None or due > now:
            return []
        rows = self._rows
        limit = max(self._target_rows, self.device.enough_rows(self._max_rows))
        return self._form(min(limit, -(-rows // self.device.parts(rows, workers))))

    def due(self, now: float, free_since: float | None, *, free_at: float | None = None) -> float | None:
        """Return when a group is to be sent if nothing else happens; None if only another request can bring that."""
        if not self._ages:
            return None
        full = self._rows >= self._target_rows
        if free_since is None and (head := self._lanes.peek()) is not None and head.alone:
            return None  # only a worker that has nothing may have it
        if free_since is None:
            return (now if free_at is None else max(now, free_at - _LEAD_S)) if full else None
        until = self._expected_until(now)
        if full or until is None:
            return now
        oldest = next(iter(self._ages.values())).arrived
        return max(now, min(max(oldest, free_since) + self._bound(), until))

    def _form(self, max_rows: int) -> list[R]:
        group: list[R] = []
        rows = nbytes = frames = skips = 0
        while (request := self._lanes.peek()) is not None and rows < max_rows:
            if request.dropped:
                self._lanes.pop()
                continue
            fits = (
                rows + request.rows <= max_rows
                and nbytes + request.nbytes <= self._max_nbytes
                and frames + request.frames <= self._max_frames
                and not request.alone
            )
            if fits or not group:
                self._lanes.pop()
                group.append(request)
                rows, nbytes, frames = rows + request.rows, nbytes + request.nbytes, frames + request.frames
                request.estimate_s = self._row_s * request.rows
                self._counters.charge(request.tenant, request.estimate_s)
                self._discount(request)
                if request.alone:
                    break
            elif skips == _SKIPS:
                break
            else:  # it is the first of the next group
                skips += 1
                self._lanes.skip()
        self._lanes.unskip()
        return group

    # Who is expected

    def _bound(self) -> float:
        """Return how long waiting for company may pay."""
        saved = self.device.fixed_s
        return self._wait_s if saved is None else min(self._wait_s, saved)

    def _came_back(self, session: _Session, away_s: float) -> None:
        if session.away_s is None:
            session.away_s, session.deviation_s = away_s, away_s / 2
        else:
            error = away_s - session.away_s
            session.deviation_s += _NEW_THINK_WEIGHT * (abs(error) - session.deviation_s)
            session.away_s += _NEW_THINK_WEIGHT * error
        self._forget(session)

    def _expect(self, session: _Session, until: float) -> None:
        self._expected += session.until is None
        session.until = until
        heapq.heappush(self._latest, (-until, next(self._numbers), session))
        if len(self._latest) > 2 * self._expected + _FEW:
            self._latest = [entry for entry in self._latest if entry[2].until == -entry[0]]
            heapq.heapify(self._latest)

    def _forget(self, session: _Session) -> None:
        self._expected -= session.until is not None
        session.until = None

    def _expected_until(self, now: float) -> float | None:
        """Return until when somebody is expected; None if nobody is."""
        while self._latest:
            until, session = -self._latest[0][0], self._latest[0][2]
            if session.until == until and until > now:
                return until
            heapq.heappop(self._latest)
            if session.until == until:
                self._forget(session)
        return None

    def _session(self, name: Hashable) -> _Session:
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = _Session()
            if len(self._sessions) > _SESSIONS_REMEMBERED:
                self._forget(self._sessions.popitem(last=False)[1])
        else:
            self._sessions.move_to_end(name)
        return session

    # What waits

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
