"""Lanes: first in, first out within a tenant, least use first among tenants."""

from __future__ import annotations

import random

from services.master.lanes import Counters, Lanes


def drain(lanes: Lanes[str], counters: Counters, cost: float = 1.0) -> list[str]:
    taken = []
    while (item := lanes.pop()) is not None:
        counters.charge(item[0], cost)
        taken.append(item)
    return taken


def filled(counters: Counters, **counts: int) -> Lanes[str]:
    lanes: Lanes[str] = Lanes(counters)
    for tenant, count in counts.items():
        for index in range(count):
            lanes.push(tenant, f"{tenant}{index}")
    return lanes


def test_a_tenants_own_work_keeps_its_order() -> None:
    counters = Counters()
    assert drain(filled(counters, a=3), counters) == ["a0", "a1", "a2"]


def test_tenants_take_turns_whatever_their_queues() -> None:
    counters = Counters()
    order = drain(filled(counters, a=100, b=3), counters)
    assert order.index("b2") <= 6


def test_cheap_work_gets_more_turns_than_dear_work() -> None:
    counters = Counters()
    lanes = filled(counters, a=400, b=400)
    taken = []
    for _ in range(200):
        item = lanes.pop()
        assert item is not None
        counters.charge(item[0], 3.0 if item[0] == "a" else 1.0)
        taken.append(item[0])
    assert 2.7 < taken.count("b") / taken.count("a") < 3.3


def test_what_is_given_back_in_another_order_never_stops_the_queue() -> None:
    counters = Counters()
    lanes = filled(counters, a=3)
    assert lanes.pop() == "a0"
    for seconds in (0.2, 0.5, -0.2, -0.5):  # two estimates, and no work done: in floats a hair less than nothing
        counters.charge("a", seconds)
    assert counters.used("a") < 0
    assert lanes.pop() == "a1"


def test_weights_scale_shares() -> None:
    counters = Counters()
    counters.set("a", 2.0, 0)
    lanes = filled(counters, a=400, b=400)
    taken = []
    for _ in range(300):
        item = lanes.pop()
        assert item is not None
        counters.charge(item[0], 1.0)
        taken.append(item[0])
    assert 1.9 < taken.count("a") / taken.count("b") < 2.1


def test_whoever_was_idle_has_no_claim_to_the_past() -> None:
    counters = Counters()
    lanes = filled(counters, a=1000)
    for _ in range(500):
        lanes.pop()
        counters.charge("a", 1.0)
    for index in range(100):
        lanes.push("late", f"late{index}")
    taken = []
    for _ in range(100):
        item = lanes.pop()
        assert item is not None
        tenant = "late" if item.startswith("late") else "a"
        counters.charge(tenant, 1.0)
        taken.append(tenant)
    assert 45 <= taken.count("late") <= 55


def test_an_estimate_that_was_too_high_is_given_back() -> None:
    counters = Counters()
    lanes = filled(counters, a=100, b=100)
    taken = []
    for _ in range(100):
        item = lanes.pop()
        assert item is not None
        counters.charge(item[0], 10.0)
        counters.charge(item[0], -9.0)
        taken.append(item[0])
    assert 45 <= taken.count("a") <= 55


def test_what_was_put_back_comes_first_in_its_lane_and_lifts_nobody() -> None:
    counters = Counters()
    lanes = filled(counters, a=1, b=50)
    for _ in range(20):
        item = lanes.pop()
        assert item is not None
        if item[0] == "a":
            lanes.put_back("a", item, front=True)
            counters.charge("a", 0.1)
        else:
            counters.charge("b", 1.0)
    assert counters.used("a") < 3.0


def test_nothing_is_lost_or_invented_in_any_order() -> None:
    chance = random.Random(0)
    counters = Counters()
    lanes: Lanes[int] = Lanes(counters)
    pushed, popped = [], []
    for number in range(5000):
        if chance.random() < 0.55:
            lanes.push(chance.choice("abcdef"), number)
            pushed.append(number)
        elif (item := lanes.pop()) is not None:
            popped.append(item)
            counters.charge(chance.choice("abcdef"), chance.uniform(-0.5, 2))
        assert len(lanes) == len(pushed) - len(popped)
    while (item := lanes.pop()) is not None:
        popped.append(item)
    assert sorted(popped) == pushed


def test_a_higher_priority_comes_first_and_the_others_when_it_has_nothing() -> None:
    counters = Counters()
    counters.set("b", 1.0, 1)
    counters.set("c", 1.0, -1)
    order = drain(filled(counters, a=2, b=2, c=2), counters)
    assert [item[0] for item in order] == ["b", "b", "a", "a", "c", "c"]


def test_a_priority_that_changes_while_work_waits_takes_effect_at_once() -> None:
    counters = Counters()
    lanes = filled(counters, a=3, b=3)
    assert lanes.pop() == "a0"
    counters.set("b", 1.0, 2)
    assert [lanes.pop() for _ in range(3)] == ["b0", "b1", "b2"]
    counters.set("a", 1.0, -3)
    lanes.push("c", "c0")
    assert [lanes.pop() for _ in range(3)] == ["c0", "a1", "a2"]
    assert len(lanes) == 0


def test_a_weight_that_changes_while_work_waits_takes_effect_from_there_on() -> None:
    counters = Counters()
    lanes = filled(counters, a=400, b=400)
    taken: list[str] = []
    for turn in range(200):
        if turn == 100:
            counters.set("a", 3.0, 0)
        item = lanes.pop()
        assert item is not None
        counters.charge(item[0], 1.0)
        taken.append(item[0])
    assert 48 <= taken[:100].count("a") <= 52
    assert 72 <= taken[100:].count("a") <= 78


def test_a_lane_of_another_priority_lifts_nobody() -> None:
    counters = Counters()
    counters.set("high", 1.0, 1)
    lanes = filled(counters, high=1)
    counters.charge("high", 100.0)
    lanes.push("low", "low0")
    assert counters.used("low") == 0.0


def test_whoever_is_skipped_keeps_its_place() -> None:
    counters = Counters()
    lanes = filled(counters, a=1, b=1, c=1)
    lanes.skip()
    assert lanes.pop() == "b0"
    lanes.skip()
    assert lanes.pop() is None
    lanes.unskip()
    assert [lanes.pop() for _ in range(3)] == ["a0", "c0", None]


def test_an_estimate_that_was_right_does_not_have_all_tenants_entered_anew_at_once() -> None:
    class Counting(Counters):
        looks = 0

        def used(self, tenant: str) -> float:
            self.looks += 1
            return super().used(tenant)

    counters = Counting()
    lanes = filled(counters, **{f"t{number}": 10 for number in range(500)})
    most = 0
    group: list[str] = []
    for _ in range(2000):
        before = counters.looks
        tenant = lanes.head()
        most = max(most, counters.looks - before)
        assert tenant is not None
        lanes.pop()
        counters.charge(tenant, 0.1)
        group.append(tenant)
        if len(group) == 32:  # its answers: what each took is what was expected, but for the last digit
            lanes.head()
            for answered in group:
                counters.charge(answered, 1e-16)
            group.clear()
    assert most < 20


def test_device_seconds_are_counted_without_weights() -> None:
    counters = Counters()
    counters.set("a", 4.0, 0)
    counters.charge("a", 2.0)
    assert counters.used("a") == 0.5
    assert counters.seconds("a") == 2.0
    counters.lift("a", 10.0)
    assert counters.seconds("a") == 2.0


def test_a_newcomer_is_lifted_to_the_least_that_wait_also_after_somebody_was_passed_over() -> None:
    counters = Counters()
    counters.charge("a", 10.0)
    counters.charge("b", 1000.0)
    lanes = filled(counters, a=1, b=1)
    lanes.skip()
    assert lanes.head() == "b"
    lanes.unskip()
    lanes.push("c", "c0")
    assert counters.used("c") == 10.0


def test_what_is_taken_out_never_comes_up_and_all_else_does_in_order() -> None:
    chance = random.Random(1)
    counters = Counters()
    lanes: Lanes[int] = Lanes(counters)
    model: dict[str, list[int]] = {tenant: [] for tenant in "abc"}
    for number in range(5000):
        tenant = chance.choice("abc")
        match chance.randrange(5):
            case 0:
                kept = chance.choice((2, 7, 10**9))
                lanes.remove(tenant, lambda item: item % kept != 0)  # noqa: B023 - called at once
                model[tenant] = [item for item in model[tenant] if item % kept == 0]
            case 1 | 2:
                lanes.push(tenant, number)
                model[tenant].append(number)
            case _:
                head = lanes.head()
                assert (head is None) is not any(model.values())
                if head is not None:
                    assert lanes.pop() == model[head].pop(0)
                    counters.charge(head, chance.uniform(0, 2))
        assert len(lanes) == sum(map(len, model.values()))
        assert set(lanes.tenants()) == {name for name, items in model.items() if items}
