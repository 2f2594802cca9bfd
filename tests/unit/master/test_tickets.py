"""Tickets: as many rollouts as the staleness budget allows, and none that would be too old."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.master.tickets import Tickets


def issue_all(tickets: Tickets, version: int) -> list[int]:
    issued = []
    while (ticket := tickets.issue(version)) is not None:
        issued.append(ticket)
    return issued


def test_as_many_begin_as_versions_may_lie_between() -> None:
    tickets = Tickets(batch=4, max_staleness=2, max_running=100)
    assert len(issue_all(tickets, 0)) == 12
    assert tickets.capacity == 0


def test_no_more_run_at_once_than_simulators_can() -> None:
    tickets = Tickets(batch=4, max_staleness=2, max_running=5)
    first, *_ = issue_all(tickets, 0)
    assert tickets.running == 5
    tickets.finish(first)
    assert tickets.capacity == 1


def test_a_ticket_is_freed_by_training_or_dropping_and_not_by_finishing() -> None:
    tickets = Tickets(batch=1, max_staleness=1, max_running=9)
    one, two = issue_all(tickets, 0)
    tickets.finish(one)
    assert tickets.issue(0) is None
    assert tickets.train(one, 3) == 3
    assert tickets.capacity == 1
    tickets.drop(two)
    tickets.drop(two)
    assert (tickets.out, tickets.capacity) == (0, 2)


def test_a_rollout_is_trained_on_once_and_only_when_it_has_ended() -> None:
    tickets = Tickets(batch=1, max_staleness=0, max_running=1)
    (ticket,) = issue_all(tickets, 0)
    with pytest.raises(KeyError):
        tickets.train(ticket, 0)
    tickets.finish(ticket)
    tickets.train(ticket, 0)
    with pytest.raises(KeyError):
        tickets.train(ticket, 0)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"max_staleness": -1}, {"max_running": 0}])
def test_a_budget_that_lets_nothing_begin_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        Tickets(**{"batch": 1, "max_staleness": 0, "max_running": 1, **wrong})


@given(
    batch=st.integers(1, 5),
    staleness=st.integers(0, 4),
    running=st.integers(1, 12),
    moves=st.lists(st.sampled_from(["issue", "finish", "drop"]), max_size=120),
)
def test_no_rollout_is_older_than_the_budget_when_it_is_trained_on(
    batch: int, staleness: int, running: int, moves: list[str]
) -> None:
    tickets = Tickets(batch=batch, max_staleness=staleness, max_running=running)
    version = 0
    begun: list[int] = []
    ended: list[int] = []
    for move in moves:
        if move == "issue":
            ticket = tickets.issue(version)
            begun += [ticket] if ticket is not None else []
        elif move == "finish" and begun:
            ended.append(begun.pop(0))  # in order: the oldest is trained on first
            tickets.finish(ended[-1])
        elif move == "drop" and begun:
            tickets.drop(begun.pop())
        if len(ended) >= batch:
            assert all(tickets.train(ticket, version) <= staleness for ticket in ended[:batch])
            del ended[:batch]
            version += 1
        assert tickets.out == len(begun) + len(ended) <= tickets.limit
