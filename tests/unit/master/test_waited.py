"""How long work waited for a worker is said once, when a worker gets it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from joynexus.wire.front import FileEntry, OptimStep, PushDataset
from services.master.commands import Command, Waited
from tests.unit.master.actors import FakeEnv, FakeInference, FakeTrainer, new_incarnation
from tests.unit.master.acts import ACT, STATE, publish
from tests.unit.master.world import World, run


class Observed(World):
    """A world that keeps what it is told of waiting."""

    def __init__(self) -> None:
        self.waits: list[Waited] = []
        super().__init__()

    def _run(self, commands: Sequence[Command]) -> None:
        self.waits += [command for command in commands if isinstance(command, Waited)]
        super()._run(commands)


@pytest.fixture
def world() -> Observed:
    world = Observed()
    world.create()
    return world


def test_an_op_waits_from_its_acceptance_to_its_trainer_and_a_replay_does_not_count(world: Observed) -> None:
    lease = world.lease()
    world.tell(OptimStep(policy="p", lease=lease, seq=1))
    world.wait(3.0)
    first = FakeTrainer(world, new_incarnation())
    run(first)
    assert world.waits == [Waited("training", 3.0)]
    first.die()
    run(FakeTrainer(world, new_incarnation()))
    assert world.waits == [Waited("training", 3.0)]


def test_a_request_to_act_waits_from_its_arrival_to_its_worker(world: Observed) -> None:
    publish(world)
    world.waits.clear()
    world.tell(ACT, buffers=(STATE,))
    world.wait(2.0)
    run(FakeInference(world, new_incarnation()))
    assert world.waits == [Waited("inference", 2.0)]


def test_a_task_waits_from_its_submission_to_its_worker(world: Observed) -> None:
    world.upload("f" * 64)
    world.tell(PushDataset(dataset="d", files=(FileEntry(path="x", digest="f" * 64, nbytes=1),)))
    world.wait(4.0)
    run(FakeEnv(world, new_incarnation()))
    assert world.waits == [Waited("env", 4.0)]
