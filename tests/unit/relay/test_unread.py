"""Answers that nobody reads: what one peer, and all together, may have waiting."""

from __future__ import annotations

import pytest

from services.master import unread
from services.master.unread import LITTLE, MARK_BYTES, MOST, MOST_OF_ONE, Unread

MIB = 2**20


class Mark:
    done = False


def fill(answers: Unread, to: str, nbytes: int = MIB) -> list[Mark]:
    """Send until no more is sent."""
    marks = []
    while answers.may_send(to):
        mark = Mark() if answers.wants_mark(to, nbytes) else None
        answers.sent(to, nbytes, mark)
        marks += [mark] if mark is not None else []
        assert len(marks) < 10_000
    return marks


@pytest.mark.parametrize("nbytes", [100, 5000, MARK_BYTES, MIB])
def test_a_peer_that_reads_nothing_gets_no_more_until_it_reads(nbytes: int) -> None:
    answers = Unread()
    marks = fill(answers, "deaf", nbytes)
    assert MOST_OF_ONE <= answers.nbytes <= MOST_OF_ONE + MIB
    assert answers.may_send("other")
    for mark in marks[:-1]:
        mark.done = True
    assert answers.may_send("deaf")
    marks[-1].done = True
    assert answers.may_send("deaf")
    assert answers.nbytes == 0


def test_many_peers_that_read_nothing_leave_room_for_those_that_read() -> None:
    answers = Unread()
    for number in range(100):
        fill(answers, f"deaf {number}")
    assert answers.nbytes <= MOST + 101 * (LITTLE + MIB)
    assert answers.may_send("other")


def test_peers_without_number_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "_REMEMBERED", 100)
    answers = Unread()
    for number in range(1000):
        answers.sent(f"peer {number}", 10, None)
    assert len(answers._peers) <= 100
