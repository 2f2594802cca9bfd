"""Promises of the trainer's engine: the numbers of training alone, shared forwards, faults that stay with their op."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from joynexus.vla.busy import Overhead
from joynexus.vla.version_file import read_version
from joynexus.wire import ErrorCode, join
from joynexus.wire.back import TrainDone
from tests.unit.trainer.plain import plain_loop
from tests.unit.workers import Arrays, Bench, Group, opening, small_dataset, spec


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head": "groot", "head_config": {"width": 32, "layers": 3}},
        {"head": "groot", "head_config": {"width": 32, "layers": 2}, "adapter": "bottleneck"},
    ],
    ids=["oft", "groot", "groot behind an adapter"],
)
def test_fifty_steps_equal_a_plain_loop_bit_for_bit(bench: Bench, changes: dict[str, object]) -> None:
    batches = [Arrays(seed) for seed in range(50)]
    made_of = msgspec.structs.replace(spec(), **changes)
    group = Group(opening("arm", made_of))
    for step, arrays in enumerate(batches):
        group.train("arm", 2 * step + 1, arrays, "forward_backward").op("arm", 2 * step + 2, "optim_step")
    losses = [done.result.metrics["loss"] for done in bench.done(group) if done.kind == "forward_backward"]
    assert losses == plain_loop(made_of, batches, range(1, 100, 2))
    assert losses[-1] != losses[0]


def test_a_train_step_is_a_forward_backward_and_an_optim_step(bench: Bench, tmp_path: Path) -> None:
    batches = [Arrays(seed) for seed in range(5)]
    whole = Group(opening("arm"))
    for step, arrays in enumerate(batches):
        whole.train("arm", step + 1, arrays)
    metrics = [done.result.metrics for done in bench.done(whole)]
    assert [each["loss"] for each in metrics] == plain_loop(spec(), batches)
    assert [each["step"] for each in metrics] == [1, 2, 3, 4, 5]
    assert set(metrics[0]) == {"loss", "samples", "grad_norm", "lr", "step"}


def test_gradients_that_a_loop_left_behind_do_not_enter_a_jobs_first_step(bench: Bench) -> None:
    group = Group(opening("arm")).train("arm", 1, Arrays(7), "forward_backward")
    group.train("arm", 2, Arrays(1)).train("arm", 3, Arrays(2))
    _, *steps = bench.run(group)
    assert [step.result.metrics["loss"] for step in steps] == plain_loop(spec(), [Arrays(1), Arrays(2)])


def test_a_group_shares_one_forward_and_changes_nobodys_numbers(tmp_path: Path) -> None:
    names = ("a", "b", "c")

    def ops(policies: tuple[str, ...]) -> Group:
        group = Group(*(opening(name, spec(seed=ord(name))) for name in policies))
        for step in range(4):
            for name in policies:
                rows = 2 + names.index(name)
                group.train(name, 2 * step + 1, Arrays(100 * ord(name) + step, rows), "forward_backward")
                group.op(name, 2 * step + 2, "optim_step")
        return group.op(policies[0], 9, "publish", version=1)

    together = Bench(tmp_path / "together")
    shared = together.done(ops(names))
    assert together.backbone.groups == [2 + 3 + 4] * 4
    for name in names:
        alone = Bench(tmp_path / name)
        mine = [done.result for done in alone.done(ops((name,))) if done.kind != "publish"]
        assert mine == [done.result for done in shared if done.policy == name and done.kind != "publish"]
        assert len(alone.backbone.groups) == 4


def test_answers_of_a_policy_come_in_order_and_the_last_one_says_so(bench: Bench) -> None:
    group = Group(opening("a"), opening("b"))
    group.train("a", 1, Arrays(1), "forward_backward").op("b", 1, "publish", version=1).op("a", 2, "optim_step")
    group.train("b", 2, Arrays(2)).train("a", 3, Arrays(3))
    answers = bench.done(group)
    assert [answer.seq for answer in answers if answer.policy == "a"] == [1, 2, 3]
    assert [answer.seq for answer in answers if answer.policy == "b"] == [1, 2]
    assert [answer.last for answer in answers] == [False] * 4 + [True]
    assert {(answer.task, answer.attempt) for answer in answers} == {("t1", 1)}


def test_an_epoch_after_the_first_forwards_nothing(bench: Bench) -> None:
    manifest = small_dataset(bench.blobs)
    group, seq = Group(opening("arm")), 0
    for epoch in range(5):
        for start in range(0, 16, 4):
            seq += 1
            group.steps("arm", seq, np.random.default_rng(epoch).permutation(16)[start : start + 4].tolist(), manifest)
    done = bench.done(group)
    assert sum(each.samples for each in done) == 5 * 16
    assert sum(each.backbone_forwards for each in done) == bench.backbone.samples_forwarded == 16
    assert sum(each.backbone_forwards for each in done[:4]) == 16


def test_pictures_of_a_data_set_are_hashed_once_for_each_step(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = small_dataset(bench.blobs)
    hashed = []
    key = bench.engine._samples._key_of
    monkeypatch.setattr(bench.engine._samples, "_key_of", lambda *what: hashed.append(1) or key(*what))
    group = Group(opening("arm"))
    for seq in range(1, 6):
        group.steps("arm", seq, [0, 1, 2], manifest)
    bench.done(group)
    assert len(hashed) == 3


def test_equal_observations_are_forwarded_once_and_charged_to_the_first(bench: Bench) -> None:
    made_of, arrays = spec(cameras=0), Arrays(1, rows=6, cameras=0)
    group = Group(opening("arm", made_of)).train("arm", 1, arrays).train("arm", 2, arrays)
    first, second = bench.done(group)
    assert (first.backbone_forwards, second.backbone_forwards) == (1, 0)
    assert bench.backbone.samples_forwarded == 1


def test_tenants_do_not_share_features_unless_the_scope_is_shared(tmp_path: Path) -> None:
    for scope, forwards in (("", 8), ("shared:demo", 4)):
        bench = Bench(tmp_path / f"scope-{scope}", keep_features=True)
        fields = {"feature_scope": scope} if scope else {}
        group = Group(opening("a"), opening("b")).train("a", 1, Arrays(1), **fields).train("b", 1, Arrays(1), **fields)
        assert sum(done.backbone_forwards for done in bench.done(group)) == forwards


def test_a_payload_blob_trains_as_inline_samples_do(bench: Bench) -> None:
    body, buffers = Arrays(3).pack()
    payload = bench.blobs.put_bytes(join([body, *buffers]))
    group = Group(opening("inline"), opening("blob")).train("inline", 1, Arrays(3))
    inline, blob = bench.done(group.op("blob", 1, "train_step", payload=payload))
    assert inline.result.metrics == blob.result.metrics


def test_an_op_cannot_reach_the_buffers_of_another(bench: Bench) -> None:
    group = Group(opening("victim"), opening("thief")).train("victim", 1, Arrays(1))
    body, _ = Arrays(2).pack()
    group.op("thief", 1, "train_step", samples=body, first_buffer=len(group.buffers), buffers=0)
    victim, thief = sorted(bench.run(group), key=lambda answer: answer.policy, reverse=True)
    assert isinstance(victim, TrainDone)
    assert isinstance(thief, TrainDone)
    assert victim.result.error is None
    assert thief.result.error is not None
    assert "frame 0 does not exist" in thief.result.error.message


# Publishing, states, closing


def test_a_published_version_holds_the_weights_and_the_digest_of_its_file(bench: Bench) -> None:
    trained, published = bench.done(Group(opening("arm")).train("arm", 1, Arrays(1)).op("arm", 2, "publish", version=7))
    loaded = read_version(bench.blobs.path(published.result.digest), published.result.digest)
    assert (loaded.version, published.result.version) == (7, 7)
    assert published.nbytes == bench.blobs.size(published.result.digest)
    assert loaded.meta.numerics_class
    features = bench.backbone.forward(Arrays(9).observations())
    mine = bench.engine._slots["of-arm", "arm"].trained.act(features, Arrays(9).state)
    assert np.array_equal(loaded.policy.act(features, Arrays(9).state), mine)
    assert trained.result.metrics["loss"] > 0


def test_a_saved_state_is_gone_back_to_bit_for_bit(bench: Bench) -> None:
    group = Group(opening("arm")).train("arm", 1, Arrays(1)).op("arm", 2, "save_state", state="start")
    saved = bench.done(group.train("arm", 3, Arrays(3)).train("arm", 4, Arrays(4)))[1]
    again = Group().op("arm", 5, "load_state", state=saved.result.digest)
    loaded, third, _ = bench.done(again.train("arm", 6, Arrays(3)).train("arm", 7, Arrays(4)))
    assert loaded.step == 1
    assert third.result.metrics["loss"] == plain_loop(spec(), [Arrays(1), Arrays(3)])[1]


def test_a_state_of_another_policy_is_refused(bench: Bench) -> None:
    group = Group(opening("a"), opening("b")).op("a", 1, "save_state", state="s").train("b", 1, Arrays(1))
    saved = bench.done(group)[0]
    refused = bench.one(Group().op("b", 2, "load_state", state=saved.result.digest))
    assert refused.result.error is not None
    assert refused.result.error.code == ErrorCode.INVALID
    assert "not one of policy 'b'" in refused.result.error.message


def test_no_state_is_saved_between_gradients_and_their_step(bench: Bench) -> None:
    group = Group(opening("arm")).train("arm", 1, Arrays(1), "forward_backward").op("arm", 2, "save_state", state="s")
    _, refused = bench.run(group)
    assert refused.result.error.code == ErrorCode.INVALID
    assert "send optim_step before" in refused.result.error.message


def test_closed_policies_leave_memory(bench: Bench) -> None:
    bench.done(Group(opening("a"), opening("b")).train("a", 1, Arrays(1)).train("b", 1, Arrays(1)))
    message = msgspec.structs.replace(Group().message(), close=(("of-a", "a"),))
    assert list(bench.engine.run(message)) == []
    assert bench.engine.policies == (("of-b", "b"),)


def test_busy_time_is_shared_by_rows(bench: Bench) -> None:
    class Ticks:
        """Every measurement takes one second."""

        def start(self):
            return lambda: 1.0

        def overhead(self):
            return Overhead(counts=False)

    bench.engine = type(bench.engine)(
        bench.backbone, None, bench.open_blob, bench.put_blob, scratch=bench.folder / "s", clock=Ticks()
    )
    group = Group(opening("a"), opening("b")).train("a", 1, Arrays(1, rows=1)).train("b", 1, Arrays(2, rows=3))
    a, b = bench.done(group)
    # opening, reading and private part a second each, and the rows' share of the one forward
    assert (a.busy_s, b.busy_s) == (3.25, 3.75)


# Own weights


def test_own_weights_take_the_place_of_the_first_ones_and_the_optimizer_starts_anew(bench: Bench) -> None:
    published = bench.done(
        Group(opening("theirs", spec(seed=5))).train("theirs", 1, Arrays(1)).op("theirs", 2, "publish", version=1)
    )[1]
    group = Group(opening("mine")).train("mine", 1, Arrays(9)).train("mine", 2, Arrays(9), "forward_backward")
    group.op("mine", 3, "load_weights", payload=published.result.digest).op("mine", 4, "publish", version=1)
    *_, loaded, mine = bench.done(group.train("mine", 5, Arrays(2)))[1:4]
    assert loaded.step == 0
    weights = [read_version(bench.blobs.path(done.result.digest)).policy.module for done in (published, mine)]
    for theirs, ours in zip(weights[0].parameters(), weights[1].parameters(), strict=True):
        assert torch.equal(theirs, ours)


def test_weights_that_do_not_fit_are_refused_and_nothing_changes(bench: Bench) -> None:
    narrow = msgspec.structs.replace(spec(), head_config={"width": 8, "hidden": 32})
    other = bench.done(Group(opening("other", narrow)).op("other", 1, "publish", version=1))[0].result.digest
    group = Group(opening("arm")).train("arm", 1, Arrays(1))
    group.op("arm", 2, "load_weights", payload=other)
    group.op("arm", 3, "load_weights", payload=bench.blobs.put_bytes(b"no tensors")).train("arm", 4, Arrays(2))
    first, *refused, last = bench.run(group)
    for answer in refused:
        assert isinstance(answer, TrainDone)
        assert answer.result.error.code == ErrorCode.BAD_DATA
    assert [each.result.metrics["loss"] for each in (first, last)] == plain_loop(spec(), [Arrays(1), Arrays(2)])
