"""More policies than slots: everything is done once and in order, paging is paid for by work, and nobody starves."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import msgspec
import pytest

from joynexus.tenants import TenantLimits
from joynexus.wire.back import TrainDone, TrainGroup
from joynexus.wire.errors import ErrorCode, failure
from joynexus.wire.front import GetPolicy, LoadState, LoadWeights, OpResult, OptimStep, PolicyInfo, Publish, SaveState
from services.master.commands import Send
from services.master.config import CoreConfig
from services.master.events import LimitsChanged
from tests.unit.master.actors import FakeTrainer, new_incarnation
from tests.unit.master.ops import BUFFERS, forward
from tests.unit.master.queued import EVERY_STEP, items, steps
from tests.unit.master.world import World, run

OP_S = 0.01
PAGE_S = 0.05


class PagingTrainer(FakeTrainer):
    """A trainer with few slots, in which pages cost five times what an op does.

    Attributes:
        page_ins, page_outs: how often a slot was opened, and a checkpoint written.
        busy_s, paging_s: time it all took, and the part of it for pages.
        most: policies that were in its memory at once.
        served: tenants in the order in which their ops were done.
    """

    def __init__(self, world: World, *, slots: int, **register: Any) -> None:
        self.page_ins = self.page_outs = self.most = 0
        self.busy_s = self.paging_s = 0.0
        self.served: list[str] = []
        self._opened: set[tuple[str, str]] = set()
        super().__init__(world, new_incarnation(), credit=1, max_slots=slots, **register)

    def do(self, send: Send) -> None:
        group = send.message
        assert isinstance(group, TrainGroup)
        self._opened = {(slot.tenant, slot.policy) for slot in group.slots}
        self.page_ins += len(self._opened)
        super().do(send)
        self.most = max(self.most, len(self.slots))

    def _item(self, group, item, send):  # type: ignore[no-untyped-def]  # as in FakeTrainer
        done = super()._item(group, item, send)
        if not isinstance(done, TrainDone):
            return done
        key = (item.tenant, item.policy)
        page_s = PAGE_S if key in self._opened else 0.0
        self._opened.discard(key)
        own_s = PAGE_S if item.kind == "checkpoint" else OP_S
        self.page_outs += item.kind == "checkpoint"
        self.busy_s += own_s + page_s
        self.paging_s += page_s + (own_s if item.kind == "checkpoint" else 0.0)
        self.served += [item.tenant] if item.kind != "checkpoint" else []
        return msgspec.structs.replace(done, busy_s=own_s + page_s, page_s=page_s, slot_bytes=100)


def submit(world: World, count: int, ops: int, *, tenants: int = 1) -> None:
    for index in range(count):
        tenant, policy = f"t{index % tenants}", f"p{index}"
        world.create(policy, tenant=tenant)
        steps(world, world.lease(policy, tenant=tenant), 1, ops, policy=policy, tenant=tenant)


def resident(world: World, policy: str, *, tenant: str = "a") -> bool:
    return world.ask(GetPolicy(policy=policy), PolicyInfo, tenant=tenant).resident


# The promise


@pytest.mark.parametrize("tenants", [1, 50])
def test_a_thousand_policies_on_32_slots_are_trained_once_in_order_and_paging_is_bounded(tenants: int) -> None:
    world = World(CoreConfig(max_inflight_ops=50, checkpoint_steps=10_000, beat_ms=10**6, silent_s=10**6))
    submit(world, 1000, 4, tenants=tenants)
    trainer = PagingTrainer(world, slots=32)
    world.wait(4.0)  # until all have a home
    run(trainer)
    assert trainer.most <= 32
    assert len(trainer.applied) == 4_000
    assert set(trainer.applied.values()) == {1}, "nothing is replayed"
    assert trainer.page_ins <= 1100, "a policy leaves when its work is done, rarely before"


def test_paging_takes_no_more_than_its_share_while_there_is_other_work() -> None:
    world = World(CoreConfig(max_inflight_ops=500, checkpoint_steps=10_000, page_share=0.2))
    submit(world, 32, 100, tenants=32)
    trainer = PagingTrainer(world, slots=4)
    run(trainer)
    assert set(trainer.applied.values()) == {1}
    assert trainer.most <= 4
    assert trainer.page_ins > 32 + 16, "they take turns"
    free = 1.0 + 32 * 2 * PAGE_S  # the credit at the beginning; and whoever is done goes in any case
    assert trainer.paging_s < 0.25 * (trainer.busy_s - trainer.paging_s) + free


def test_shares_stay_fair_although_policies_are_paged() -> None:
    world = World(CoreConfig(max_inflight_ops=2000, checkpoint_steps=10_000))
    for tenant in ("one", "many"):
        for index in range(1 if tenant == "one" else 40):
            world.create(f"p{index}", tenant=tenant)
            lease = world.lease(f"p{index}", tenant=tenant)
            steps(world, lease, 1, 800 if tenant == "one" else 40, policy=f"p{index}", tenant=tenant)
    trainer = PagingTrainer(world, slots=4)
    while len(trainer.served) < 800:
        trainer.work(1)
    counters = world.core._training._counters
    used = {tenant: counters.used(tenant) for tenant in ("one", "many")}
    assert abs(used["one"] - used["many"]) < 1.0, used
    assert Counter(trainer.served)["one"] > 400, "who pages pays for it"


def test_a_newcomer_is_let_in_soon_although_all_slots_have_work() -> None:
    world = World(CoreConfig(max_inflight_ops=2000, checkpoint_steps=10_000))
    submit(world, 16, 200, tenants=1)
    trainer = PagingTrainer(world, slots=8)
    trainer.work(50)
    before = trainer.busy_s
    world.create("p", tenant="new")
    steps(world, world.lease("p", tenant="new"), 1, 1, policy="p", tenant="new")
    while "new" not in trainer.served:
        assert trainer.work(1)
    assert trainer.busy_s - before < 2.0


# Who goes


def test_who_is_covered_and_unused_longest_goes_first_and_without_a_checkpoint() -> None:
    world = World(EVERY_STEP)
    trainer = PagingTrainer(world, slots=3)
    for index in range(3):
        world.create(f"p{index}")
        steps(world, world.lease(f"p{index}"), 1, 1, policy=f"p{index}")
        run(trainer)
    steps(world, world.lease("p0"), 2, 2, policy="p0")
    run(trainer)
    written = trainer.page_outs
    world.create("new")
    steps(world, world.lease("new"), 1, 1, policy="new")
    run(trainer)
    assert [resident(world, name) for name in ("p0", "p1", "p2", "new")] == [True, False, True, True]
    assert trainer.page_outs == written + 1, "its own, at its cadence"


def test_slots_are_limited_by_bytes_too() -> None:
    world = World()
    trainer = PagingTrainer(world, slots=0, slot_bytes=250)
    for index in range(5):
        world.create(f"p{index}")
        steps(world, world.lease(f"p{index}"), 1, 3, policy=f"p{index}")
        run(trainer)
    assert trainer.most <= 2
    assert len(trainer.applied) == 15


def test_a_policy_between_two_optimizer_steps_keeps_its_slot_until_the_step() -> None:
    world = World()
    trainer = PagingTrainer(world, slots=1)
    for policy in ("p", "q"):
        world.create(policy)
    lease = world.lease()
    world.tell(forward(lease, 1), buffers=BUFFERS)
    run(trainer)
    steps(world, world.lease("q"), 1, 1, policy="q")
    run(trainer)
    assert ("a", "q", 1) not in trainer.applied
    world.tell(OptimStep(policy="p", lease=lease, seq=2))
    run(trainer)
    assert trainer.applied["a", "q", 1] == 1
    assert trainer.applied["a", "p", 1] == 1


def test_a_slot_that_a_low_priority_holds_until_its_step_does_not_keep_a_high_one_out() -> None:
    world = World(CoreConfig(checkpoint_steps=10_000, group_ops=2, max_inflight_ops=1000))
    world.event(LimitsChanged(limits={"high": TenantLimits(priority=1)}))
    trainer = PagingTrainer(world, slots=2)
    world.create(tenant="low")
    lease = world.lease(tenant="low")
    for seq in range(1, 4):
        world.tell(forward(lease, seq), tenant="low", buffers=BUFFERS)
    run(trainer)
    for policy in ("working", "newcomer"):
        world.create(policy, tenant="high")
    steps(world, world.lease("working", tenant="high"), 1, 900, policy="working", tenant="high")
    for seq in range(4, 6):
        world.tell(forward(lease, seq), tenant="low", buffers=BUFFERS)
    world.tell(OptimStep(policy="p", lease=lease, seq=6), tenant="low")
    steps(world, world.lease("newcomer", tenant="high"), 1, 1, policy="newcomer", tenant="high")
    trainer.work(400)
    assert ("high", "newcomer", 1) in trainer.applied
    assert not resident(world, "p", tenant="low")
    assert ("high", "working", 900) not in trainer.applied


def test_a_full_house_of_waiting_gradients_is_no_deadlock() -> None:
    world = World(CoreConfig(stuck_s=10.0))
    trainer = PagingTrainer(world, slots=2)
    leases = {}
    for policy in ("p", "q"):
        world.create(policy)
        leases[policy] = world.lease(policy)
        message = msgspec.structs.replace(forward(leases[policy], 1), policy=policy)
        world.tell(message, buffers=BUFFERS)
        run(trainer)
    world.create("r")
    (id,) = steps(world, world.lease("r"), 1, 1, policy="r")
    for _ in range(25):
        world.wait(1)
        trainer.beat()
        run(trainer)
    assert isinstance(world.answers(id)[-1], OpResult)
    (id,) = steps(world, leases["p"], 2, 2, policy="p")
    run(trainer)
    assert isinstance(world.answers(id)[-1], OpResult)
    assert trainer.applied["a", "p", 1] == 2, "replayed, because it had no checkpoint"
    assert trainer.slots["a", "p"].step == 1
    assert not any(log.event == "replay_differs" for log in world.logs)


def test_a_policy_whose_checkpoint_cannot_be_written_does_not_block_the_others() -> None:
    world = World()
    trainer = PagingTrainer(world, slots=1)
    trainer.checkpoints_fail = True
    for policy in ("p", "q"):
        world.create(policy)
    leases = {policy: world.lease(policy) for policy in ("p", "q")}
    steps(world, leases["p"], 1, 1, policy="p")
    run(trainer)
    (waiting,) = steps(world, leases["q"], 1, 1, policy="q")
    run(trainer)
    (own,) = steps(world, leases["p"], 2, 2, policy="p")
    run(trainer)
    assert isinstance(world.answers(own)[-1], OpResult), "it goes on itself"
    for _ in range(30):
        world.wait(1)
        trainer.beat()
        run(trainer)
    assert isinstance(world.answers(waiting)[-1], OpResult)


def test_a_lost_trainers_slots_are_free_again() -> None:
    world = World()
    submit(world, 4, 5, tenants=2)
    first = PagingTrainer(world, slots=2)
    first.work(1)
    first.die()
    world.wait(10)
    second = PagingTrainer(world, slots=2)
    run(second)
    assert second.most <= 2
    assert len(first.applied | second.applied) == 20
    assert all(slot.applied_seq == 5 for slot in second.slots.values())


def test_a_slot_that_cannot_be_opened_takes_no_room() -> None:
    world = World()
    trainer = PagingTrainer(world, slots=1)
    trainer.refuses = failure(ErrorCode.INVALID, "oft has no option 'wdith'")
    submit(world, 3, 1, tenants=3)
    run(trainer)
    trainer.refuses = None
    for index in range(3):
        steps(world, world.lease(f"p{index}", tenant=f"t{index}"), 2, 2, policy=f"p{index}", tenant=f"t{index}")
    run(trainer)
    assert len(trainer.applied) == 3
    assert trainer.most == 1


def test_the_cost_of_an_op_does_not_grow_with_the_number_of_policies_that_wait() -> None:
    def seconds_per_op(policies: int) -> float:
        world = World(CoreConfig(checkpoint_steps=10_000))
        submit(world, policies, 2, tenants=10)
        trainer = PagingTrainer(world, slots=16)
        world.wait(3.0)  # until all have a home
        began = time.process_time()
        run(trainer)
        assert len(trainer.applied) == 2 * policies
        return (time.process_time() - began) / (2 * policies)

    few = min(seconds_per_op(100) for _ in range(2))
    assert min(seconds_per_op(800) for _ in range(2)) < 3 * few, "eight times as many, and not even three times"


# Checkpoints and own weights


def test_a_loop_of_publishes_alone_is_checkpointed_too() -> None:
    world = World(CoreConfig(checkpoint_ops=20, kept_replies=5))
    trainer = FakeTrainer(world, new_incarnation())
    world.create()
    lease = world.lease()
    for seq in range(1, 101):
        world.tell(
            Publish(policy="p", lease=lease, seq=seq)
            if seq % 2
            else SaveState(policy="p", lease=lease, seq=seq, state="s")
        )
        run(trainer)
    assert len(world.core._policies.get("a", "p").ops) <= 26


def test_own_weights_are_a_barrier_whose_blob_stays_until_a_checkpoint_covers_it() -> None:
    world = World(CoreConfig(checkpoint_steps=2, freed_blob_s=1.0, unused_upload_s=1.0))
    trainer = FakeTrainer(world, new_incarnation())
    world.create()
    lease = world.lease()
    world.upload("w" * 64, 77)
    world.tell(forward(lease, 1), buffers=BUFFERS)
    id = world.tell(LoadWeights(policy="p", lease=lease, seq=2, weights="w" * 64))
    run(trainer)
    world.wait(3)
    trainer.beat()
    assert isinstance(world.answers(id)[-1], OpResult)
    assert [item.payload for item in items(trainer)] == ["", "w" * 64]
    assert "w" * 64 not in world.deleted
    own = trainer.slots["a", "p"]
    trainer.die()
    world.crash()
    trainer = FakeTrainer(world, new_incarnation())
    steps(world, lease, 3, 4)
    run(trainer)
    assert trainer.slots["a", "p"].step == own.step + 2
    assert not any(log.event == "replay_differs" for log in world.logs)
    world.wait(3)
    assert "w" * 64 in world.deleted


def test_weights_that_are_not_this_tenants_are_refused_like_unknown_ones() -> None:
    world = World()
    world.create()
    world.upload("w" * 64, tenant="b")
    message = LoadWeights(policy="p", lease=world.lease(), seq=1, weights="w" * 64)
    refused = world.refused(message)
    assert refused.code is ErrorCode.NOT_FOUND
    assert "upload it" in refused.message


@pytest.mark.parametrize("kind", ["load_state", "load_weights"])
def test_a_load_that_fails_leaves_gradients_and_no_checkpoint_is_taken_over_them(kind: str) -> None:
    world = World(CoreConfig(checkpoint_bytes=1))
    trainer = FakeTrainer(world, new_incarnation())
    trainer.errors = {3: failure(ErrorCode.INVALID, "tensor 'x' has another shape")}
    world.create()
    lease = world.lease()
    world.upload("w" * 64)
    world.tell(SaveState(policy="p", lease=lease, seq=1, state="s"))
    run(trainer)
    world.tell(forward(lease, 2), buffers=BUFFERS)
    world.tell(
        LoadState(policy="p", lease=lease, seq=3, state="s")
        if kind == "load_state"
        else LoadWeights(policy="p", lease=lease, seq=3, weights="w" * 64)
    )
    run(trainer)  # asserts that no checkpoint comes while gradients wait
    world.tell(OptimStep(policy="p", lease=lease, seq=4))
    run(trainer)
    assert [item.seq for item in items(trainer) if item.kind == "checkpoint"] == [4]
