"""Requests to act of tests, and policies that are published so that they can be asked."""

from __future__ import annotations

import weakref

import msgspec
import numpy as np

from joynexus.wire import Array
from joynexus.wire.front import Act, GetPolicy, OptimStep, PolicyInfo, Publish
from tests.unit.master.actors import FakeTrainer, new_incarnation
from tests.unit.master.world import World, run

ACT = Act(policy="p", state=Array(dtype="<f4", shape=(1, 2), frame=0), images=(), instructions=("go",))
STATE = np.ones((1, 2), np.float32).tobytes()

TRAINERS: weakref.WeakKeyDictionary[World, FakeTrainer | None] = weakref.WeakKeyDictionary()


def publish(world: World, *, tenant: str = "a", times: int = 1) -> None:
    lease = world.lease(tenant=tenant)
    trainer = TRAINERS.setdefault(world, None) or FakeTrainer(world, new_incarnation(), key="trainer")
    TRAINERS[world] = trainer
    first = world.ask(GetPolicy(policy="p"), PolicyInfo, tenant=tenant).next_seq
    for seq in range(first, first + 2 * times, 2):
        world.tell(OptimStep(policy="p", lease=lease, seq=seq), tenant=tenant)
        world.tell(Publish(policy="p", lease=lease, seq=seq + 1), tenant=tenant)
    run(trainer)


def act(world: World, **how: object) -> str:
    return world.tell(msgspec.structs.replace(ACT, **how), buffers=(STATE,))
