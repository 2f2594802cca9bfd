"""Workers that leave: by themselves or because an operator says so, they get nothing new, finish, and are gone."""

from __future__ import annotations

import pytest

from joynexus.wire import ErrorCode, Failure
from joynexus.wire.back import BeatAck, Gone, InstanceRow, Leaving, Supervised
from joynexus.wire.front import ClusterStatus, Done, DrainWorker, Status
from tests.unit.master.actors import FakeEnv, FakeInference, FakeTrainer, new_incarnation
from tests.unit.master.registered import ask_step, registered, roles
from tests.unit.master.world import FakeWorker, World, run


def test_a_worker_that_left_in_order_is_no_lost_one_and_the_next_with_its_name_no_restart_of_it(world: World) -> None:
    stays, goes = (FakeEnv(world, new_incarnation(), key=key) for key in ("stays", "goes"))
    world.say(goes.peer, Leaving())
    goes.die()
    for _ in range(8):
        world.wait(1)
        stays.beat()
    assert roles(world) == {"env-1": "beats"}
    assert [log.event for log in world.logs if log.event in ("worker_left", "worker_lost")] == ["worker_left"]
    FakeEnv(world, new_incarnation(), key="comes")
    found = {role.worker: role.restarts for role in world.ask(Status(), ClusterStatus, operator=True).roles}
    assert found == {"env-1": 0, "env-2": 0}


def test_a_worker_that_says_it_is_gone_is_forgotten_at_once(world: World) -> None:
    stays, goes = (FakeEnv(world, new_incarnation(), key=key) for key in ("stays", "goes"))
    world.say(goes.peer, Leaving())
    assert world.answers(world.say(goes.peer, Gone())) == [BeatAck()]
    assert roles(world) == {"env-1": "starting"}
    assert [log.event for log in world.logs if log.event in ("worker_left", "worker_lost")] == ["worker_left"]
    goes.connect()  # its last word was answered, and the answer lost
    assert isinstance(goes.received[-1], Failure)
    assert goes.received[-1].code is ErrorCode.CONFLICT
    stays.beat()
    assert roles(world) == {"env-1": "beats"}


def test_work_of_a_worker_that_goes_before_it_has_done_it_is_done_elsewhere(world: World) -> None:
    first = FakeTrainer(world, new_incarnation(), key="first")
    id = ask_step(world)
    world.say(first.peer, Gone())
    second = FakeTrainer(world, new_incarnation(), key="second")
    run(second)
    assert len(world.answers(id)) == 2
    assert [log.event for log in world.logs if log.event in ("worker_left", "worker_lost")] == ["worker_lost"]


def test_a_drained_worker_gets_nothing_new_and_hears_with_each_beat_that_it_is_to_leave(world: World) -> None:
    trainers = [FakeTrainer(world, new_incarnation(), key=key) for key in ("one", "two")]
    drain = DrainWorker(worker="trainer-1")
    for _ in range(2):
        assert world.ask(drain, Done, operator=True) == Done()
    for trainer in trainers:
        trainer.beat()
    acks = [[message.leave for message in trainer.received if isinstance(message, BeatAck)] for trainer in trainers]
    assert acks == [[True], [False]]
    ask_step(world)
    assert [len(trainer.inbox) for trainer in trainers] == [0, 1]
    assert roles(world)["trainer-1"] == "draining"


@pytest.mark.parametrize("silent_s", [0.0, 8.0])
@pytest.mark.parametrize("told", [DrainWorker(worker="trainer-1"), Leaving()])
def test_a_worker_that_leaves_and_comes_back_on_another_connection_still_gets_nothing_new(
    world: World, silent_s: float, told: DrainWorker | Leaving
) -> None:
    trainer = FakeTrainer(world, new_incarnation(), key="t")
    if isinstance(told, Leaving):
        world.say(trainer.peer, told)
    else:
        world.ask(told, Done, operator=True)
    world.wait(silent_s)  # 8 s: it was taken for dead meanwhile
    trainer.connect()
    ask_step(world)
    assert not trainer.inbox
    assert roles(world) == {"trainer-1": "draining"}
    trainer.beat()
    acks = [message.leave for message in trainer.received if isinstance(message, BeatAck)]
    assert acks[-1] is isinstance(told, DrainWorker)
    trainer.incarnation = new_incarnation()
    trainer.connect()
    world.wait(2.5)
    assert len(trainer.inbox) == 1, "its process was started anew"


def test_a_trainer_that_registers_without_credit_since_it_leaves_gets_nothing(world: World) -> None:
    leaves = FakeTrainer(world, new_incarnation(), key="leaves", credit=0)
    ask_step(world)
    world.wait(1)
    assert not leaves.inbox
    world.say(leaves.peer, Leaving())
    assert not leaves.inbox
    stays = FakeTrainer(world, new_incarnation(), key="stays")
    run(leaves, stays)
    assert [sum(trainer.applied.values()) for trainer in (leaves, stays)] == [0, 1]


@pytest.mark.parametrize("kind", [FakeEnv, FakeInference, FakeTrainer])
def test_a_drained_worker_of_any_role_that_was_taken_for_dead_finishes_and_goes(
    world: World, kind: type[FakeEnv | FakeInference | FakeTrainer]
) -> None:
    worker = kind(world, new_incarnation())
    name = registered(worker).worker
    world.ask(DrainWorker(worker=name), Done, operator=True)
    world.wait(8)
    worker.connect()
    assert roles(world) == {name: "draining"}
    world.say(worker.peer, Gone())
    assert roles(world) == {}


def test_only_an_operator_has_a_worker_leave_and_only_one_that_works(world: World) -> None:
    FakeEnv(world, new_incarnation(), instance="host/env-3")
    FakeTrainer(world, new_incarnation(), key="t", instance="host/trainer-1")
    FakeWorker(world, new_incarnation(), key="h", role="health", credit={})
    assert world.refused(DrainWorker(worker="env-1")).code is ErrorCode.FORBIDDEN
    for name in ("env-2", "health-1", ""):
        refused = world.refused(DrainWorker(worker=name), operator=True)
        assert refused.code is ErrorCode.NOT_FOUND
        assert refused.message.startswith(f"there is no worker '{name}', nor a process of that name, to drain; there ")
        assert refused.message.endswith("there are env-1 (process env-3), trainer-1")


@pytest.mark.parametrize("name", ["env-1", "env-3", "host/env-3"])
def test_a_worker_is_drained_by_its_name_or_its_processs(world: World, name: str) -> None:
    FakeEnv(world, new_incarnation(), instance="host/env-3")
    FakeEnv(world, new_incarnation(), instance="host/env-4")
    world.ask(DrainWorker(worker=name), Done, operator=True)
    assert roles(world) == {"env-1": "draining", "env-2": "starting"}


def test_a_worker_is_drained_by_the_name_that_health_knows_its_container_by(world: World) -> None:
    env = FakeEnv(world, new_incarnation(), instance="0a1b2c")
    health = FakeWorker(world, new_incarnation(), key="h", role="health", credit={})
    world.say(health.peer, Supervised(instances=(InstanceRow(name="env-maniskill-2", instance="0a1b2c"),)))
    refused = world.refused(DrainWorker(worker="env-maniskill-1"), operator=True)
    assert refused.message.endswith("there are env-1 (process env-maniskill-2)")
    world.ask(DrainWorker(worker="env-maniskill-2"), Done, operator=True)
    assert roles(world)[registered(env).worker] == "draining"


def test_nobody_is_drained_for_somebody_elses_name(world: World) -> None:
    for instance in ("here/env-2", "here/env-1", "there/env-1"):
        FakeEnv(world, new_incarnation(), instance=instance)
    for name, meant in {
        "env-1": "env-1 (process env-2) or env-2 (process env-1) or env-3 (process env-1): say which by its instance, "
        "one of here/env-2, here/env-1, there/env-1",
        "env-2": "env-1 (process env-2) or env-2 (process env-1): say which by its instance, one of ",
    }.items():
        refused = world.refused(DrainWorker(worker=name), operator=True)
        assert refused.code is ErrorCode.INVALID
        assert meant in refused.message
    world.ask(DrainWorker(worker="here/env-1"), Done, operator=True)
    assert roles(world) == {"env-1": "starting", "env-2": "draining", "env-3": "starting"}


@pytest.mark.parametrize("name", ["trainer-1", ""])
def test_of_many_workers_some_are_named(world: World, name: str) -> None:
    for _ in range(25):
        FakeEnv(world, new_incarnation(), key=new_incarnation())
    refused = world.refused(DrainWorker(worker=name), operator=True)
    assert refused.code is ErrorCode.NOT_FOUND
    assert refused.message.endswith("and 5 more")


def test_a_worker_that_ends_before_it_has_finished_was_lost(world: World) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    ask_step(world)
    world.say(trainer.peer, Leaving())
    trainer.die()
    world.wait(8)
    assert roles(world) == {"trainer-1": "lost"}
