"""The master's clock: no time passes for whom the master did not listen to."""

from __future__ import annotations

import pytest

from joynexus.wire.front import ClusterStatus, Status
from services.master.clock import LONGEST_S, Clock
from services.master.events import Tick
from tests.unit.master.actors import FakeEnv
from tests.unit.master.world import World


class Moment:
    """Seconds since the computer was started."""

    def __init__(self) -> None:
        self.now = 500.0

    def __call__(self) -> float:
        return self.now


def test_the_time_is_that_of_the_wall_at_the_start_and_passes_with_every_look() -> None:
    moment = Moment()
    clock = Clock(lambda: 1e9, moment)
    assert clock() == 1e9
    for _ in range(100):
        moment.now += 1.0
        clock()
    assert clock() == 1e9 + 100


def test_while_the_master_stands_still_no_time_passes() -> None:
    moment = Moment()
    clock = Clock(lambda: 1e9, moment)
    moment.now += 3600
    assert clock() == 1e9 + LONGEST_S
    moment.now += 0.5
    assert clock() == 1e9 + LONGEST_S + 0.5


@pytest.mark.parametrize("stands_still_s", [0.5, 5.0, 600.0])
def test_a_master_that_stood_still_takes_no_worker_for_dead(stands_still_s: float) -> None:
    world, moment = World(), Moment()
    clock = Clock(lambda: world.now, moment)
    worker = FakeEnv(world, "i")
    for step_s in (1.0, 1.0, stands_still_s, 0.1):
        moment.now += step_s
        world.now = clock()
        world.event(Tick())  # before anything that came meanwhile is read
        (role,) = world.ask(Status(), ClusterStatus, operator=True).roles
        assert role.phase != "lost"
        worker.beat()
    for _ in range(8):
        moment.now += 1.0
        world.now = clock()
        world.event(Tick())
    (role,) = world.ask(Status(), ClusterStatus, operator=True).roles
    assert role.phase == "lost"
