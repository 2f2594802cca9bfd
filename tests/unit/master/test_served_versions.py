"""Versions in service: the newest that is loaded answers, and what cannot be loaded never does."""

from __future__ import annotations

import pytest

from joynexus.wire import ErrorCode, Failure
from joynexus.wire.back import WeightsRefused
from joynexus.wire.errors import failure
from joynexus.wire.front import ClusterStatus, Status
from tests.unit.master.actors import FakeInference, new_incarnation
from tests.unit.master.acts import act, publish
from tests.unit.master.world import World, run


@pytest.fixture
def world() -> World:
    world = World()
    world.create()
    return world


def test_nothing_published_is_said_with_what_to_do(world: World) -> None:
    (refused,) = world.answers(act(world))
    assert isinstance(refused, Failure)
    assert refused.code is ErrorCode.NOT_FOUND
    assert "publish one first" in refused.message


def test_version_0_is_the_newest_in_service_and_not_one_that_is_still_loading(world: World) -> None:
    publish(world)
    worker = FakeInference(world, new_incarnation())
    run(worker)
    worker.applies = False
    publish(world)
    run(worker)
    act(world)
    run(worker)
    assert worker.groups[-1].items[0].version == 1
    act(world, version=2)
    run(worker)
    assert worker.groups[-1].items[0].version == 2


def test_a_refused_version_never_serves_and_the_older_one_keeps_serving(world: World) -> None:
    publish(world)
    worker = FakeInference(world, new_incarnation())
    worker.applies = False
    run(worker)
    publish(world)
    error = failure(ErrorCode.NON_FINITE, "weight 'head.0' holds NaN")
    world.say(worker.peer, WeightsRefused(tenant="a", policy="p", version=2, error=error))
    act(world)
    run(worker)
    assert worker.groups[-1].items[0].version == 1
    world.crash()
    (refused,) = world.answers(act(world, version=2))
    assert isinstance(refused, Failure)
    assert "holds NaN" in refused.message


def test_every_new_version_is_offered_to_every_worker_of_its_backbone(world: World) -> None:
    workers = [FakeInference(world, new_incarnation(), key=str(index)) for index in range(2)]
    other = FakeInference(world, new_incarnation(), key="other", backbone_name="qwen")
    publish(world)
    run(*workers, other)
    assert [[offer.version for offer in worker.offers] for worker in workers] == [[1], [1]]
    assert not other.offers


# Versions in service


def test_the_newest_version_serves_after_its_only_worker_died_before_it_had_loaded_it(world: World) -> None:
    first = FakeInference(world, new_incarnation(), key="first")
    publish(world)
    run(first)
    first.applies = False
    publish(world)
    run(first)
    first.die()
    world.wait(8)
    second = FakeInference(world, new_incarnation(), key="second")
    assert [offer.version for offer in (send.message for send in second.inbox)] == [2]  # type: ignore[attr-defined]
    act(world)
    run(second)
    assert second.groups[-1].items[0].version == 2


def test_what_was_published_while_nobody_served_it_is_offered_once_and_only_the_newest(world: World) -> None:
    publish(world, times=5)
    worker = FakeInference(world, new_incarnation())
    run(worker)
    assert [offer.version for offer in worker.offers] == [5]
    again = FakeInference(world, new_incarnation(), key="again")
    assert not again.inbox


def test_a_hundred_publications_leave_one_version_in_service(world: World) -> None:
    worker = FakeInference(world, new_incarnation())
    for _ in range(100):
        publish(world)
        run(worker)
    assert world.ask(Status(), ClusterStatus).versions_in_service == 1
    act(world)
    run(worker)
    assert worker.groups[-1].items[0].version == 100


def test_an_old_version_that_one_worker_cannot_load_any_more_is_not_refused(world: World) -> None:
    first, second = (FakeInference(world, new_incarnation(), key=str(index)) for index in range(2))
    second.applies = False
    publish(world)
    run(first, second)
    error = failure(ErrorCode.BAD_DATA, "its disk is broken")
    world.say(second.peer, WeightsRefused(tenant="a", policy="p", version=1, error=error))
    act(world, version=1)
    run(first)
    assert first.groups[-1].items[0].version == 1
