"""Ops: acknowledged when durable, applied once, whatever is repeated or lost."""

from __future__ import annotations

import msgspec
import pytest

from common.journal.records import OpDone, OpRecord
from joynexus.wire import ErrorCode, Failure, split
from joynexus.wire.front import (
    Accepted,
    DatasetSamples,
    ForwardBackward,
    GetPolicy,
    LoadState,
    OpResult,
    OptimStep,
    PolicyInfo,
    Publish,
    Samples,
    SaveState,
)
from services.master.config import CoreConfig
from services.master.ops import TRANSITIONS, InvalidTransition, Op, OpState
from tests.unit.master.actors import FakeTrainer, new_incarnation
from tests.unit.master.ops import BUFFERS, SAMPLES, forward, kinds
from tests.unit.master.world import World, run

# Acknowledgement


def test_an_op_is_acknowledged_only_once_it_is_on_disk(world: World, lease: str) -> None:
    world.auto_persist = False
    id = world.tell(OptimStep(policy="p", lease=lease, seq=1))
    assert world.answers(id) == []
    world.write()
    assert world.answers(id) == [Accepted(policy="p", seq=1)]


def test_an_op_is_given_to_a_trainer_only_once_it_is_on_disk(world: World, lease: str) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    world.auto_persist = False
    world.tell(OptimStep(policy="p", lease=lease, seq=1))
    assert not trainer.inbox
    world.write()
    assert len(trainer.inbox) == 1


def test_a_result_is_told_only_once_it_is_on_disk(world: World, lease: str) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    id = world.tell(OptimStep(policy="p", lease=lease, seq=1))
    world.auto_persist = False
    trainer.work()
    assert kinds(world.answers(id)) == [Accepted]
    while world.unwritten:
        world.write()
    assert kinds(world.answers(id)) == [Accepted, OpResult]


def test_a_full_disk_refuses_the_op_and_the_same_seq_works_once_there_is_room(world: World, lease: str) -> None:
    world.journal.full = True
    first = world.tell(OptimStep(policy="p", lease=lease, seq=1), id="one")
    (answer,) = world.answers(first)
    assert isinstance(answer, Failure)
    assert answer.code is ErrorCode.UNAVAILABLE
    assert "disk is full" in answer.message
    assert answer.retry_after_ms > 0
    world.journal.full = False
    again = world.tell(OptimStep(policy="p", lease=lease, seq=1), id="two")
    assert world.answers(again) == [Accepted(policy="p", seq=1)]


def test_ops_behind_one_that_the_disk_refused_are_refused_too_and_may_come_again_in_any_order(
    world: World, lease: str
) -> None:
    world.auto_persist = False
    for seq in (1, 2, 3):
        world.tell(OptimStep(policy="p", lease=lease, seq=seq), id=f"first{seq}")
    world.journal.full = True
    world.write()
    world.journal.full = False
    world.auto_persist = True
    world.settle()
    assert [world.answers(f"first{seq}")[0].code for seq in (1, 2, 3)] == [ErrorCode.UNAVAILABLE] * 3  # type: ignore[attr-defined]
    early = world.refused(OptimStep(policy="p", lease=lease, seq=3))
    assert early.code is ErrorCode.UNAVAILABLE  # not GAP: it was accepted before
    for seq in (1, 2, 3):
        assert world.ask(OptimStep(policy="p", lease=lease, seq=seq), Accepted).seq == seq


def test_what_the_disk_refused_is_not_there_after_a_restart(world: World, lease: str) -> None:
    world.auto_persist = False
    world.tell(OptimStep(policy="p", lease=lease, seq=1))
    world.tell(OptimStep(policy="p", lease=lease, seq=2))
    world.journal.full = True
    world.write()
    world.journal.full = False
    world.write()  # seq 2 reaches the disk although seq 1 did not
    world.auto_persist = True
    world.crash()
    assert world.ask(GetPolicy(policy="p"), PolicyInfo).next_seq == 1


def test_an_op_refused_together_with_one_before_it_stays_refused_after_a_restart(world: World, lease: str) -> None:
    world.auto_persist = False
    for seq in (1, 2, 3):
        world.tell(OptimStep(policy="p", lease=lease, seq=seq))
    world.journal.full = True
    world.write()
    world.journal.full = False
    world.auto_persist = True
    world.settle()  # seqs 2 and 3 reach the disk
    world.ask(OptimStep(policy="p", lease=lease, seq=1), Accepted)
    world.crash()
    assert world.ask(GetPolicy(policy="p"), PolicyInfo).next_seq == 2
    world.ask(OptimStep(policy="p", lease=lease, seq=2), Accepted)
    world.crash()
    assert world.ask(GetPolicy(policy="p"), PolicyInfo).next_seq == 3


def test_a_result_survives_a_full_disk_and_is_told_when_there_is_room(world: World, lease: str) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    id = world.tell(OptimStep(policy="p", lease=lease, seq=1))
    world.journal.full = True
    run(trainer)
    assert kinds(world.answers(id)) == [Accepted]
    other = world.refused(OptimStep(policy="p", lease=lease, seq=2))
    assert other.code is ErrorCode.UNAVAILABLE
    world.journal.full = False
    world.wait(3)
    assert kinds(world.answers(id)) == [Accepted, OpResult]
    assert len(world.journal.of(OpDone)) == 1


# Payloads


def test_inline_samples_reach_the_trainer_as_they_came_also_after_a_restart(world: World, lease: str) -> None:
    world.tell(forward(lease, 1), buffers=BUFFERS)
    world.crash()
    trainer = FakeTrainer(world, new_incarnation())
    send = trainer.inbox[0]
    (item,) = send.message.items  # type: ignore[attr-defined]
    assert item.samples == msgspec.msgpack.encode(SAMPLES)
    assert tuple(bytes(buffer) for buffer in send.buffers) == BUFFERS
    assert item.buffers == len(BUFFERS)


def test_inline_samples_wait_on_disk_when_memory_is_short() -> None:
    world = World(CoreConfig(payload_memory_bytes=0))
    world.create()
    lease = world.lease()
    world.tell(forward(lease, 1), buffers=BUFFERS)
    trainer = FakeTrainer(world, new_incarnation())
    assert tuple(bytes(buffer) for buffer in trainer.inbox[0].buffers) == BUFFERS


def test_samples_of_several_ops_share_a_group_and_keep_their_own_buffers(world: World, lease: str) -> None:
    for seq in (1, 2):
        world.tell(forward(lease, seq), buffers=(bytes([seq]) * 8, *BUFFERS[1:]))
    trainer = FakeTrainer(world, new_incarnation())
    send = trainer.inbox[0]
    for item in send.message.items:  # type: ignore[attr-defined]
        assert bytes(send.buffers[item.first_buffer]) == bytes([item.seq]) * 8


def test_a_lost_payload_fails_its_op_alone_with_a_sentence(world: World, lease: str) -> None:
    world.tell(forward(lease, 1), buffers=BUFFERS)
    id = world.tell(OptimStep(policy="p", lease=lease, seq=2))
    world.crash()
    world.journal.payloads.clear()
    trainer = FakeTrainer(world, new_incarnation())
    run(trainer)
    lost = world.ask(forward(lease, 1), OpResult, buffers=BUFFERS)
    assert lost.error is not None
    assert lost.error.code is ErrorCode.INTERNAL
    assert trainer.applied["a", "p", 2] == 1
    assert kinds(world.answers(id)) == [Accepted]  # asked before the restart, on a connection that is gone


def test_large_inline_samples_are_told_to_come_as_a_blob(world: World, lease: str) -> None:
    refused = world.refused(forward(lease, 1), buffers=(b"x" * 300_000,))
    assert refused.code is ErrorCode.TOO_LARGE
    assert "blob" in refused.message


def test_a_payload_blob_must_be_the_tenants_own(world: World, lease: str) -> None:
    digest = "d" * 64
    world.upload(digest, tenant="b")
    message = ForwardBackward(policy="p", lease=lease, seq=1, payload=digest)
    assert world.refused(message).code is ErrorCode.NOT_FOUND
    world.upload(digest)
    world.ask(message, Accepted)


def test_exactly_one_source_of_samples_is_asked_for(world: World, lease: str) -> None:
    none = ForwardBackward(policy="p", lease=lease, seq=1)
    two = ForwardBackward(
        policy="p", lease=lease, seq=1, payload="d" * 64, dataset=DatasetSamples(dataset="d", indices=(1,))
    )
    for message in (none, two):
        refused = world.refused(message)
        assert refused.code is ErrorCode.INVALID
        assert "exactly one" in refused.message


def test_the_journal_row_holds_what_a_replay_needs(world: World, lease: str) -> None:
    world.tell(forward(lease, 1), buffers=BUFFERS)
    body, *buffers = split(world.journal.payload("a", "p", 1))
    assert msgspec.msgpack.decode(body, type=Samples) == SAMPLES
    assert tuple(bytes(buffer) for buffer in buffers) == BUFFERS


# States and versions


def test_a_version_number_is_issued_when_the_op_is_accepted(world: World, lease: str) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    for seq in (1, 2):
        world.tell(Publish(policy="p", lease=lease, seq=seq))
    run(trainer)
    info = world.ask(GetPolicy(policy="p"), PolicyInfo)
    assert [version.version for version in info.versions] == [1, 2]


def test_a_state_is_loaded_as_it_was_saved_even_if_both_ops_are_under_way_together(world: World, lease: str) -> None:
    world.tell(OptimStep(policy="p", lease=lease, seq=1))
    world.tell(SaveState(policy="p", lease=lease, seq=2, state="best"))
    world.tell(OptimStep(policy="p", lease=lease, seq=3))
    world.tell(LoadState(policy="p", lease=lease, seq=4, state="best"))
    trainer = FakeTrainer(world, new_incarnation())
    run(trainer)
    assert trainer.slots["a", "p"].step == 1
    assert world.ask(GetPolicy(policy="p"), PolicyInfo).states == ("best",)


def test_replaying_a_load_takes_the_state_of_then_not_a_newer_one_of_that_name(world: World, lease: str) -> None:
    def play(world: World, lease: str) -> None:
        world.tell(SaveState(policy="p", lease=lease, seq=1, state="s"))
        world.tell(forward(lease, 2), buffers=BUFFERS)
        world.tell(OptimStep(policy="p", lease=lease, seq=3))
        world.tell(LoadState(policy="p", lease=lease, seq=4, state="s"))
        world.tell(forward(lease, 5, text="other"), buffers=BUFFERS)
        world.tell(OptimStep(policy="p", lease=lease, seq=6))
        world.tell(SaveState(policy="p", lease=lease, seq=7, state="s"))

    calm = World()
    calm.create()
    undisturbed = FakeTrainer(calm, new_incarnation())
    play(calm, calm.lease())
    run(undisturbed)

    play(world, lease)
    first = FakeTrainer(world, new_incarnation())
    run(first)
    first.die()
    world.crash()
    second = FakeTrainer(world, new_incarnation())
    world.tell(OptimStep(policy="p", lease=lease, seq=8))
    run(second)
    calm.tell(OptimStep(policy="p", lease=calm.lease(), seq=8))
    run(undisturbed)
    assert second.slots == undisturbed.slots
    assert not [log for log in world.logs if log.event == "replay_differs"]


def test_an_unknown_state_is_refused_with_a_sentence(world: World, lease: str) -> None:
    refused = world.refused(LoadState(policy="p", lease=lease, seq=1, state="nope"))
    assert refused.code is ErrorCode.NOT_FOUND
    assert "save it first" in refused.message


def test_loading_a_state_that_could_not_be_saved_fails_and_the_sequence_goes_on(world: World, lease: str) -> None:
    world.tell(SaveState(policy="p", lease=lease, seq=1, state="s"))
    load = world.tell(LoadState(policy="p", lease=lease, seq=2, state="s"))
    after = world.tell(OptimStep(policy="p", lease=lease, seq=3))
    trainer = FakeTrainer(world, new_incarnation())
    trainer.errors[1] = world.refused(OptimStep(policy="p", lease=lease, seq=9))
    run(trainer)
    result = world.answers(load)[-1]
    assert isinstance(result, OpResult)
    assert result.error is not None
    assert isinstance(world.answers(after)[-1], OpResult)


# The table


def test_a_step_that_the_table_does_not_have_tells_the_ops_story() -> None:
    op = Op(OpRecord(tenant="a", policy="p", seq=7, kind="optim_step"))
    op.move(OpState.JOURNALED, "durable")
    with pytest.raises(InvalidTransition, match=r"op 7 of 'p'.*received→journaled: durable"):
        op.move(OpState.REPLIED, "too early")


def test_every_state_can_be_reached_and_every_end_is_an_end() -> None:
    reachable, found = set(), {OpState.RECEIVED}
    while found - reachable:
        state = (found - reachable).pop()
        reachable.add(state)
        found |= TRANSITIONS[state]
    assert reachable == set(OpState)
    assert {state for state in OpState if not TRANSITIONS[state]} == {OpState.REPLIED, OpState.FAILED}
