"""Batching: full groups for those who come together, no wait for those who are alone."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter

import pytest

from services.master.batching import Batcher, Request
from services.master.lanes import Counters

B, T = 8, 0.010


def batcher(**changes: int) -> Batcher[Request]:
    return Batcher(Counters(), **{"target_rows": B, "max_rows": 16, "wait_s": T, **changes})  # type: ignore[arg-type]


def ask(session: str, *, rows: int = 1, tenant: str = "", alone: bool = False) -> Request:
    return Request(tenant=tenant or session, session=session, rows=rows, alone=alone)


class ClosedLoop:
    """Clients that ask, wait for the reply, think, and ask again; a worker that takes `device_s` for a group."""

    def __init__(self, thinks: dict[str, float], device_s: float, starts: dict[str, float] | None = None) -> None:
        self.batcher = batcher()
        self.groups: list[int] = []
        self.waits: list[float] = []
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, str, object]] = []
        self._thinks = thinks
        self._device_s = device_s
        self._free_since: float | None = 0.0
        for client in thinks:
            self._at((starts or {}).get(client, 0.0), "ask", client)

    def _at(self, time: float, what: str, subject: object) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), what, subject))

    def run(self, until: float) -> None:
        while self._events:
            now, _, what, subject = heapq.heappop(self._events)
            if now > until:
                return
            if what == "ask":
                self.batcher.add(ask(str(subject)), now)
            elif what == "done":
                self._free_since = now
                for request in subject:  # type: ignore[attr-defined]
                    self.batcher.replied(request, now)
                    self._at(now + self._thinks[str(request.session)], "ask", request.session)
            self._fire(now)

    def _fire(self, now: float) -> None:
        if self._free_since is None:
            return
        group = self.batcher.group(now, self._free_since)
        if group:
            self.groups.append(len(group))
            self.waits += [now - request.arrived for request in group]
            self._free_since = None
            self._at(now + self._device_s, "done", group)
        elif (due := self.batcher.due(now, self._free_since)) is not None:
            self._at(due, "look", None)


def test_a_lone_client_never_waits() -> None:
    loop = ClosedLoop({"robot": 0.001}, device_s=0.02)
    loop.run(2.0)
    assert set(loop.groups) == {1}
    assert max(loop.waits) == 0.0


def test_a_client_that_thinks_long_is_not_waited_for() -> None:
    loop = ClosedLoop({"robot": 0.001, "slow": 0.5}, device_s=0.005)
    loop.run(5.0)
    late = loop.waits[len(loop.waits) // 10 :]
    assert max(late) <= 0.005 + 1e-9, "at most the other's group is waited for"


def test_eight_clients_in_a_closed_loop_share_full_groups() -> None:
    loop = ClosedLoop({f"c{i}": 0.001 * (1 + i / 10) for i in range(8)}, device_s=0.02)
    loop.run(2.0)
    assert Counter(loop.groups[5:]).most_common(1)[0][0] == 8
    assert sum(loop.groups) / 2.0 > 250


def test_two_half_groups_that_alternate_find_together() -> None:
    starts = {f"c{i}": 0.0 if i < 4 else 0.012 for i in range(8)}
    loop = ClosedLoop({f"c{i}": 0.001 for i in range(8)}, device_s=0.02, starts=starts)
    loop.run(2.0)
    assert set(loop.groups[10:]) == {8}


def test_a_request_waits_no_longer_than_t_for_company_while_a_worker_is_free() -> None:
    loop = ClosedLoop({"a": 0.002, "b": 0.002, "c": 0.009}, device_s=0.001)
    loop.run(3.0)
    assert max(loop.waits) <= T + 0.001 + 1e-9


def test_a_full_group_goes_at_once_even_to_a_busy_worker() -> None:
    queue = batcher()
    for index in range(B):
        queue.add(ask(f"c{index}"), 0.0)
    assert len(queue.group(0.0, None)) == B


def test_a_busy_worker_gets_no_small_group() -> None:
    queue = batcher()
    queue.add(ask("c"), 0.0)
    assert queue.group(1.0, None) == []
    assert queue.due(1.0, None) is None


def test_rows_are_capped_and_a_large_request_goes_alone() -> None:
    queue = batcher(max_rows=16)
    for index in range(5):
        queue.add(ask(f"c{index}", rows=5), 0.0)
    assert [request.rows for request in queue.group(0.0, 0.0)] == [5, 5, 5]
    big = batcher(max_rows=16)
    big.add(ask("big", rows=64), 0.0)
    big.add(ask("small"), 0.0)
    assert [request.rows for request in big.group(0.0, 0.0)] == [64]


@pytest.mark.parametrize("limit", [{"max_nbytes": 100}, {"max_frames": 5}])
def test_what_does_not_fit_into_one_message_is_left_for_the_next(limit: dict[str, int]) -> None:
    queue = batcher(**limit)
    for index in range(4):
        queue.add(Request(tenant="t", session=index, rows=3, nbytes=60, frames=3), 0.0)
    assert len(queue.group(0.0, 0.0)) == 1


def test_a_tenant_with_many_requests_leaves_room_for_others() -> None:
    queue = batcher()
    for index in range(1000):
        queue.add(ask(f"flood{index}", tenant="flood"), 0.0)
    queue.add(ask("robot"), 0.0)
    assert "robot" in {request.tenant for request in queue.group(0.0, 0.0)}


def test_a_request_that_killed_its_worker_goes_alone_and_first() -> None:
    queue = batcher()
    for index in range(4):
        queue.add(ask(f"c{index}"), 0.0)
    group = queue.group(0.0, 0.0)
    for request in group:
        request.alone = True
        queue.give_back(request)
    assert [len(queue.group(0.0, 0.0)) for _ in range(4)] == [1, 1, 1, 1]


def test_a_dropped_request_is_never_sent_and_counts_no_more() -> None:
    queue = batcher()
    request, other = ask("a"), ask("b")
    queue.add(request, 0.0)
    queue.drop(request)
    assert len(queue) == 0
    queue.add(other, 0.0)
    assert queue.group(0.0, 0.0) == [other]


def test_what_does_not_fit_is_passed_over_and_comes_first_in_the_next_group() -> None:
    queue = batcher(max_rows=16)
    for session, rows in (("a", 10), ("b", 10), ("c", 4)):
        queue.add(ask(session, rows=rows), 0.0)
    assert [request.session for request in queue.group(0.0, 0.0)] == ["a", "c"]
    assert [request.session for request in queue.group(0.0, 0.0)] == ["b"]


def test_one_tenants_share_of_a_group_is_counted_while_the_group_is_formed() -> None:
    """Not only after it: else whoever is a little behind would fill it alone."""
    queue = batcher()
    for index in range(50):
        queue.add(ask(f"ahead{index}", tenant="ahead"), 0.0)
    queue.group(0.0, 0.0)
    for index in range(50):
        queue.add(ask(f"behind{index}", tenant="behind"), 0.0)
    for index in range(50):
        queue.add(ask(f"new{index}", tenant="new"), 0.0)
    tenants = Counter(request.tenant for request in queue.group(0.0, 0.0))
    assert set(tenants) == {"ahead", "behind", "new"}
    assert max(tenants.values()) - min(tenants.values()) <= 1


def test_a_busy_worker_gets_its_next_group_shortly_before_it_is_free() -> None:
    queue = batcher()
    for index in range(B):
        queue.add(ask(f"c{index}"), 0.0)
    due = queue.due(0.0, None, free_at=1.0)
    assert due is not None
    assert 0.9 < due < 1.0
    assert queue.group(0.5, None, free_at=1.0) == []
    assert len(queue.group(due, None, free_at=1.0)) == B
