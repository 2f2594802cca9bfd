"""The Training queue: order within a policy, fairness between tenants, groups, checkpoints, loss and poison."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from common.journal.records import CheckpointRecord, OpRecord, UsageRecord
from joynexus.specs import PolicySpec
from joynexus.wire.back import OpenSlot, TrainGroup
from joynexus.wire.front import Accepted, GetPolicy, OpResult, OptimStep, PolicyInfo, Publish, SaveState
from services.master.config import CoreConfig
from tests.unit.master.actors import FakeTrainer, Weights, new_incarnation
from tests.unit.master.ops import BUFFERS, forward
from tests.unit.master.queued import EVERY_STEP, items, steps, waiting_groups
from tests.unit.master.world import SPEC, World, run

# Order and groups


def test_ops_of_a_policy_are_sent_in_order_and_only_to_its_home(world: World, lease: str) -> None:
    trainers = [FakeTrainer(world, new_incarnation(), key=str(index)) for index in range(2)]
    steps(world, lease, 1, 20)
    run(*trainers)
    at_home = [trainer for trainer in trainers if trainer.groups]
    assert len(at_home) == 1
    assert [item.seq for item in items(at_home[0]) if item.kind != "checkpoint"] == list(range(1, 21))


def test_policies_spread_over_trainers(world: World) -> None:
    trainers = [FakeTrainer(world, new_incarnation(), key=str(index)) for index in range(2)]
    for policy in ("p", "q"):
        world.create(policy)
        steps(world, world.lease(policy), 1, 2, policy=policy)
    run(*trainers)
    assert all(trainer.groups for trainer in trainers)


def test_consecutive_ops_share_a_group_up_to_the_limit(world: World, lease: str) -> None:
    steps(world, lease, 1, 40)
    trainer = FakeTrainer(world, new_incarnation(), credit=2)
    assert [len(group.items) for group in waiting_groups(trainer)] == [16, 16]


def test_a_trainer_gets_no_more_groups_than_its_credit(world: World, lease: str) -> None:
    steps(world, lease, 1, 60)
    trainer = FakeTrainer(world, new_incarnation(), credit=2)
    while trainer.inbox:
        assert len(trainer.inbox) <= 2
        trainer.work(1)
    assert trainer.slots["a", "p"].applied_seq == 60


def test_policies_of_different_tenants_share_a_group(world: World) -> None:
    for tenant in ("a", "b", "c"):
        world.create(tenant=tenant)
        steps(world, world.lease(tenant=tenant), 1, 4, tenant=tenant)
    trainer = FakeTrainer(world, new_incarnation())
    first = waiting_groups(trainer)[0]
    assert {item.tenant for item in first.items} == {"a", "b", "c"}
    assert len(first.slots) == 3


def test_each_result_is_told_when_its_own_part_is_done(world: World) -> None:
    ids = {}
    for tenant in ("a", "b"):
        world.create(tenant=tenant)
        (ids[tenant],) = steps(world, world.lease(tenant=tenant), 1, 1, tenant=tenant)
    trainer = FakeTrainer(world, new_incarnation())
    send = trainer.inbox.popleft()
    group = send.message
    assert isinstance(group, TrainGroup)
    for opening in group.slots:
        trainer.slots[opening.tenant, opening.policy] = Weights()
    answer = trainer._item(group, group.items[0], send)
    world.say(trainer.peer, answer)
    told = {tenant: [type(m) for m in world.answers(id)] for tenant, id in ids.items()}
    assert told[group.items[0].tenant] == [Accepted, OpResult]
    assert told[group.items[1].tenant] == [Accepted]


def test_a_slot_is_opened_once_per_trainer_life(world: World, lease: str) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    for seq in range(1, 6):
        steps(world, lease, seq, seq)
        run(trainer)
    (opening,) = [slot for group in trainer.groups for slot in group.slots]
    assert opening == OpenSlot(tenant="a", policy="p", spec=SPEC, life=opening.life)


def test_a_policy_waits_for_a_trainer_with_its_backbone(world: World) -> None:
    world.create("q", spec=msgspec.structs.replace(SPEC, backbone="qwen"))
    steps(world, world.lease("q"), 1, 1, policy="q")
    other = FakeTrainer(world, new_incarnation())
    assert not other.inbox
    right = FakeTrainer(world, new_incarnation(), backbone_name="qwen", key="other")
    assert len(right.inbox) == 1


# Fairness


def test_a_tenant_with_very_many_ops_waits_in_its_own_lane() -> None:
    world = World(CoreConfig(max_inflight_ops=10_000, group_ops=8, turn_ops=4))
    for tenant in ("greedy", "modest"):
        world.create(tenant=tenant)
    steps(world, world.lease(tenant="greedy"), 1, 5_000, tenant="greedy")
    trainer = FakeTrainer(world, new_incarnation(), credit=1)
    trainer.work(5)
    (id,) = steps(world, world.lease(tenant="modest"), 1, 1, tenant="modest")
    trainer.work(3)
    assert any(isinstance(answer, OpResult) for answer in world.answers(id))


def test_tenants_get_equal_shares_of_busy_time_not_of_ops() -> None:
    world = World(CoreConfig(max_inflight_ops=2_000, group_ops=4, turn_ops=1))
    for tenant in ("slow", "fast"):
        world.create(tenant=tenant)
        steps(world, world.lease(tenant=tenant), 1, 1_000, tenant=tenant)

    class Uneven(FakeTrainer):
        def _item(self, group, item, send):  # type: ignore[no-untyped-def]
            done = super()._item(group, item, send)
            return msgspec.structs.replace(done, busy_s=0.03 if item.tenant == "slow" else 0.01)

    trainer = Uneven(world, new_incarnation(), credit=1)
    trainer.work(150)
    done = Counter(tenant for tenant, _, _ in trainer.applied.elements())
    assert 2.5 < done["fast"] / done["slow"] < 3.5


def test_ten_thousand_queued_ops_of_many_policies_are_handled_without_scans() -> None:
    world = World(CoreConfig(max_inflight_ops=200))
    leases = {}
    for index in range(100):
        world.create(f"p{index}")
        leases[f"p{index}"] = world.lease(f"p{index}")
    for policy, lease in leases.items():
        steps(world, lease, 1, 100, policy=policy)
    trainer = FakeTrainer(world, new_incarnation())
    world.wait(1.0)  # until all have a home
    run(trainer)
    assert len(trainer.applied) == 10_000
    assert set(trainer.applied.values()) == {1}


# Checkpoints


def test_checkpoints_come_at_the_cadence_and_free_what_they_cover() -> None:
    world = World(CoreConfig(checkpoint_steps=3))
    world.create()
    lease = world.lease()
    trainer = FakeTrainer(world, new_incarnation())
    for seq in range(1, 8):
        world.tell(forward(lease, 2 * seq - 1), buffers=BUFFERS)
        world.tell(OptimStep(policy="p", lease=lease, seq=2 * seq))
        run(trainer)
    (checkpoint,) = world.journal.of(CheckpointRecord)
    assert checkpoint.seq == 12
    assert [seq for _, _, seq in world.journal.payloads] == [13]


def test_a_checkpoint_is_never_taken_while_gradients_wait(world: World, lease: str) -> None:
    config = CoreConfig(checkpoint_bytes=1)
    world = World(config)
    world.create()
    lease = world.lease()
    trainer = FakeTrainer(world, new_incarnation())  # asserts it, too
    for seq in (1, 2, 3):
        world.tell(forward(lease, seq), buffers=BUFFERS)
    world.tell(OptimStep(policy="p", lease=lease, seq=4))
    run(trainer)
    assert [item.seq for item in items(trainer) if item.kind == "checkpoint"] == [4]


def test_the_old_checkpoints_blob_is_deleted_once_the_new_one_is_on_disk() -> None:
    world = World(EVERY_STEP)
    world.create()
    lease = world.lease()
    trainer = FakeTrainer(world, new_incarnation())
    steps(world, lease, 1, 1)
    run(trainer)
    (first,) = world.journal.of(CheckpointRecord)
    assert first.digest not in world.deleted
    steps(world, lease, 2, 2)
    world.auto_persist = False
    run(trainer)
    assert first.digest not in world.deleted
    world.auto_persist = True
    world.settle()
    run(trainer)
    assert first.digest in world.deleted


def test_a_checkpoint_that_a_saved_state_names_stays() -> None:
    world = World(EVERY_STEP)
    world.create()
    lease = world.lease()
    trainer = FakeTrainer(world, new_incarnation())
    steps(world, lease, 1, 1)
    world.tell(SaveState(policy="p", lease=lease, seq=2, state="s"))
    steps(world, lease, 3, 8)
    run(trainer)
    state = next(result for result in trainer.results.values() if result.kind == "save_state").result.digest
    assert world.deleted
    assert state not in world.deleted


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_and_is_tried_again() -> None:
    world = World(EVERY_STEP)
    world.create()
    lease = world.lease()
    trainer = FakeTrainer(world, new_incarnation())
    steps(world, lease, 1, 1)
    run(trainer)
    trainer.checkpoints_fail = True
    (id,) = steps(world, lease, 2, 2)
    run(trainer)
    assert any(isinstance(answer, OpResult) for answer in world.answers(id)), "the step itself is done"
    assert world.journal.of(CheckpointRecord)[0].seq == 1
    assert any(log.event == "checkpoint_failed" for log in world.logs)
    trainer.checkpoints_fail = False
    world.wait(5.5)
    trainer.beat()
    steps(world, lease, 3, 3)
    run(trainer)
    assert world.journal.of(CheckpointRecord)[0].seq == 3


def test_idle_slots_make_room_when_the_trainer_says_how_many_it_holds() -> None:
    world = World(EVERY_STEP)
    trainer = FakeTrainer(world, new_incarnation(), max_slots=2)
    for index in range(5):
        world.create(f"p{index}")
        steps(world, world.lease(f"p{index}"), 1, 1, policy=f"p{index}")
        run(trainer)
    assert len(trainer.slots) == 2
    steps(world, world.lease("p0"), 2, 2, policy="p0")
    run(trainer)
    assert trainer.slots["a", "p0"].applied_seq == 2


# Metering and versions


def test_use_is_written_down_with_the_results_it_belongs_to(world: World, lease: str) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    steps(world, lease, 1, 5)
    run(trainer)
    (usage,) = [record for record in world.journal.of(UsageRecord) if record.policy == "p"]
    assert usage.samples == 5
    assert usage.trainer_s == pytest.approx(0.05)


def test_replays_are_not_the_tenants_use(world: World, lease: str) -> None:
    first = FakeTrainer(world, new_incarnation())
    steps(world, lease, 1, 5)
    run(first)
    first.die()
    world.wait(10)
    second = FakeTrainer(world, new_incarnation())
    steps(world, lease, 6, 6)
    run(second)
    (usage,) = [record for record in world.journal.of(UsageRecord) if record.policy == "p"]
    assert usage.samples == 6


def test_a_version_survives_restarts_with_its_number_and_digest(world: World, lease: str) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    steps(world, lease, 1, 1)
    world.tell(Publish(policy="p", lease=lease, seq=2))
    run(trainer)
    before = world.ask(GetPolicy(policy="p"), PolicyInfo)
    world.crash()
    after = world.ask(GetPolicy(policy="p"), PolicyInfo)
    assert after == msgspec.structs.replace(before, home="", resident=False)
    assert after.versions[0].version == 1


def test_the_spec_that_reaches_the_trainer_is_the_one_that_was_created(world: World) -> None:
    spec: PolicySpec = msgspec.structs.replace(SPEC, seed=5)
    world.create("q", spec=spec)
    steps(world, world.lease("q"), 1, 1, policy="q")
    trainer = FakeTrainer(world, new_incarnation())
    assert waiting_groups(trainer)[0].slots[0].spec == spec
    assert len(world.journal.of(OpRecord)) == 1
