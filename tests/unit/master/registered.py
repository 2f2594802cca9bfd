"""Workers of tests: what they were told as they registered, their phases, and work for them."""

from __future__ import annotations

from joynexus.wire.back import Registered
from joynexus.wire.front import ClusterStatus, OptimStep, Status
from tests.unit.master.world import FakeWorker, World


def registered(worker: FakeWorker) -> Registered:
    return next(message for message in reversed(worker.received) if isinstance(message, Registered))


def roles(world: World) -> dict[str, str]:
    """Phases by worker; `beats` of one that has said what it does."""
    found = world.ask(Status(), ClusterStatus).roles
    return {role.worker: "beats" if role.phase in ("idle", "working") else role.phase for role in found}


def ask_step(world: World, seq: int = 1) -> str:
    if seq == 1:
        world.create()
    return world.tell(OptimStep(policy="p", lease=world.lease(), seq=seq))
