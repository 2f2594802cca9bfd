"""Promises of the trainer's engine: the numbers of training alone, shared forwards, faults that stay with their op."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from common.blobs import BlobStoreFullError
from joynexus.vla.busy import Overhead
from joynexus.vla.learner import learning_rate
from joynexus.vla.policy import Policy
from joynexus.vla.version_file import read_version
from joynexus.wire import ErrorCode, join
from joynexus.wire.back import OpenSlot, SlotFailed, TrainDone
from services.trainer import checkpoint, core
from services.trainer.slots import Slot, open_slot
from tests.unit.workers import (
    CHUNK,
    Arrays,
    Bench,
    Group,
    NoiseBackbone,
    opening,
    small_dataset,
    spec,
)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def plain_loop(made_of, batches: list[Arrays], draws: Sequence[int] | None = None) -> list[float]:
    """What a researcher would write: module, seed, features, AdamW, clipping, warm-up; `draws` are the ops' numbers."""
    backbone = NoiseBackbone()
    policy = Policy(made_of, backbone.digest, backbone.hidden_size)
    settings = made_of.optimizer
    optimizer = torch.optim.AdamW(
        policy.module.parameters(),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    losses = []
    for step, arrays in enumerate(batches):
        optimizer.zero_grad()
        features, draw = backbone.forward(arrays.observations()), draws[step] if draws else 0
        loss = policy.loss(features, arrays.state, arrays.action, arrays.mask, draw=draw)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.module.parameters(), settings.grad_clip)
        optimizer.param_groups[0]["lr"] = learning_rate(settings, step)
        optimizer.step()
        losses.append(loss.item())
    return losses


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


# Faults of an op: answered, applied, nothing changed

WRONG = {
    "state of another length": (
        lambda a: setattr(a, "state", np.zeros((4, 3), np.float32)),
        "'state' is float32 [4, 3], but float32 [any, 4] is expected",
    ),
    "state in double precision": (lambda a: setattr(a, "state", a.state.astype(np.float64)), "'state' is float64"),
    "action of another dimension": (
        lambda a: setattr(a, "action", np.zeros((4, CHUNK, 7), np.float32)),
        "'action' is float32 [4, 3, 7], but float32 [4, 3, 2] is expected",
    ),
    "another chunk": (
        lambda a: setattr(a, "action", np.zeros((4, 8, 2), np.float32)),
        "'action' is float32 [4, 8, 2], but float32 [4, 3, 2] is expected",
    ),
    "mask of other length": (lambda a: setattr(a, "mask", a.mask[:2]), "'action_mask' is bool [2, 3]"),
    "nothing valid": (lambda a: a.mask.__setitem__(2, False), "'action_mask' of sample 2 has no valid step"),
    "two cameras": (
        lambda a: a.images.append(a.images[0]),
        "pictures of 2 cameras came, but the policy's contract has 1 (view0)",
    ),
    "no camera": (lambda a: a.images.clear(), "pictures of 0 cameras came"),
    "another picture size": (
        lambda a: a.images.__setitem__(0, np.zeros((4, 16, 16, 3), np.uint8)),
        "'images of view0' is uint8 [4, 16, 16, 3], but uint8 [4, 8, 8, 3] is expected",
    ),
    "too few instructions": (lambda a: a.instructions.pop(), "3 instructions came for 4 samples"),
    "NaN in an action": (
        lambda a: a.action.__setitem__((2, 1, 0), np.nan),
        "'action' of sample 2, step 1 of the chunk, dimension 0 (dx) is nan",
    ),
    "infinite state": (
        lambda a: a.state.__setitem__((3, 3), np.inf),
        "'state' of sample 3, dimension 3 (grip) is inf",
    ),
    "endless instruction": (lambda a: a.instructions.__setitem__(1, "x" * 4001), "sample 1 cannot be used"),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_samples_are_refused_with_one_sentence_and_nothing_is_lost(bench: Bench, what: str) -> None:
    spoil, sentence = WRONG[what]
    bad = Arrays(2)
    spoil(bad)
    first, refused, after = bench.run(
        Group(opening("arm")).train("arm", 1, Arrays(1)).train("arm", 2, bad).train("arm", 3, Arrays(3))
    )
    assert isinstance(refused, TrainDone)
    assert refused.result.error is not None
    assert refused.result.error.code == ErrorCode.BAD_DATA
    assert sentence in refused.result.error.message
    assert "\n" not in refused.result.error.message
    assert [first.result.metrics["loss"], after.result.metrics["loss"]] == plain_loop(spec(), [Arrays(1), Arrays(3)])


def test_a_set_of_another_contract_is_refused_with_the_field_that_differs(bench: Bench) -> None:
    manifest = small_dataset(bench.blobs, cameras=2)
    done = bench.one(Group(opening("arm")).steps("arm", 1, [0], manifest))
    assert done.result.error is not None
    assert done.result.error.code == ErrorCode.CONTRACT_MISMATCH
    assert "contract field 'cameras' differs" in done.result.error.message


def test_an_index_outside_the_set_is_refused(bench: Bench) -> None:
    done = bench.one(Group(opening("arm")).steps("arm", 1, [3, 16], small_dataset(bench.blobs)))
    assert done.result.error is not None
    assert done.result.error.code == ErrorCode.INVALID
    assert "step 16 is outside the data set, which has steps 0 to 15" in done.result.error.message


def test_an_op_without_samples_is_refused(bench: Bench) -> None:
    manifest = small_dataset(bench.blobs)
    done = bench.one(Group(opening("arm")).steps("arm", 1, [], manifest))
    assert done.result.error is not None
    assert "1 to 4096 samples, this one has 0" in done.result.error.message


def test_garbage_instead_of_samples_is_refused(bench: Bench) -> None:
    payload = bench.blobs.put_bytes(b"no samples")
    for fields in ({"samples": b"\xc1"}, {"samples": b""}, {"payload": payload}):
        bench.fresh()
        done = bench.one(Group(opening("arm")).op("arm", 1, "train_step", **fields))
        assert done.result.error is not None
        assert done.result.error.code == ErrorCode.INVALID


def test_an_optim_step_without_gradients_is_refused(bench: Bench) -> None:
    done = bench.one(Group(opening("arm")).op("arm", 1, "optim_step"))
    assert done.result.error is not None
    assert done.result.error.code == ErrorCode.INVALID
    assert "send forward_backward first" in done.result.error.message


def test_a_non_finite_loss_vetoes_that_step_alone(bench: Bench) -> None:
    huge = Arrays(2)
    huge.action[:] = 3e38
    group = Group(opening("arm"), opening("other", spec(seed=5))).train("arm", 1, Arrays(1)).train("arm", 2, huge)
    group.train("arm", 3, Arrays(3)).train("other", 1, Arrays(1))
    answers = {(answer.policy, answer.seq): answer for answer in bench.run(group)}
    vetoed = answers["arm", 2]
    assert vetoed.result.error is not None
    assert vetoed.result.error.code == ErrorCode.NON_FINITE
    assert vetoed.step == 1
    losses = [answers["arm", seq].result.metrics["loss"] for seq in (1, 3)]
    assert losses == plain_loop(spec(), [Arrays(1), Arrays(3)])
    assert answers["other", 1].result.error is None


def test_a_vetoed_forward_backward_vetoes_the_step_it_belongs_to(bench: Bench) -> None:
    huge = Arrays(2)
    huge.action[:] = 3e38
    group = Group(opening("arm")).train("arm", 1, Arrays(1), "forward_backward")
    group.train("arm", 2, huge, "forward_backward").op("arm", 3, "optim_step").train("arm", 4, Arrays(4))
    _, loss, step, after = bench.run(group)
    assert loss.result.error.code == step.result.error.code == ErrorCode.NON_FINITE
    assert step.step == 0
    assert [after.result.metrics["loss"]] == plain_loop(spec(), [Arrays(4)])


def test_weights_that_overflowed_are_neither_published_nor_saved(bench: Bench) -> None:
    group = Group(opening("arm")).train("arm", 1, Arrays(1))
    bench.done(group)
    with torch.no_grad():
        bench.engine._slots["of-arm", "arm"].trained.module.gate.fill_(math.inf)
    answers = bench.run(Group().op("arm", 2, "publish", version=1).op("arm", 3, "save_state", state="s"))
    for answer in answers:
        assert answer.result.error.code == ErrorCode.NON_FINITE
        assert "'gate' holds NaN or infinities" in answer.result.error.message


# Faults of the service: the op was not done


def test_a_blob_that_cannot_be_had_leaves_the_op_undone(bench: Bench) -> None:
    group = Group(opening("arm"), opening("other")).train("arm", 1, Arrays(1))
    group.op("arm", 2, "train_step", payload="0" * 64).train("arm", 3, Arrays(3))
    group.train("other", 1, Arrays(1)).train("other", 2, Arrays(2))
    answers = bench.run(group)
    failed = [answer for answer in answers if isinstance(answer, SlotFailed)]
    assert [(each.policy, each.error.code) for each in failed] == [("arm", ErrorCode.UNAVAILABLE)]
    assert [each.seq for each in answers if isinstance(each, TrainDone) and each.policy == "arm"] == [1]
    assert [each.seq for each in answers if isinstance(each, TrainDone) and each.policy == "other"] == [1, 2]
    assert [each.last for each in answers].count(True) == 1
    assert answers[-1].last


def test_a_full_disk_refuses_publish_and_training_goes_on(bench: Bench) -> None:
    def full(path: Path) -> tuple[str, int]:
        raise BlobStoreFullError(errno.ENOSPC, "the disk is full")

    put, bench.put_blob = bench.put_blob, full
    refused = bench.one(Group(opening("arm")).op("arm", 1, "publish", version=1))
    assert refused.result.error is not None
    assert refused.result.error.code == ErrorCode.UNAVAILABLE
    assert not list((bench.folder / "scratch").iterdir())
    bench.put_blob = put
    bench.done(Group().train("arm", 2, Arrays(1)).op("arm", 3, "publish", version=2))


def test_a_full_scratch_disk_refuses_a_state_and_training_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", full)
        group = Group(opening("arm")).train("arm", 1, Arrays(1)).op("arm", 2, "save_state", state="s")
        _, refused = bench.run(group)
    assert isinstance(refused, TrainDone), "the slot stays"
    assert refused.result.error is not None
    assert refused.result.error.code == ErrorCode.UNAVAILABLE
    after = bench.one(Group().train("arm", 3, Arrays(3)))
    assert after.result.metrics["loss"] == plain_loop(spec(), [Arrays(1), Arrays(3)])[1]


def test_what_a_killed_trainer_left_in_scratch_goes_after_a_day(bench: Bench) -> None:
    old, young = (bench.folder / "scratch" / name for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"half a file")
    os.utime(old, (0, 0))
    bench.fresh()
    assert not old.exists()
    assert young.exists()


def test_a_fault_in_one_private_part_takes_nobody_else_down(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.done(Group(opening("bad"), opening("good")).train("bad", 1, Arrays(1)).train("good", 1, Arrays(1)))

    def burst(*_: object) -> None:
        raise MemoryError("no memory left")

    monkeypatch.setattr(bench.engine._slots["of-bad", "bad"]._learner.policy.module, "loss", burst)
    failed, done = bench.run(Group().train("bad", 2, Arrays(2)).train("good", 2, Arrays(2)))
    assert isinstance(failed, SlotFailed)
    assert failed.error.code == ErrorCode.INTERNAL
    assert "no memory" not in failed.error.message
    assert isinstance(done, TrainDone)
    assert ("of-bad", "bad") not in bench.engine.policies


def test_a_policy_that_is_not_in_memory_is_not_guessed(bench: Bench) -> None:
    (answer,) = bench.run(Group().train("arm", 1, Arrays(1)))
    assert isinstance(answer, SlotFailed)
    assert answer.last
    assert "not in this trainer's memory" in answer.error.message


def test_a_spec_that_cannot_be_built_fails_its_slot_alone(bench: Bench) -> None:
    wrong = msgspec.structs.replace(spec(), head="crystal-ball")
    group = Group(opening("bad", wrong), opening("good")).train("bad", 1, Arrays(1)).train("good", 1, Arrays(1))
    failed, done = bench.run(group)
    assert isinstance(failed, SlotFailed)
    assert failed.error.code == ErrorCode.INVALID
    assert "crystal-ball" in failed.error.message
    assert "oft" in failed.error.message
    assert isinstance(done, TrainDone)


def test_an_unexpected_fault_while_opening_fails_its_slot_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def burst(opening: OpenSlot, *rest: object) -> Slot:
        if opening.policy == "bad":
            raise RuntimeError("not enough memory: you tried to allocate 17 GiB")
        return open_slot(opening, *rest)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(core, "open_slot", burst)
    failed, done = bench.run(
        Group(opening("bad"), opening("good")).train("bad", 1, Arrays(1)).train("good", 1, Arrays(2))
    )
    assert isinstance(failed, SlotFailed)
    assert (failed.policy, failed.error.code) == ("bad", ErrorCode.INTERNAL)
    assert "17 GiB" not in failed.error.message
    assert isinstance(done, TrainDone)
    assert [done.result.metrics["loss"]] == plain_loop(spec(), [Arrays(2)])


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
