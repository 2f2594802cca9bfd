"""A master's core and a real trainer: what tenants and the service are charged with is what the trainer was busy."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.blobs import BlobStore
from common.progress import Progress
from joynexus.specs import PolicySpec
from joynexus.vla.backbones import Backbone, load_backbone
from joynexus.vla.busy import Overhead
from joynexus.wire import ErrorCode
from joynexus.wire.back import SlotFailed, TrainDone, TrainGroup, TrainItem
from joynexus.wire.front import AcquireLease, ForwardBackward, Lease, OptimStep, Samples
from services.master.commands import Send
from services.master.config import CoreConfig
from services.trainer.core import TrainerEngine
from tests.unit.master.actors import new_incarnation
from tests.unit.master.test_metering import by_account, charged
from tests.unit.master.world import FakeWorker, World, run
from tests.unit.trainer.tenants import SMALL_OFT, Inline, Member, contract, statistics
from tests.unit.workers import MemoryStore

ARM = contract(1, 4, 2)
RECIPE = PolicySpec(
    backbone="lite", contract=ARM, statistics=statistics(ARM), chunk=2, head="oft", head_config=SMALL_OFT
)


class RealTrainer(FakeWorker):
    """The trainer's engine on the wire of a world."""

    role = "trainer"

    def __init__(self, world: World, engine: TrainerEngine) -> None:
        self.engine = engine
        self.progress = Progress()
        self.answers: deque[TrainDone | SlotFailed] = deque()
        super().__init__(world, new_incarnation(), credit={"train": 2})

    def do(self, send: Send) -> None:
        group = send.message
        assert isinstance(group, TrainGroup)
        with self.progress.phase("working", deadline_s=60):
            answers = list(self.engine.run(group, send.buffers))
        self.busy_s = self.progress.report()[2]
        for answer in answers:
            self.answers.append(answer)
            self.world.say(self.peer, answer)


@pytest.fixture(scope="module")
def tiny(cache_dir: Path) -> Backbone:
    return load_backbone("tiny-qwen3vl", cache_dir=cache_dir)


def engine_of(tiny: Backbone, folder: Path, **options: Any) -> TrainerEngine:
    blobs = BlobStore(folder / "blobs")
    return TrainerEngine(
        tiny, MemoryStore(), blobs.path, lambda path: blobs.put_file(path, move=True), scratch=folder / "s", **options
    )


def send_steps(world: World, tenant: str, *, rows: int, steps: int, first: int = 1) -> None:
    """Have a tenant's own loop train a policy on samples that nobody has seen."""
    if first == 1:
        world.create(tenant=tenant, spec=RECIPE)
    lease = world.ask(AcquireLease(policy="p", holder="loop"), Lease, tenant=tenant).lease
    source = Inline(ARM, seed=rows + first, chunk=2, texts=[f"pull the lever of {tenant}"])
    for step in range(steps):
        op = source.op("forward_backward", rows)
        samples = msgspec.msgpack.decode(op.body, type=Samples)
        seq = first + 2 * step
        world.tell(
            ForwardBackward(policy="p", lease=lease, seq=seq, samples=samples),
            tenant=tenant,
            buffers=tuple(op.buffers),
        )
        world.tell(OptimStep(policy="p", lease=lease, seq=seq + 1), tenant=tenant)


def test_everything_that_a_trainer_was_busy_with_is_charged(tiny: Backbone, tmp_path: Path) -> None:
    world = World(CoreConfig(checkpoint_steps=5))
    first = RealTrainer(world, engine_of(tiny, tmp_path))
    for tenant, rows in (("a", 1), ("b", 3)):
        send_steps(world, tenant, rows=rows, steps=12)
    run(first)
    first.beat()
    first.die()
    world.wait(10)
    second = RealTrainer(world, engine_of(tiny, tmp_path))
    for tenant, rows in (("a", 1), ("b", 3)):
        send_steps(world, tenant, rows=rows, steps=6, first=25)
    run(second)
    for _ in range(2):
        second.beat()
    accounts = by_account(world)
    busy = first.busy_s + second.busy_s
    assert charged(world)["trainer_s"] == pytest.approx(busy, rel=1e-6)
    # By their answers alone, too: what no answer accounts for is little.
    assert accounts.get(("", "lost", ""), 0.0) < 0.01 * busy + 0.005
    assert {account[:2] for account in accounts} >= {("a", "p"), ("b", "p"), ("", "replay")}
    assert any(answer.kind == "checkpoint" for answer in first.answers if isinstance(answer, TrainDone))


def test_two_tenants_in_one_group_are_charged_by_their_rows(tiny: Backbone, tmp_path: Path) -> None:
    class Ticks:
        """Every measurement takes one second."""

        def start(self):
            return lambda: 1.0

        def overhead(self):
            return Overhead(counts=False)

    world = World()
    for tenant, rows in (("a", 1), ("b", 3)):
        send_steps(world, tenant, rows=rows, steps=1)
    trainer = RealTrainer(world, engine_of(tiny, tmp_path, clock=Ticks()))  # both have asked before it comes
    run(trainer)
    groups = [message for message in trainer.received if isinstance(message, TrainGroup)]
    shared = [group for group in groups if len({item.tenant for item in group.items}) == 2]
    assert shared, "nobody shared a forward"
    busy = {a.tenant: a.busy_s for a in trainer.answers if isinstance(a, TrainDone) and a.kind == "forward_backward"}
    # Opening, reading and private part take a second each; of the shared second one has a quarter.
    assert busy == {"a": pytest.approx(3.25), "b": pytest.approx(3.75)}
    steps = {"a": 1.0, "b": 1.0}  # and an optimizer step each
    charged_to = by_account(world)
    assert {tenant: charged_to[tenant, "p", ""] for tenant in steps} == {
        tenant: pytest.approx(busy[tenant] + steps[tenant]) for tenant in steps
    }


def test_an_answer_that_is_recalled_for_a_replay_costs_nothing(tiny: Backbone, tmp_path: Path) -> None:
    engine = engine_of(tiny, tmp_path)
    member = member_of("a")
    (first,) = engine.run(TrainGroup(task="t", attempt=1, slots=(member.opening(),), items=(member.item(1, 0),)),
                          member.ops[0].buffers)  # fmt: skip
    assert isinstance(first, TrainDone)
    assert first.busy_s > first.overhead_s >= 0
    again = msgspec.structs.replace(member.item(1, 0), replay=True)
    (recalled,) = engine.run(TrainGroup(task="t2", attempt=1, items=(again,)), member.ops[0].buffers)
    assert isinstance(recalled, TrainDone)
    assert recalled.result == first.result
    assert recalled.busy_s == recalled.overhead_s == recalled.page_s == 0
    unheard = engine.run(TrainGroup(task="t3", attempt=1, items=(member.item(1, 0),)), member.ops[0].buffers)
    assert [answer.busy_s for answer in unheard] == [first.busy_s]  # the master was killed before it was written down


def test_a_slot_that_fails_says_what_that_took(tiny: Backbone, tmp_path: Path) -> None:
    engine = engine_of(tiny, tmp_path)
    member = member_of("a")
    missing = member.opening(checkpoint="0" * 64, applied_seq=1)
    (unopened,) = engine.run(TrainGroup(task="t", attempt=1, slots=(missing,), items=(member.item(1, 0),)))
    assert isinstance(unopened, SlotFailed)
    assert unopened.busy_s > 0
    late = TrainItem(tenant=member.key[0], policy=member.key[1], seq=7, kind="optim_step")
    (out_of_order,) = engine.run(TrainGroup(task="t", attempt=1, slots=(member.opening(),), items=(late,)))
    assert isinstance(out_of_order, SlotFailed)
    assert out_of_order.error.code is ErrorCode.UNAVAILABLE
    assert out_of_order.busy_s > 0


def member_of(name: str) -> Member:
    """A policy and the one step that it will ask for."""
    return Member(name, RECIPE, [Inline(ARM, 1, 2, ["push"]).op("train_step", 2)])
