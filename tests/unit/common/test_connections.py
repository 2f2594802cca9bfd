"""Which connections must go: each bound, whatever order news and words come in."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.connections import Bounds, Connections, Ending, Place, on_the_line

MIB = 2**20
BOUNDS = Bounds(new=4, mute=3, spoken=20, of_one=5, backlog_bytes=MIB)


def heard(connections: Connections, place: Place, owner: str, *, name: str = "", nbytes: int = 0) -> list[Ending]:
    id_ = ("front", (name or str(place)).encode())
    return list(connections.heard(id_, nbytes, 0.0, lambda: (place, owner)))


def measured(connections: Connections, sent: Callable[[Place], int | None], now: float = 0.0) -> list[Ending]:
    return list(connections.measured({place: sent(place) for place in connections.mark()}, now))


def places(endings: Iterable[Ending]) -> list[int]:
    return [ending.place[0] for ending in endings]


def test_of_too_many_new_ones_the_oldest_goes_and_of_those_that_stay_mute_too() -> None:
    connections = Connections(BOUNDS)
    assert [places(connections.accepted((n, n), float(n))) for n in range(6)] == [[], [], [], [], [0], [1]]
    assert places(connections.settled(10.0)) == [2]
    assert (len(connections.new), len(connections.mute)) == (0, 3)


def test_of_one_owners_the_longest_silent_goes_and_nobody_elses() -> None:
    connections = Connections(BOUNDS)
    assert not heard(connections, (100, 1), "calm")
    for number in range(5):
        assert not heard(connections, (number, number), "many")
    heard(connections, (0, 0), "many")  # says something again
    assert places(heard(connections, (5, 5), "many")) == [1]
    assert ("front", b"(100, 1)") in connections.spoken


def test_of_all_together_the_owner_of_most_loses_one() -> None:
    connections = Connections(BOUNDS)
    for number in range(20):
        owner = f"owner {number // 4}" if number < 19 else "owner 0"
        assert not heard(connections, (number, number), owner)
    assert places(heard(connections, (50, 50), "new")) == [0]


@pytest.mark.parametrize("late", [False, True])
def test_a_first_word_may_be_faster_than_the_news_of_its_connection(late: bool) -> None:
    connections = Connections(BOUNDS)
    if not late:
        list(connections.accepted((7, 70), 0.0))
    heard(connections, (7, 70), "a")
    if late:
        list(connections.accepted((7, 70), 0.0))
    assert not connections.new
    assert len(connections.spoken) == 1


def test_a_descriptor_that_is_used_again_is_another_connection() -> None:
    connections = Connections(BOUNDS)
    heard(connections, (7, 70), "a", name="first")
    list(connections.accepted((7, 71), 0.0))
    assert not connections.spoken
    heard(connections, (7, 71), "b", name="second")
    assert [connection.owner for connection in connections.spoken.values()] == ["b"]
    heard(connections, (7, 71), "a", name="first")  # its last word, read late: one of the two is wrong
    assert not connections.spoken
    heard(connections, (7, 71), "b", name="second")
    assert [connection.owner for connection in connections.spoken.values()] == ["b"]


def test_what_does_not_come_out_is_bounded_for_each_connection_and_owner() -> None:
    connections = Connections(BOUNDS)
    sent = {(number, number): MIB for number in range(5)} | {(9, 9): 0}
    for place in sent:
        heard(connections, place, "calm" if place == (9, 9) else "many")
    assert len(measured(connections, sent.get)) == 3  # all five are more than two
    sent[9, 9] = 100 * MIB
    heard(connections, (9, 9), "calm", nbytes=100 * MIB)
    assert not measured(connections, sent.get)
    sent[9, 9] += 2 * MIB
    (ending,) = measured(connections, sent.get)
    assert (ending.place, ending.reason) == ((9, 9), "backlog")


def test_months_of_heartbeats_are_no_backlog_and_leave_no_room_for_one() -> None:
    connections = Connections(BOUNDS)
    list(connections.accepted((1, 1), 0.0))
    heard(connections, (1, 1), "a")
    beats = 41
    for now in range(0, 100 * 86_400, 3600):
        assert not measured(connections, lambda place, now=now: beats * now, float(now))  # type: ignore[misc]
    (ending,) = measured(connections, lambda place: beats * now + 2 * MIB, now + 0.5)
    assert ending.reason == "backlog"


def test_who_was_quiet_for_long_may_send_no_more_than_others() -> None:
    connections = Connections(BOUNDS)
    heard(connections, (1, 1), "a")
    for hour in range(1000):
        assert not measured(connections, lambda place: 500, 3600.0 * hour)
    assert measured(connections, lambda place: 2 * MIB, 3600.0 * 1000)


def test_what_is_read_while_it_is_measured_is_no_backlog_and_takes_no_credit() -> None:
    connections = Connections(BOUNDS)
    heard(connections, (1, 1), "a")
    for second in range(1000):  # heartbeats, and messages that are read before their bytes are looked up, or after
        marked = connections.mark()
        heard(connections, (1, 1), "a", nbytes=10 * MIB)
        sent = 10 * MIB * (second + second % 2) + 41 * second
        assert not list(connections.measured(dict.fromkeys(marked, sent), float(second)))


def test_news_of_one_door_that_comes_late_loses_no_connection_of_another() -> None:
    connections = Connections(BOUNDS)
    list(connections.accepted((7, 71), 1.0))
    connections.closed(7, (7, 71))  # of what had this descriptor before, at another door
    assert 7 in connections.new
    connections.closed(7, None)
    assert not connections.new


def test_who_is_taken_for_another_stays_watched() -> None:
    connections = Connections(BOUNDS)
    heard(connections, (7, 71), "b", name="second", nbytes=MIB)
    heard(connections, (7, 71), "a", name="first")  # read late: it was there before
    assert not connections.spoken
    assert not measured(connections, lambda place: MIB)
    (ending,) = measured(connections, lambda place: 3 * MIB)
    assert ending.place == (7, 71)


def test_who_has_gone_is_forgotten() -> None:
    connections = Connections(BOUNDS)
    list(connections.accepted((1, 1), 0.0))
    heard(connections, (2, 2), "a")
    assert not measured(connections, lambda place: None)
    assert not connections.new
    assert not connections.spoken
    assert not connections._owners
    assert not connections._ids


def test_overhead_on_the_line_is_as_the_protocol_says() -> None:
    assert [on_the_line(size) for size in (0, 222, 223)] == [35, 257, 265]


_STEPS = st.lists(st.tuples(st.sampled_from("acwsm"), st.integers(0, 7), st.integers(0, 2), st.integers(0, 3)))


@given(_STEPS)
def test_whatever_comes_in_whatever_order_bounds_hold_and_books_agree(
    steps: list[tuple[str, int, int, int]],
) -> None:
    connections = Connections(BOUNDS)
    for now, (what, descriptor, inode, owner) in enumerate(steps):
        place = (descriptor, inode)
        match what:
            case "a":
                list(connections.accepted(place, float(now)))
            case "c":
                connections.closed(descriptor, (descriptor, owner))
            case "w":
                heard(connections, place, f"owner {owner}", name=f"{place} {owner}")
            case "s":
                list(connections.settled(float(now)))
            case _:
                measured(connections, lambda place: None if place[1] else 3 * MIB, float(now))
        assert len(connections.new) <= BOUNDS.new
        assert len(connections.mute) <= BOUNDS.mute
        assert {id_: connection.place[0] for id_, connection in connections.spoken.items()} == {
            id_: descriptor for descriptor, id_ in connections._ids.items()
        }
        assert sorted(id_ for ids in connections._owners.values() for id_ in ids) == sorted(connections.spoken)
        assert not set(connections.new) & set(connections.mute)
