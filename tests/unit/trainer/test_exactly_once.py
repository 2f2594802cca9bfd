"""Promises of slots and checkpoints: each op is applied once and in order, and a kill at any moment costs no bit."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from common.blobs import digest_file
from joynexus.wire import ErrorCode, JoyNexusError, failure
from joynexus.wire.back import SlotFailed, TrainDone, TrainItem
from joynexus.wire.front import OpResult
from services.trainer import slots
from services.trainer.checkpoint import FORMAT, read_checkpoint
from tests.unit.workers import Arrays, Bench, Group, opening, small_dataset, spec


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def story(manifest: str) -> Group:
    """Ops of every kind, with a bad one and a vetoed one among them."""
    huge = Arrays(5)
    huge.action[:] = 3e38
    bad = Arrays(6)
    bad.state = bad.state[:, :2]
    group = Group()
    group.train("arm", 1, Arrays(1), "forward_backward").train("arm", 2, Arrays(2), "forward_backward")
    group.op("arm", 3, "optim_step").op("arm", 4, "publish", version=1).steps("arm", 5, [3, 1, 4], manifest)
    group.train("arm", 6, huge).train("arm", 7, bad).steps("arm", 8, [1, 5, 9], manifest)
    group.op("arm", 9, "save_state", state="half").train("arm", 10, Arrays(10))
    return group.train("arm", 11, Arrays(11)).op("arm", 12, "publish", version=2)


BOUNDARIES = (0, 3, 4, 5, 8, 10)
"""Ops after which a checkpoint may be taken."""


def results(answers: list[TrainDone | SlotFailed]) -> dict[int, OpResult]:
    assert not any(isinstance(answer, SlotFailed) for answer in answers)
    return {answer.seq: answer.result for answer in answers if answer.kind != "checkpoint"}


def at(group: Group, items: list[TrainItem], *openings: object) -> Group:
    part = Group(*openings)
    part.items, part.buffers = items, group.buffers
    return part


def checkpoint(bench: Bench, seq: int) -> str:
    (done,) = bench.done(Group().op("arm", seq, "checkpoint"))
    assert done.nbytes == bench.blobs.size(done.checkpoint)
    return done.checkpoint


@pytest.mark.parametrize("covered", BOUNDARIES)
def test_killed_between_any_two_ops_the_replay_equals_the_uninterrupted_run(bench: Bench, covered: int) -> None:
    group = story(small_dataset(bench.blobs))
    undisturbed = results(bench.run(at(group, group.items, opening("arm"))))
    final = checkpoint(bench, 12)
    for killed_after in range(covered, 13):
        bench.fresh()
        before = bench.run(at(group, group.items[:covered], opening("arm"))) if covered else []
        saved = checkpoint(bench, covered) if covered else ""
        before += bench.run(at(group, group.items[covered:killed_after], *([] if covered else [opening("arm")])))
        bench.fresh()
        after = bench.run(at(group, group.items[covered:], opening("arm", checkpoint=saved, applied_seq=covered)))
        assert results(before) | results(after) == undisturbed
        assert all(undisturbed[seq] == result for seq, result in results(before).items())
        assert checkpoint(bench, 12) == final


def test_any_cutting_into_groups_with_any_company_gives_the_same_bits(bench: Bench) -> None:
    group = story(small_dataset(bench.blobs))
    undisturbed = results(bench.run(at(group, group.items, opening("arm"))))
    final = checkpoint(bench, 12)
    for seed in range(5):
        dice = random.Random(seed)
        bench.fresh()
        rest, found = list(group.items), {}
        for turn in range(20):
            part = at(group, [rest.pop(0) for _ in range(min(len(rest), dice.randint(0, 4)))])
            part.buffers = list(group.buffers)
            part.train("guest", turn + 1, Arrays(dice.randint(100, 999), rows=dice.randint(1, 6)))
            dice.shuffle(part.items)
            part.items.sort(key=lambda item: item.seq if item.policy == "arm" else dice.random() * 12)
            if turn == 0:
                part.openings = [opening("guest", spec(seed=9)), opening("arm")]
            found |= results([answer for answer in bench.run(part) if answer.policy == "arm"])
        found |= results(bench.run(at(group, rest)))
        assert found == undisturbed
        assert checkpoint(bench, 12) == final


def test_an_op_sent_again_is_answered_from_memory_and_not_applied(bench: Bench) -> None:
    group = Group(opening("arm")).train("arm", 1, Arrays(1)).train("arm", 2, Arrays(2))
    first = bench.done(group)
    before = checkpoint(bench, 2)
    forwards = bench.backbone.samples_forwarded
    again = bench.done(at(group, group.items))
    assert [done.result for done in again] == [done.result for done in first]
    assert again == first
    assert bench.backbone.samples_forwarded == forwards
    assert checkpoint(bench, 2) == before


def test_a_group_that_comes_twice_changes_nothing(bench: Bench) -> None:
    group = Group(opening("arm")).train("arm", 1, Arrays(1)).op("arm", 1, "checkpoint").train("arm", 2, Arrays(2))
    first = bench.run(group)
    bench.done(Group().train("arm", 3, Arrays(3)))
    assert bench.run(group) == first
    bench.done(Group().train("arm", 4, Arrays(4)))


def test_a_checkpoint_that_found_the_disk_full_succeeds_once_there_is_room(bench: Bench) -> None:
    bench.done(Group(opening("arm")).train("arm", 1, Arrays(1)))
    put = bench.put_blob

    def full(path: Path) -> tuple[str, int]:
        raise OSError("no space left")

    bench.put_blob = full
    assert bench.one(Group().op("arm", 1, "checkpoint")).result.error.code == ErrorCode.UNAVAILABLE
    bench.put_blob = put
    assert bench.blobs.has(checkpoint(bench, 1))


def test_a_checkpoint_that_nobody_kept_is_written_again_when_it_is_asked_for_again(bench: Bench) -> None:
    bench.done(Group(opening("arm")).train("arm", 1, Arrays(1)))
    lost = checkpoint(bench, 1)
    bench.blobs.delete(lost)
    assert checkpoint(bench, 1) == lost
    assert bench.blobs.has(lost)


def test_a_slot_that_is_ahead_of_the_checkpoint_asked_for_is_kept(bench: Bench) -> None:
    bench.done(Group(opening("arm")).train("arm", 1, Arrays(1)))
    saved = checkpoint(bench, 1)
    forwards = bench.backbone.samples_forwarded
    ops = Group().train("arm", 2, Arrays(2)).train("arm", 3, Arrays(3))
    first = bench.done(ops)
    used = bench.backbone.samples_forwarded
    again = bench.done(at(ops, ops.items, opening("arm", checkpoint=saved, applied_seq=1)))
    assert [done.result for done in again] == [done.result for done in first]
    assert bench.backbone.samples_forwarded == used > forwards


def test_a_slot_whose_results_are_forgotten_is_opened_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_REMEMBERED_RESULTS", 2)
    ops = Group(opening("arm"))
    for seq in range(1, 6):
        ops.train("arm", seq, Arrays(seq))
    first = bench.done(ops)
    (gone,) = bench.run(at(ops, ops.items[:1]))
    assert isinstance(gone, SlotFailed)
    bench.done(at(ops, ops.items, opening("arm")))
    again = bench.done(at(ops, ops.items, opening("arm")))  # the slot is ahead, its early results are gone
    assert [done.result for done in again] == [done.result for done in first]


@pytest.mark.parametrize(("seq", "kind"), [(3, "train_step"), (5, "optim_step"), (1, "checkpoint"), (3, "checkpoint")])
def test_an_op_out_of_order_is_not_done_and_the_slot_must_be_opened_again(bench: Bench, seq: int, kind: str) -> None:
    bench.done(Group(opening("arm")).train("arm", 1, Arrays(1)).op("arm", 2, "publish", version=1)) if seq == 1 else (
        bench.done(Group(opening("arm")).train("arm", 1, Arrays(1)))
    )
    group = Group().train("arm", seq, Arrays(3)) if kind == "train_step" else Group().op("arm", seq, kind)
    (answer,) = bench.run(group)
    assert isinstance(answer, SlotFailed)
    assert answer.last
    assert answer.error.code == ErrorCode.UNAVAILABLE
    assert "open the slot again from its checkpoint" in answer.error.message
    assert bench.engine.policies == ()


def test_a_checkpoint_between_gradients_and_their_step_is_refused(bench: Bench) -> None:
    group = Group(opening("arm")).train("arm", 1, Arrays(1), "forward_backward").op("arm", 1, "checkpoint")
    _, refused, step = bench.run(group.op("arm", 2, "optim_step"))
    assert refused.result.error.code == ErrorCode.INVALID
    assert not refused.checkpoint
    assert step.result.error is None


def spoiled(bench: Bench, digest: str, change: str) -> dict[str, object]:
    """Return what to open, and put a spoiled file in its place."""
    content = bytearray(bench.blobs.path(digest).read_bytes())
    if change == "torn":
        content = content[: len(content) // 2]
    elif change == "flipped bit":
        content[-3] ^= 1
    elif change == "other format":
        content = content.replace(FORMAT.encode(), FORMAT.replace("-1", "-9").encode())
    elif change == "no checkpoint":
        content = bytearray(b"\x02\0\0\0\0\0\0\0{}")
    if change in ("torn", "flipped bit"):
        bench.blobs.path(digest).write_bytes(content)
        return {"checkpoint": digest, "applied_seq": 1}
    return {"checkpoint": bench.blobs.put_bytes(bytes(content)), "applied_seq": 1}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("torn", "is damaged: its bytes have digest"),
        ("flipped bit", "is damaged: its bytes have digest"),
        ("other format", "has format 'joynexus-checkpoint-9'"),
        ("no checkpoint", "is no checkpoint"),
    ],
)
def test_a_checkpoint_that_is_not_whole_opens_nothing(bench: Bench, change: str, sentence: str) -> None:
    bench.done(Group(opening("arm")).train("arm", 1, Arrays(1)))
    wrong = spoiled(bench, checkpoint(bench, 1), change)
    bench.fresh()
    group = Group(opening("arm", **wrong), opening("other")).train("arm", 2, Arrays(2)).train("other", 1, Arrays(1))
    failed, other = bench.run(group)
    assert isinstance(failed, SlotFailed)
    assert failed.error.code == ErrorCode.INTERNAL
    assert sentence in failed.error.message
    assert isinstance(other, TrainDone)
    assert bench.engine.policies == (("of-other", "other"),)


def test_a_checkpoint_opens_only_its_own_policy_spec_and_op(bench: Bench) -> None:
    bench.done(Group(opening("arm")).train("arm", 1, Arrays(1)))
    saved = checkpoint(bench, 1)
    for wrong, sentence in (
        (opening("leg", checkpoint=saved, applied_seq=1), "is not one of policy 'leg'"),
        (opening("arm", spec(seed=1), checkpoint=saved, applied_seq=1), "under another spec"),
        (opening("arm", checkpoint=saved, applied_seq=2), "covers op 1, not op 2"),
        (opening("arm", applied_seq=4), "'no checkpoint' covers op 0, not op 4"),
    ):
        bench.fresh()
        (failed,) = bench.run(Group(wrong))
        assert isinstance(failed, SlotFailed)
        assert sentence in failed.error.message
        assert failed.last


def test_a_checkpoint_of_another_backbone_is_refused(bench: Bench) -> None:
    bench.done(Group(opening("arm")).train("arm", 1, Arrays(1)))
    saved = checkpoint(bench, 1)
    bench.fresh()
    bench.backbone.digest = "cd" * 16
    (failed,) = bench.run(Group(opening("arm", checkpoint=saved, applied_seq=1)))
    assert isinstance(failed, SlotFailed)
    assert "trained on backbone " + "ab" * 16 in failed.error.message


def test_a_checkpoint_that_cannot_be_had_now_may_be_had_later(bench: Bench) -> None:
    bench.done(Group(opening("arm")).train("arm", 1, Arrays(1)))
    saved = checkpoint(bench, 1)
    bench.fresh()
    opened, bench.open_blob = bench.open_blob, lambda digest: Path("/nowhere") / bench.blobs.path("0" * 64)
    group = Group(opening("arm", checkpoint=saved, applied_seq=1)).train("arm", 2, Arrays(2))
    (failed,) = bench.run(group)
    assert isinstance(failed, SlotFailed)
    assert failed.error.code == ErrorCode.UNAVAILABLE
    bench.open_blob = opened
    assert bench.done(group)[0].step == 2


def test_an_op_on_a_damaged_blob_is_never_counted_as_applied_and_the_blob_is_named(bench: Bench) -> None:
    """As an op's own error it would stand in the journal, while a replay on the restored blob changes the weights."""
    manifest = small_dataset(bench.blobs)
    group = Group(opening("arm")).train("arm", 1, Arrays(1)).steps("arm", 2, [3, 1], manifest)
    opened = bench.open_blob

    def damaged(digest: str) -> Path:
        raise JoyNexusError(failure(ErrorCode.BAD_DATA, f"blob {digest} is damaged on the shared disk"))

    bench.open_blob = damaged
    first, failed = bench.run(group)
    assert isinstance(first, TrainDone)
    assert isinstance(failed, SlotFailed)
    assert (failed.error.code, failed.error.category) == (ErrorCode.BAD_DATA, "user")
    assert f"op 2 of policy 'arm' cannot be done: blob {manifest}" in failed.error.message
    bench.open_blob = opened
    restored = results(list(bench.done(group)))
    bench.fresh()
    assert results(list(bench.done(group))) == restored


def test_a_policy_whose_checkpoint_is_damaged_is_not_opened_and_the_blob_is_named(bench: Bench) -> None:
    bench.done(Group(opening("arm")).train("arm", 1, Arrays(1)))
    saved = checkpoint(bench, 1)
    bench.fresh()

    def damaged(digest: str) -> Path:
        raise JoyNexusError(failure(ErrorCode.BAD_DATA, f"blob {digest} is damaged on the shared disk"))

    bench.open_blob = damaged
    (failed,) = bench.run(Group(opening("arm", checkpoint=saved, applied_seq=1)).train("arm", 2, Arrays(2)))
    assert isinstance(failed, SlotFailed)
    assert failed.error.code == ErrorCode.BAD_DATA
    assert saved in failed.error.message


def test_a_checkpoint_says_what_it_covers_and_equal_states_have_equal_digests(bench: Bench, tmp_path: Path) -> None:
    other = Bench(tmp_path / "other")
    digests = []
    for each in (bench, other):
        each.done(Group(opening("arm")).train("arm", 1, Arrays(1)).train("arm", 2, Arrays(2)))
        digests.append(checkpoint(each, 2))
    assert digests[0] == digests[1] == digest_file(bench.blobs.path(digests[0]))
    tensors, meta = read_checkpoint(bench.blobs.path(digests[0]), digests[0])
    assert (meta.tenant, meta.policy, meta.applied_seq, meta.step) == ("of-arm", "arm", 2, 2)
    assert any(name.startswith("optimizer.exp_avg.") for name in tensors)
    assert msgspec.to_builtins(meta)["backbone"] == "ab" * 16


def test_a_skipped_op_counts_and_does_nothing(bench: Bench) -> None:
    def losses(skipped: bool) -> list[float]:
        bench.fresh()
        group = Group(opening("arm")).train("arm", 1, Arrays(1))
        if skipped:
            group.op("arm", 2, "train_step", skip=True)
        group.train("arm", 2 + skipped, Arrays(3))
        return [done.result.metrics["loss"] for done in bench.done(group) if done.result.metrics]

    assert losses(skipped=True) == losses(skipped=False)


def test_an_op_set_aside_after_it_was_applied_here_does_not_stay_in_the_weights(bench: Bench) -> None:
    ops = Group(opening("arm")).train("arm", 1, Arrays(1)).train("arm", 2, Arrays(2))
    bench.done(ops)
    aside = Group(opening("arm")).train("arm", 1, Arrays(1)).op("arm", 2, "train_step", skip=True)
    aside.train("arm", 3, Arrays(3))
    first, failed = bench.run(aside)
    assert isinstance(first, TrainDone)
    assert isinstance(failed, SlotFailed)
    assert failed.error.category == "server"
    again = bench.done(aside)
    bench.fresh()
    assert [done.result for done in bench.done(aside)] == [done.result for done in again]
