"""Steps of tests that go through the training queue, and what a trainer was given of them."""

from __future__ import annotations

from joynexus.wire.back import TrainGroup, TrainItem
from joynexus.wire.front import OptimStep
from services.master.config import CoreConfig
from tests.unit.master.actors import FakeTrainer
from tests.unit.master.world import World

EVERY_STEP = CoreConfig(checkpoint_steps=1)


def steps(world: World, lease: str, first: int, last: int, *, policy: str = "p", tenant: str = "a") -> list[str]:
    return [world.tell(OptimStep(policy=policy, lease=lease, seq=seq), tenant=tenant) for seq in range(first, last + 1)]


def items(trainer: FakeTrainer) -> list[TrainItem]:
    return [item for group in trainer.groups for item in group.items]


def waiting_groups(trainer: FakeTrainer) -> list[TrainGroup]:
    return [send.message for send in trainer.inbox if isinstance(send.message, TrainGroup)]
