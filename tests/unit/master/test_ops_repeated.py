"""Ops that come again: applied once, with one result, however often and whenever they are sent."""

from __future__ import annotations

import pytest

from common.journal.records import OpRecord
from joynexus.wire import ErrorCode
from joynexus.wire.front import Accepted, OpResult, OptimStep
from services.master.config import CoreConfig
from tests.unit.master.actors import FakeTrainer, new_incarnation
from tests.unit.master.ops import BUFFERS, forward, kinds
from tests.unit.master.world import World, run


def test_retry_after_lost_reply_applies_once(world: World, lease: str) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    world.tell(forward(lease, 1), buffers=BUFFERS)
    run(trainer)
    again = world.tell(forward(lease, 1), buffers=BUFFERS)
    assert kinds(world.answers(again)) == [OpResult]
    run(trainer)
    assert trainer.applied["a", "p", 1] == 1


@pytest.mark.parametrize("phase", ["received", "journaled", "dispatched", "applied"])
def test_retry_in_every_phase_is_the_same_op_and_gets_the_result(world: World, lease: str, phase: str) -> None:
    trainer = FakeTrainer(world, new_incarnation()) if phase != "journaled" else None
    world.auto_persist = False
    first = world.tell(forward(lease, 1), buffers=BUFFERS)
    if phase != "received":
        world.write()
    if phase == "applied":
        assert trainer is not None
        trainer.work()
    again = world.tell(forward(lease, 1), buffers=BUFFERS)
    world.auto_persist = True
    world.settle()
    run(trainer or FakeTrainer(world, new_incarnation()))
    for id in (first, again):
        assert kinds(world.answers(id)) == [Accepted, OpResult]
    assert len(world.journal.of(OpRecord)) == 1


def test_the_result_goes_to_the_connection_on_which_it_was_asked_for_again(world: World, lease: str) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    world.tell(OptimStep(policy="p", lease=lease, seq=1), id="x")
    other = world.new_peer("front")
    world.tell(OptimStep(policy="p", lease=lease, seq=1), id="y", peer=other)
    run(trainer)
    assert kinds([send.message for send in world.sent[other]]) == [Accepted, OpResult]


def test_the_same_request_asked_twice_gets_one_result(world: World, lease: str) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    for _ in range(3):
        world.tell(OptimStep(policy="p", lease=lease, seq=1), id="x")
    run(trainer)
    assert kinds(world.answers("x")).count(OpResult) == 1


def test_a_retry_after_the_master_restarted_gets_the_result(world: World, lease: str) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    world.tell(forward(lease, 1), buffers=BUFFERS)
    world.crash()
    id = world.tell(forward(lease, 1), buffers=BUFFERS)
    assert kinds(world.answers(id)) == [Accepted]
    trainer.connect()
    run(trainer)
    assert kinds(world.answers(id)) == [Accepted, OpResult]


def test_a_stored_result_is_the_same_after_a_restart(world: World, lease: str) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    first = world.tell(forward(lease, 1), buffers=BUFFERS)
    run(trainer)
    world.crash()
    again = world.ask(forward(lease, 1), OpResult, buffers=BUFFERS)
    assert again == world.answers(first)[1]


def test_a_retry_under_a_new_lease_is_the_same_op(world: World, lease: str) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    world.tell(forward(lease, 1), buffers=BUFFERS)
    run(trainer)
    assert isinstance(world.ask(forward("another", 1), OpResult, buffers=BUFFERS), OpResult)


def test_same_seq_with_another_payload_is_a_conflict_and_the_first_stands(world: World, lease: str) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    world.tell(forward(lease, 1), buffers=BUFFERS)
    for message, buffers in (
        (forward(lease, 1, text="other"), BUFFERS),
        (forward(lease, 1), (b"\0" * 8, *BUFFERS[1:])),
        (OptimStep(policy="p", lease=lease, seq=1), ()),
    ):
        refused = world.refused(message, buffers=buffers)
        assert refused.code is ErrorCode.CONFLICT
    run(trainer)
    assert trainer.applied["a", "p", 1] == 1


def test_a_gap_names_the_expected_number(world: World, lease: str) -> None:
    refused = world.refused(OptimStep(policy="p", lease=lease, seq=3))
    assert refused.code is ErrorCode.GAP
    assert "expected 1" in refused.message


def test_an_op_whose_reply_is_forgotten_is_never_run_again() -> None:
    world = World(CoreConfig(kept_replies=2, checkpoint_steps=1))
    world.create()
    lease = world.lease()
    trainer = FakeTrainer(world, new_incarnation())
    for seq in range(1, 7):
        world.tell(OptimStep(policy="p", lease=lease, seq=seq))
        run(trainer)
    refused = world.refused(OptimStep(policy="p", lease=lease, seq=4))
    assert refused.code is ErrorCode.FORGOTTEN
    assert world.ask(OptimStep(policy="p", lease=lease, seq=5), OpResult).seq == 5
    world.crash()
    assert world.refused(OptimStep(policy="p", lease=lease, seq=1)).code is ErrorCode.FORGOTTEN
    assert world.ask(OptimStep(policy="p", lease=lease, seq=6), OpResult).seq == 6


def test_too_many_unanswered_ops_are_told_to_wait() -> None:
    world = World(CoreConfig(max_inflight_ops=2))
    world.create()
    lease = world.lease()
    for seq in (1, 2):
        world.ask(OptimStep(policy="p", lease=lease, seq=seq), Accepted)
    refused = world.refused(OptimStep(policy="p", lease=lease, seq=3))
    assert refused.code is ErrorCode.OVERLOADED
    assert refused.retry_after_ms > 0
    run(FakeTrainer(world, new_incarnation()))
    world.ask(OptimStep(policy="p", lease=lease, seq=3), Accepted)


def test_a_loop_that_never_steps_is_stopped_before_it_fills_the_disk() -> None:
    world = World(CoreConfig(uncheckpointed_ops=3))
    world.create()
    lease = world.lease()
    trainer = FakeTrainer(world, new_incarnation())
    for seq in (1, 2, 3):
        world.tell(forward(lease, seq), buffers=BUFFERS)
        run(trainer)
    refused = world.refused(forward(lease, 4), buffers=BUFFERS)
    assert refused.code is ErrorCode.OVERLOADED
    assert "optim_step" in refused.message
    world.ask(OptimStep(policy="p", lease=lease, seq=4), Accepted)
