"""Decisions on how many processes there should be, with a clock of the test's own and made-up loads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest

from joynexus.scale import Range, parse_scale
from joynexus.wire.back import DemandRow
from services.health import scaling
from services.health.scaling import Change, Scaler, by_group

EACH = 2
FAMILY = "env:metaworld"


def row(waiting: int = 0, running: int = 0, *, workers: int = 1, group: str = FAMILY, **more: float) -> DemandRow:
    role, _, need = group.partition(":")
    demand = DemandRow(
        group=group, role=role, need=need, workers=workers, credit=EACH * workers, running=running, waiting=waiting
    )
    return msgspec.structs.replace(demand, **more)


def decide(scaler: Scaler, seconds: int, wanted: int, *rows: DemandRow, start: float = 0.0) -> list[Change]:
    """What is decided while the same is seen once a second."""
    return [c for second in range(seconds) for c in scaler.decide({"env": wanted}, rows, start + second)]


@dataclass
class Farm:
    """Workers that do pieces of work of a fixed length, scaled as decided; a new one works after a while."""

    scaler: Scaler
    piece_s: int = 4
    coming_s: int = 5
    wanted: int = 1
    changes: list[tuple[float, Change]] = field(default_factory=list)
    done: int = 0
    _waiting: list[float] = field(default_factory=list)
    _running: list[float] = field(default_factory=list)
    _up_at: list[float] = field(default_factory=lambda: [0.0])

    def turn(self, now: float, arrive: int) -> None:
        self._waiting += [now] * arrive
        left = [end for end in self._running if end > now]
        self.done += len(self._running) - len(left)
        workers = sum(at <= now for at in self._up_at)
        start = min(len(self._waiting), max(0, EACH * workers - len(left)))
        self._running = left + [now + self.piece_s] * start
        del self._waiting[:start]
        oldest = now - self._waiting[0] if self._waiting else 0.0
        seen = row(len(self._waiting), len(self._running), workers=workers, oldest_s=oldest, cost_s=self.piece_s)
        for change in self.scaler.decide({"env": self.wanted}, [seen], now):
            assert change.before == self.wanted
            self.changes.append((now, change))
            more = change.after - change.before
            self._up_at = self._up_at + [now + self.coming_s] * more if more > 0 else self._up_at[:more]
            self.wanted = change.after


def test_a_burst_takes_one_process_to_the_limit_and_calm_takes_it_back() -> None:
    farm = Farm(Scaler({"env": Range(1, 4)}))
    for second in range(600):
        farm.turn(float(second), 60 if second == 10 else 0)
    assert [(c.before, c.after) for _, c in farm.changes] == [(1, 2), (2, 4), (4, 3), (3, 2), (2, 1)]
    assert farm.done == 60
    less = [at for at, change in farm.changes if change.after < change.before]
    assert all(later - earlier >= scaling.DOWN_S for earlier, later in pairwise(less))


def test_each_decision_says_why_in_one_sentence() -> None:
    (more,) = decide(Scaler({"env": Range(1, 4)}), 5, 1, row(7, 2, oldest_s=6.0, cost_s=2.5, starved=True))
    assert more.reason == (
        "7 pieces of work wait, the oldest for 6 s, and a trainer waits for them; 2 are done at once, each takes 2.5 s"
    )
    (less,) = decide(Scaler({"env": Range(1, 4)}), 61, 2, row(0, 1, workers=2))
    assert less.reason == "1 would have done for 60 s, and can do what there is now (1)"
    (fixed,) = decide(Scaler({"env": Range(3, 3)}), 1, 1, row())
    assert fixed.reason == "the operator wants 3"


@pytest.mark.parametrize("seed", range(20))
def test_noise_never_leads_outside_the_limits_nor_back_before_the_pause_is_over(seed: int) -> None:
    draw = random.Random(seed)
    limits = Range(draw.randint(1, 2), draw.randint(3, 6))
    scaler = Scaler({"env": limits})
    wanted, changed, last = limits.least, -1e9, 0
    for second in range(3000):
        workers = draw.randint(1, wanted)
        seen = row(
            draw.choice([0, 0, 0, 1, 3, 30]), draw.randint(0, EACH * workers), workers=workers,
            oldest_s=draw.choice([0.0, 1.0, 9.0]), cost_s=draw.choice([0.0, 0.5, 30.0]),
        )  # fmt: skip
        for change in scaler.decide({"env": wanted}, None if draw.random() < 0.05 else [seen], float(second)):
            way = 1 if change.after > change.before else -1
            pause = scaling.PAUSE_S if way > 0 else scaling.DOWN_S
            assert second - changed >= pause, "it paused before this change"
            assert way == last or second - changed >= pause
            assert limits.least <= change.after <= limits.most
            assert change.reason
            wanted, changed, last = change.after, float(second), way


def test_a_load_that_comes_and_goes_within_the_pause_changes_nothing() -> None:
    scaler = Scaler({"env": Range(1, 4)})
    loads = [row(0, 2, workers=2), row(4, 4, workers=2, oldest_s=9.0)]
    assert [c for second in range(400) for c in scaler.decide({"env": 2}, [loads[second // 2 % 2]], second)] == []


def test_without_figures_nothing_is_decided_but_the_limits() -> None:
    scaler = Scaler({"env": Range(1, 4), "inference": Range(2, 3)})
    assert [scaler.decide({"env": 2}, None, second) for second in range(200)] == [[]] * 200
    assert [scaler.decide({"env": 2}, [], 200.0 + second) for second in range(200)] == [[]] * 200
    (change,) = scaler.decide({"env": 2, "inference": 1}, None, 500.0)
    assert (change.group, change.after, change.reason) == ("inference", 2, "the operator's limits are 2-3")


def test_figures_with_a_gap_between_them_say_nothing_of_the_time_in_the_gap() -> None:
    scaler = Scaler({"env": Range(1, 4)})
    assert decide(scaler, 2, 2, row(workers=2)) == []
    assert scaler.decide({"env": 2}, [row(workers=2)], 300.0) == []  # it may have been busy in between
    assert decide(scaler, 60, 2, row(workers=2), start=301.0)


def acts(robots: int, workers: int, *, running: int = 0, cost_s: float = 0.05) -> DemandRow:
    """Robots that ask again as soon as they are answered; a worker takes two groups at once, of any size."""
    waits = robots - running
    return row(
        waits, running, workers=workers, group="inference:lite", cost_s=cost_s, oldest_s=waits * cost_s / workers
    )


def test_inference_follows_how_long_robots_stand_still_and_comes_back_under_a_load_that_one_can_do() -> None:
    scaler, wanted, changes = Scaler({"inference": Range(1, 8)}), 1, []
    for second in range(1200):
        robots = 64 if second < 600 else 16
        seen = acts(robots, wanted, running=second % 9)  # a group is almost always under way, and somebody waits
        for change in scaler.decide({"inference": wanted}, [seen], float(second)):
            changes.append((change.before, change.after))
            wanted = change.after
    assert changes == [(1, 2), (2, 4), (4, 3), (3, 2), (2, 1)]


def test_a_group_without_limits_is_left_alone() -> None:
    assert decide(Scaler({"inference": Range(1, 4)}), 200, 1, row(50, 2, oldest_s=60.0)) == []


def test_more_than_what_waits_would_keep_busy_are_not_started() -> None:
    (change,) = decide(Scaler({"env": Range(1, 64)}), 5, 4, row(3, 8, workers=4, oldest_s=6.0))
    assert change.after == 6
    assert decide(Scaler({"env": Range(1, 64)}), 200, 4, row(1, 7, workers=4, oldest_s=6.0)) == []


def test_who_was_started_before_is_waited_for_and_not_for_ever() -> None:
    scaler, busy = Scaler({"env": Range(1, 8)}), row(50, 2, oldest_s=30.0)
    assert [c.after for c in decide(scaler, 10, 1, busy)] == [2]
    assert decide(scaler, 100, 2, busy, start=10.0) == []
    assert [c.after for c in decide(scaler, 30, 2, busy, start=110.0)] == [4]


def test_a_crash_loop_does_not_become_many() -> None:
    scaler, busy = Scaler({"env": Range(1, 8)}), row(50, 2, oldest_s=30.0)

    def decided(start: int, looping: set[str]) -> list[int]:
        seconds = range(start, start + 200)
        return [c.after for now in seconds for c in scaler.decide({"env": 2}, [busy], float(now), looping=looping)]

    assert decided(0, {"env"}) == []
    assert decided(200, {"inference"})[:1] == [4]
    assert scaler.decide({"env": 9}, None, 500.0, looping={"env"}), "what the operator wants is done all the same"


def test_short_work_that_waits_a_moment_is_no_reason() -> None:
    assert decide(Scaler({"env": Range(1, 4)}), 60, 1, row(3, 2, oldest_s=1.0, cost_s=0.5)) == []


def test_simulators_share_a_lane_and_data_sets_have_their_own() -> None:
    rows = [row(3, 2, oldest_s=9.0), row(2, 0, group="env:libero"), row(0, 2, group="env:datasets")]
    lanes = by_group(rows, ["env", "inference"])
    assert {name: [(lane.waiting, lane.running) for lane in found] for name, found in lanes.items()} == {
        "env": [(5, 2), (0, 2)]
    }
    (change,) = decide(Scaler({"env": Range(1, 8)}), 5, 2, *(msgspec.structs.replace(r, workers=2) for r in rows))
    assert change.after == 4


def test_what_two_kinds_of_work_cost_together_is_told_by_their_pieces() -> None:
    rows = [row(0, 3, cost_s=1.0), row(0, 1, group="env:libero", cost_s=5.0)]
    ((lane,),) = by_group(rows, ["env"]).values()
    assert lane.cost_s == 2.0
    ((lane,),) = by_group([row(cost_s=1.0), row(group="env:libero", cost_s=5.0)], ["env"]).values()
    assert lane.cost_s == 5.0


def test_a_family_with_processes_of_its_own_is_a_group_of_its_own() -> None:
    rows = [row(1), row(2, group="env:maniskill"), row(9, workers=0, group="env:libero")]
    lanes = by_group(rows, ["env", "env-maniskill"])
    assert {name: [lane.waiting for lane in found] for name, found in lanes.items()} == {
        "env": [1], "env-maniskill": [2]
    }  # fmt: skip


def test_the_only_group_of_a_role_is_the_one_whatever_its_name() -> None:
    lanes = by_group([row(3, group="inference:lite"), row(1)], ["inference-gpu", "env-libero", "env-maniskill"])
    assert {name: [lane.waiting for lane in found] for name, found in lanes.items()} == {"inference-gpu": [3]}


def test_what_an_operator_says_is_read() -> None:
    assert parse_scale(" env=1-4, inference=2,env-maniskill=2-2 ") == {
        "env": Range(1, 4), "inference": Range(2, 2), "env-maniskill": Range(2, 2)
    }  # fmt: skip
    assert parse_scale("") == {}
    assert parse_scale("trainer=2,trainer-gpu=2") == {"trainer": Range(2, 2), "trainer-gpu": Range(2, 2)}
    assert (str(Range(1, 4)), str(Range(3, 3))) == ("1-4", "3")


def wrong() -> Iterator[tuple[str, str]]:
    yield from (("env", "write for example env=3"), ("env=0-2", "at least 1"), ("env=4-1", "smaller number first"))
    yield from (("env=1,env=2", "named twice"), ("master=2", "there is no 'master'"), ("env=99", "at most 64"))
    yield from (("dashboard=2", "there are trainer, inference, env"), ("env_2=2", "write for example env=3"))


def test_a_local_cluster_has_no_service_for_gpus_that_could_be_scaled() -> None:
    said = "there is no 'trainer-gpu' that could be scaled: there are trainer, inference, env"
    with pytest.raises(ValueError, match=said):
        parse_scale("trainer-gpu=2", families=False)


@pytest.mark.parametrize(("words", "said"), wrong())
def test_a_word_that_means_nothing_is_refused_with_what_to_write(words: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_scale(words)
