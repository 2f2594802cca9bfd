"""Promises of a shared forward: made once for all who want it, paid by share, and no tenant's trouble is another's."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from joynexus.vla.busy import Overhead
from joynexus.vla.feature import LAST
from joynexus.vla.policy import Policy
from joynexus.wire import ErrorCode
from joynexus.wire.back import SlotFailed
from tests.unit.trainer.plain import plain_loop
from tests.unit.workers import WRECK, Arrays, Bench, Group, MemoryStore, opening, small_dataset, spec


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# Same observation, several users


def test_two_heads_of_a_tenant_on_one_set_share_each_sample_and_its_cost(bench: Bench) -> None:
    manifest = small_dataset(bench.blobs)
    group = Group(*(msgspec.structs.replace(opening(name, spec(seed=1)), tenant="ann") for name in ("a", "b")))
    for seq, indices in enumerate(([3, 1, 4], [1, 5, 9]), start=1):
        for name in ("a", "b"):
            group.steps(name, seq, indices, manifest, tenant="ann")
    done = bench.done(group)
    assert bench.backbone.groups == [3, 2]
    assert [(each.policy, each.seq, each.backbone_forwards) for each in done] == [
        ("a", 1, 3), ("b", 1, 0), ("a", 2, 2), ("b", 2, 0),
    ]  # fmt: skip
    assert done[0].result.metrics == done[1].result.metrics


@pytest.mark.parametrize(("scopes", "forwards"), [(("shared:reach",) * 2, 3), (("tenant:ann", "tenant:bob"), 6)])
def test_a_shared_set_is_forwarded_once_for_all_and_private_data_never_is(
    bench: Bench, scopes: tuple[str, str], forwards: int
) -> None:
    manifest = small_dataset(bench.blobs)
    for together in (True, False):
        bench.features = MemoryStore()
        bench.fresh()
        groups = [Group(opening("a"), opening("b"))] if together else [Group(opening("a")), Group(opening("b"))]
        for name, scope, group in zip("ab", scopes, groups * 2, strict=False):
            group.steps(name, 1, [3, 1, 4], manifest, feature_scope=scope)
        done = [each for group in groups for each in bench.done(group)]
        assert sum(each.backbone_forwards for each in done) == bench.backbone.samples_forwarded == forwards
        assert done[0].result.metrics == done[1].result.metrics


def test_a_group_asks_once_for_all_hidden_states_that_its_heads_read(bench: Bench) -> None:
    group = Group(opening("a"), opening("b")).train("a", 1, Arrays(1)).train("b", 1, Arrays(2))
    bench.done(Group(opening("a"), opening("b")))
    bench.engine._slots["of-b", "b"].trained.module.layers = (LAST, 1)
    bench.done(group)
    assert bench.backbone.unions == [(-1, 1)]


def test_a_head_that_reads_what_the_backbone_has_not_is_refused_when_it_is_opened(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Policy, "layers", (LAST, 40))
        (failed,) = bench.run(Group(opening("deep")))
    assert isinstance(failed, SlotFailed)
    assert failed.error.code == ErrorCode.INVALID
    assert "hidden states -1 to 2" in failed.error.message


# Eight in a group


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_in_a_group_of_eight_what_is_not_finite_vetoes_its_own_step_alone(bench: Bench, what: str) -> None:
    names = [f"p{number}" for number in range(8)]
    bench.done(Group(*(opening(name) for name in names)))
    if what == "gradient":
        gate = bench.engine._slots["of-p3", "p3"].trained.module.gate
        gate.register_hook(lambda gradient: gradient * math.inf)
    group = Group()
    for step in (1, 2):
        for number, name in enumerate(names):
            arrays = Arrays(10 * number + step, rows=1 + number)
            if (what, name, step) == ("loss", "p3", 1):
                arrays.action[:] = 3e38
            group.train(name, step, arrays)
    answers = {(answer.policy, answer.seq): answer for answer in bench.run(group)}
    assert answers["p3", 1].result.error.code == ErrorCode.NON_FINITE
    assert answers["p3", 1].step == 0
    for number, name in enumerate(names):
        if name != "p3":
            losses = [answers[name, step].result.metrics["loss"] for step in (1, 2)]
            assert losses == plain_loop(spec(), [Arrays(10 * number + step, rows=1 + number) for step in (1, 2)])


# A sample that the backbone cannot take


@pytest.mark.parametrize("place", range(8))
def test_of_eight_tenants_exactly_the_one_whose_sample_wrecks_the_backbone_is_refused(bench: Bench, place: int) -> None:
    names = [f"p{number}" for number in range(8)]
    group = Group(*(opening(name) for name in names))
    for number, name in enumerate(names):
        arrays = Arrays(number, rows=1 + number % 3)
        if number == place:
            arrays.instructions[-1] = WRECK
        group.train(name, 1, arrays).train(name, 2, Arrays(10 + number))
    answers = bench.run(group)
    for number, name in enumerate(names):
        first, second = [answer for answer in answers if answer.policy == name]
        good = [Arrays(number, rows=1 + number % 3)] * (number != place) + [Arrays(10 + number)]
        if number == place:
            assert first.result.error.code == ErrorCode.BAD_DATA
            assert f"sample {number % 3} makes the backbone fail" in first.result.error.message
            assert "wrecked" not in first.result.error.message
        losses = [each.result.metrics["loss"] for each in (first, second) if each.result.error is None]
        assert losses == plain_loop(spec(), good)


def test_who_wrecks_the_forward_pays_for_the_search_and_the_others_as_if_nothing_had_been(bench: Bench) -> None:
    class Ticks:
        """Every measurement takes one second."""

        def start(self):
            return lambda: 1.0

        def overhead(self):
            return Overhead(counts=False)

    bench.engine = type(bench.engine)(
        bench.backbone, None, bench.open_blob, bench.put_blob, scratch=bench.folder / "s", clock=Ticks()
    )
    bad = Arrays(1, rows=1)
    bad.instructions[0] = WRECK
    group = Group(*(opening(name) for name in "abcd"))
    for number, name in enumerate("abcd"):
        group.train(name, 1, bad if name == "b" else Arrays(number, rows=1))
    answers = {answer.policy: answer for answer in bench.run(group)}
    assert bench.backbone.groups == [4, 2, 1, 1, 1, 1, 2]  # halves, the bad one twice alone, a plain sample
    # Opening, reading and private part take a second each, and so does every forward: c and d shared theirs.
    assert {name: answer.busy_s for name, answer in answers.items()} == {"a": 4.0, "b": 7.0, "c": 3.5, "d": 3.5}
    assert {answer.page_s for answer in answers.values()} == {1.0}
    assert bench.backbone.samples_forwarded == sum(answer.backbone_forwards for answer in answers.values()) == 3


def test_a_passing_fault_of_the_backbone_is_nobodys_fault_and_costs_nobody(bench: Bench) -> None:
    for faults in (1, 2):  # in the group, or there and alone
        bench.fresh()
        bench.backbone.faults = [RuntimeError("cosmic ray")] * faults
        group = Group(opening("a"), opening("b")).train("a", 1, Arrays(1, rows=1)).train("b", 1, Arrays(2, rows=1))
        for number, done in enumerate(bench.done(group), start=1):
            assert [done.result.metrics["loss"]] == plain_loop(spec(), [Arrays(number, rows=1)])


def test_a_sample_that_finds_no_memory_may_be_tried_again_later(bench: Bench) -> None:
    bench.features = None
    bench.fresh()
    bench.backbone.faults = [MemoryError("others have it all")] * 2
    group = Group(opening("arm")).train("arm", 1, Arrays(1, rows=1))
    (failed,) = bench.run(group)
    assert isinstance(failed, SlotFailed)
    assert failed.error.code == ErrorCode.UNAVAILABLE
    assert "others" not in failed.error.message
    assert [done.result.metrics["loss"] for done in bench.done(group)] == plain_loop(spec(), [Arrays(1, rows=1)])


def test_a_backbone_that_does_not_even_take_a_plain_sample_ends_the_process(bench: Bench) -> None:
    bench.backbone.faults = [RuntimeError("torn weights")] * 9
    with pytest.raises(RuntimeError, match="torn weights"):
        bench.run(Group(opening("arm")).train("arm", 1, Arrays(1)))
