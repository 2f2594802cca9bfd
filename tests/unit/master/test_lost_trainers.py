"""Trainers that are lost: their ops are replayed to the same bits, and an op that kills them is set aside."""

from __future__ import annotations

import msgspec

from common.journal.records import UsageRecord
from joynexus.wire.back import Leaving, TrainGroup
from joynexus.wire.errors import ErrorCode, failure
from joynexus.wire.front import Accepted, OpResult, OptimStep
from services.master.config import CoreConfig
from tests.unit.master.actors import FakeTrainer, Weights, new_incarnation
from tests.unit.master.ops import BUFFERS, forward
from tests.unit.master.queued import items, steps, waiting_groups
from tests.unit.master.world import World, run

# Loss


def test_a_lost_trainers_ops_are_replayed_from_the_checkpoint_to_the_same_weights() -> None:
    world = World(CoreConfig(checkpoint_steps=4))
    world.create()
    lease = world.lease()
    first = FakeTrainer(world, new_incarnation())
    for seq in range(1, 15):
        message = forward(lease, seq) if seq % 2 else OptimStep(policy="p", lease=lease, seq=seq)
        world.tell(message, buffers=BUFFERS if seq % 2 else ())
    run(first)
    reached = first.slots["a", "p"]
    first.die()
    world.wait(10)
    second = FakeTrainer(world, new_incarnation())
    assert not second.inbox, "nothing is replayed before it is needed"
    steps(world, lease, 15, 15)
    run(second)
    (opening,) = [slot for group in second.groups for slot in group.slots]
    assert opening.applied_seq == 8
    replayed = [item for item in items(second) if item.replay]
    assert [item.seq for item in replayed] == list(range(9, 15))
    assert second.slots["a", "p"].step == reached.step + 1
    assert not any(log.event == "replay_differs" for log in world.logs)


def test_a_replay_that_comes_out_differently_is_logged_and_what_was_told_stands(world: World, lease: str) -> None:
    first = FakeTrainer(world, new_incarnation())
    message = forward(lease, 1)
    world.tell(message, buffers=BUFFERS)
    run(first)
    told = world.ask(message, OpResult, buffers=BUFFERS)
    first.die()
    world.wait(10)

    class Odd(FakeTrainer):
        def _item(self, group, item, send):  # type: ignore[no-untyped-def]
            done = super()._item(group, item, send)
            other = msgspec.structs.replace(done.result, metrics={"loss": 123.0})
            return msgspec.structs.replace(done, result=other)

    odd = Odd(world, new_incarnation())
    steps(world, lease, 2, 2)
    run(odd)
    assert world.ask(message, OpResult, buffers=BUFFERS) == told
    assert [log.fields["loss_again"] for log in world.logs if log.event == "replay_differs"] == [123.0]


def test_a_late_result_of_a_trainer_that_was_declared_dead_is_refused(world: World, lease: str) -> None:
    first = FakeTrainer(world, new_incarnation())
    (id,) = steps(world, lease, 1, 1)
    world.wait(10)  # it is stopped, not dead
    second = FakeTrainer(world, new_incarnation(), key="other")
    first.work()
    refusals = [send.message for send in world.sent[first.peer] if getattr(send.message, "code", None)]
    assert [refusal.code for refusal in refusals] == [ErrorCode.NOT_REGISTERED]  # type: ignore[attr-defined]
    assert [type(answer) for answer in world.answers(id)] == [Accepted]
    run(second)
    assert second.applied["a", "p", 1] == 1
    assert [type(answer) for answer in world.answers(id)] == [Accepted, OpResult]


def test_a_result_under_another_attempt_is_stale(world: World, lease: str) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    steps(world, lease, 1, 1)
    send = trainer.inbox[0]
    group = send.message
    assert isinstance(group, TrainGroup)
    trainer.slots["a", "p"] = Weights()
    done = trainer._item(group, group.items[0], send)
    for wrong in ({"attempt": 2}, {"task": "other"}):
        id = world.say(trainer.peer, msgspec.structs.replace(done, **wrong))
        (answer,) = world.answers(id)
        assert answer.code is ErrorCode.STALE  # type: ignore[attr-defined]


def test_a_result_that_comes_twice_counts_once(world: World, lease: str) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    ids = steps(world, lease, 1, 2)
    send = trainer.inbox[0]
    group = send.message
    assert isinstance(group, TrainGroup)
    trainer.slots["a", "p"] = Weights()
    done = trainer._item(group, group.items[0], send)
    world.say(trainer.peer, done)
    world.say(trainer.peer, done)
    assert [type(answer) for answer in world.answers(ids[0])] == [Accepted, OpResult]
    (usage,) = [record for record in world.journal.of(UsageRecord) if record.policy == "p"]
    assert usage.samples == 1


def test_a_leaving_trainer_finishes_and_its_policies_move(world: World, lease: str) -> None:
    first = FakeTrainer(world, new_incarnation(), credit=1)
    steps(world, lease, 1, 30)
    world.say(first.peer, Leaving())
    run(first)
    assert [item.kind for item in first.groups[-1].items] == ["checkpoint"], "no new op was given to it"
    second = FakeTrainer(world, new_incarnation(), key="other")
    run(first, second)
    assert second.slots["a", "p"].applied_seq == 30
    assert not any(item.replay for item in items(second))


# Slots and poison


def test_a_spec_that_no_trainer_can_build_fails_its_ops_with_the_trainers_sentence(world: World, lease: str) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    trainer.refuses = failure(ErrorCode.INVALID, "oft has no option 'wdith'")
    (id,) = steps(world, lease, 1, 1)
    run(trainer)
    result = world.answers(id)[-1]
    assert isinstance(result, OpResult)
    assert result.error is not None
    assert "wdith" in result.error.message
    trainer.refuses = None
    ids = steps(world, lease, 2, 2)
    run(trainer)
    assert world.answers(ids[0])[-1].error is None  # type: ignore[attr-defined]


def test_a_slot_that_fails_for_a_passing_reason_is_opened_again(world: World, lease: str) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    trainer.refuses = failure(ErrorCode.UNAVAILABLE, "the blob store cannot be reached")
    (id,) = steps(world, lease, 1, 1)
    run(trainer)
    trainer.refuses = None
    world.wait(1.5)
    run(trainer)
    assert isinstance(world.answers(id)[-1], OpResult)
    assert trainer.applied["a", "p", 1] == 1


def test_an_op_that_kills_its_trainer_three_times_is_set_aside_and_others_are_unaffected(world: World) -> None:
    for tenant in ("guilty", "innocent"):
        world.create(tenant=tenant)
    guilty = steps(world, world.lease(tenant="guilty"), 1, 3, tenant="guilty")
    innocent = steps(world, world.lease(tenant="innocent"), 1, 1, tenant="innocent")
    for life in range(1 + CoreConfig().kills):
        trainer = FakeTrainer(world, new_incarnation(), key=f"life{life}")
        trainer.killed_by = {2}
        run(trainer)
        world.wait(10)
    last = FakeTrainer(world, new_incarnation(), key="last")
    last.killed_by = {2}
    run(last)
    results = [world.answers(id)[-1] for id in guilty]
    assert all(isinstance(result, OpResult) for result in results), results
    assert [result.error.code if result.error else None for result in results] == [  # type: ignore[attr-defined]
        None,
        ErrorCode.POISON,
        None,
    ]
    assert world.answers(innocent[0])[-1].error is None  # type: ignore[attr-defined]


def test_a_suspect_op_is_sent_alone(world: World) -> None:
    for tenant in ("a", "b"):
        world.create(tenant=tenant)
    steps(world, world.lease(tenant="a"), 1, 4, tenant="a")
    steps(world, world.lease(tenant="b"), 1, 4, tenant="b")
    first = FakeTrainer(world, new_incarnation())
    first.die()
    world.wait(10)
    second = FakeTrainer(world, new_incarnation(), key="other")
    assert [len(group.items) for group in waiting_groups(second)] == [1], "one op, and nothing beside it"
    run(second)
    assert all(count == 1 for count in second.applied.values())
    assert len(second.applied) == 8


def test_only_deaths_over_an_op_alone_count_against_it() -> None:
    world = World(CoreConfig(kills=2))
    ids = []
    for tenant in ("a", "b"):
        world.create(tenant=tenant)
        ids += steps(world, world.lease(tenant=tenant), 1, 1, tenant=tenant)
    had = []
    for life in range(3):  # over both; over one; over the one again that comes first, or the other
        trainer = FakeTrainer(world, new_incarnation(), key=f"life{life}")
        had.append([len(group.items) for group in waiting_groups(trainer)])
        if life == 2:
            trainer.work(1)
        trainer.die()
        world.wait(10)
    assert had == [[2], [1], [1]]
    run(FakeTrainer(world, new_incarnation(), key="last"))
    assert [world.answers(id)[-1].error for id in ids] == [None, None]  # type: ignore[attr-defined]


def test_a_set_aside_op_is_skipped_by_replays_too(world: World, lease: str) -> None:
    steps(world, lease, 1, 3)
    for life in range(4):
        trainer = FakeTrainer(world, new_incarnation(), key=f"life{life}")
        trainer.killed_by = {2}
        run(trainer)
        trainer.die()
        world.wait(10)
    world.crash()
    steps(world, lease, 4, 4)
    last = FakeTrainer(world, new_incarnation(), key="last")
    last.killed_by = {2}
    run(last)
    assert [item.skip for item in items(last) if item.kind != "checkpoint"] == [False, True, False, False]
    assert last.slots["a", "p"].applied_seq == 4
