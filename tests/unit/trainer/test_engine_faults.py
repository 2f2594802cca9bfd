"""Faults in a trainer: of an op, which is answered and changes nothing; of the service, which leaves the op undone."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from common.blobs import BlobStoreFullError
from joynexus.wire import ErrorCode
from joynexus.wire.back import OpenSlot, SlotFailed, TrainDone
from services.trainer import checkpoint, core
from services.trainer.slots import Slot, open_slot
from tests.unit.trainer.plain import plain_loop
from tests.unit.workers import CHUNK, Arrays, Bench, Group, opening, small_dataset, spec


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


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
