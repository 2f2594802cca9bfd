"""Tickets: as many rollouts as the staleness budget allows, and none that would be too old."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.master.tickets import Tickets


def begin_all(tickets: Tickets, published: int, *, first: int = 0) -> list[int]:
    begun = []
    while tickets.may_begin(first + len(begun), published):
        begun.append(first + len(begun))
    return begun


def test_as_many_begin_as_updates_may_lie_between() -> None:
    tickets = Tickets(batch=4, max_staleness=2)
    assert begin_all(tickets, 0) == list(range(12))
    assert begin_all(tickets, 1, first=12) == [12, 13, 14, 15]


def test_without_staleness_rollouts_and_training_take_turns() -> None:
    tickets = Tickets(batch=3, max_staleness=0)
    assert begin_all(tickets, 0) == [0, 1, 2]
    assert not tickets.may_begin(3, 0)
    assert tickets.may_begin(3, 1)
    assert [tickets.update(number) for number in (0, 2, 3)] == [0, 0, 1]


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"max_staleness": -1}])
def test_a_budget_that_lets_nothing_begin_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        Tickets(**{"batch": 1, "max_staleness": 0, **wrong})


@given(
    batch=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    moves=st.lists(st.sampled_from(["begin", "finish", "lose", "train"]), max_size=300),
    data=st.data(),
)
def test_whatever_ends_in_whatever_order_nothing_trained_on_is_too_old(
    batch: int, max_staleness: int, moves: list[str], data: st.DataObject
) -> None:
    tickets = Tickets(batch=batch, max_staleness=max_staleness)
    running: dict[int, int] = {}  # number -> updates that were published when it began
    finished: dict[int, int] = {}
    next_number = published = 0
    for move in moves:
        if move == "begin" and tickets.may_begin(next_number, published):
            running[next_number] = published
            next_number += 1
        elif move == "finish" and running:
            number = data.draw(st.sampled_from(sorted(running)))
            finished[number] = running.pop(number)
        elif move == "lose" and running:  # done again, with the newest version of that moment
            running[data.draw(st.sampled_from(sorted(running)))] = published
        elif move == "train":
            wanted = range(published * batch, (published + 1) * batch)
            if all(number in finished for number in wanted):
                for number in wanted:
                    assert tickets.update(number) == published
                    assert 0 <= tickets.update(number) - finished.pop(number) <= max_staleness
                published += 1
        assert len(running) + len(finished) <= (max_staleness + 1) * batch
