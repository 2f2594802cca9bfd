"""Workers: named by the master, fenced by incarnation, replaced when silent, asked again when a connection broke."""

from __future__ import annotations

import pytest

from joynexus.wire import ErrorCode, Failure
from joynexus.wire.back import Beat, BeatAck, Register, TrainGroup
from joynexus.wire.front import ClusterStatus, OptimStep, Status
from tests.unit.master.actors import FakeEnv, FakeInference, FakeTrainer, new_incarnation
from tests.unit.master.registered import ask_step, registered, roles
from tests.unit.master.world import FakeWorker, World, run


def test_workers_are_named_by_role(world: World) -> None:
    workers = [FakeEnv(world, new_incarnation(), key=str(index)) for index in range(2)]
    trainer = FakeTrainer(world, new_incarnation(), key="t")
    assert [registered(worker).worker for worker in (*workers, trainer)] == ["env-1", "env-2", "trainer-1"]


def test_an_unknown_connection_is_told_to_register(world: World) -> None:
    (answer,) = world.answers(world.say(world.new_peer("back"), Beat(progress=1, phase="idle", busy_s=0.0)))
    assert isinstance(answer, Failure)
    assert answer.code is ErrorCode.NOT_REGISTERED


def test_a_worker_may_only_register_for_a_role_that_its_key_claims(world: World) -> None:
    peer = world.new_peer("back")
    message = Register(role="admin", incarnation="i", pid=1, credit={})  # type: ignore[arg-type]
    (answer,) = world.answers(world.say(peer, message))
    assert answer.code is ErrorCode.FORBIDDEN  # type: ignore[attr-defined]


def test_a_silent_worker_is_declared_dead_and_a_beating_one_is_not(world: World) -> None:
    quiet = FakeEnv(world, new_incarnation(), key="quiet")
    lively = FakeEnv(world, new_incarnation(), key="lively")
    for _ in range(8):
        world.wait(1)
        lively.beat()
    assert roles(world) == {registered(quiet).worker: "lost", registered(lively).worker: "beats"}


def test_a_restarted_worker_replaces_the_silent_one_of_its_key_at_once(world: World) -> None:
    first = FakeTrainer(world, new_incarnation())
    ask_step(world)
    first.die()
    world.wait(2.5)
    second = FakeTrainer(world, new_incarnation())
    assert len(second.inbox) == 1
    assert registered(second).worker == "trainer-1"
    (role,) = world.ask(Status(), ClusterStatus, operator=True).roles
    assert role.restarts == 1


def test_a_worker_that_restarted_within_a_beat_replaces_its_former_life_after_two(world: World) -> None:
    first = FakeTrainer(world, new_incarnation())
    ask_step(world)
    first.die()
    world.wait(0.5)
    second = FakeTrainer(world, new_incarnation())
    assert not second.inbox
    for _ in range(3):
        world.wait(0.6)
        second.beat()
    assert len(second.inbox) == 1
    assert roles(world) == {"trainer-1": "lost", "trainer-2": "beats"}


def test_of_many_workers_with_one_key_only_the_longest_silent_is_replaced(world: World) -> None:
    dead, slow, lively = (FakeEnv(world, new_incarnation()) for _ in range(3))
    for _ in range(3):
        world.wait(1)
        for worker in (dead, slow, lively):
            worker.beat()
    dead.die()
    world.wait(0.5)
    slow.beat()
    world.wait(2)
    lively.beat()
    new = FakeEnv(world, new_incarnation())
    world.wait(2)
    slow.beat()
    assert registered(new).worker == registered(dead).worker
    assert roles(world) == {"env-1": "starting", "env-2": "beats", "env-3": "beats"}


def test_a_process_that_was_started_anew_takes_its_own_place_at_once_and_no_siblings(world: World) -> None:
    names = ("one", "two", "three")
    first, silent, third = (FakeEnv(world, new_incarnation(), instance=f"host/{name}") for name in names)
    for _ in range(4):
        world.wait(1)
        first.beat()
        third.beat()
    again = FakeEnv(world, new_incarnation(), instance="host/one")
    assert registered(again).worker == registered(first).worker
    world.wait(1.5)
    again.beat()
    third.beat()
    assert roles(world) == {"env-1": "beats", "env-2": "starting", "env-3": "beats"}, "nobody else gave way"
    assert registered(silent).worker == "env-2"


def test_a_newcomer_that_names_its_instance_takes_nobodys_place_who_names_none(world: World) -> None:
    old = FakeEnv(world, new_incarnation())
    world.wait(3)
    new = FakeEnv(world, new_incarnation(), instance="host/new")
    world.wait(2)
    old.beat()
    new.beat()
    assert roles(world) == {"env-1": "beats", "env-2": "beats"}


def test_two_processes_of_one_instance_do_not_take_each_others_place_in_turn(world: World) -> None:
    first = FakeEnv(world, new_incarnation(), instance="host/one")
    second = FakeEnv(world, new_incarnation(), instance="host/one")
    for _ in range(3):
        world.wait(1)
        second.beat()
        first.connect()
        refused = first.received[-1]
        assert isinstance(refused, Failure)
        assert refused.code is ErrorCode.CONFLICT
        assert "JOYNEXUS_INSTANCE" in refused.message
    assert roles(world) == {"env-1": "beats"}
    world.wait(10)  # the second one is silent
    first.connect()
    assert registered(first).worker == "env-1"


@pytest.mark.parametrize("between", [0, 1], ids=["the next one", "the one after that"])
def test_a_process_that_was_taken_for_dead_takes_no_place_when_it_comes_back(world: World, between: int) -> None:
    """A host that was cut off is back, and its work was taken over by another process of that name meanwhile."""
    cut_off = FakeEnv(world, new_incarnation(), instance="host/one")
    cut_off.die()
    world.wait(10)
    for _ in range(between):
        FakeEnv(world, new_incarnation(), instance="host/one").die()
        world.wait(10)
    now = FakeEnv(world, new_incarnation(), instance="host/one")
    cut_off.connect()
    refused = cut_off.received[-1]
    assert isinstance(refused, Failure)
    assert refused.code is ErrorCode.CONFLICT
    now.beat()
    assert roles(world) == {"env-1": "beats"}


def test_an_instance_is_one_of_its_key_alone(world: World) -> None:
    FakeEnv(world, new_incarnation(), key="a", instance="host/one")
    FakeEnv(world, new_incarnation(), key="b", instance="host/one")
    assert roles(world) == {"env-1": "starting", "env-2": "starting"}


def test_an_instance_that_is_started_anew_may_compute_otherwise_if_it_is_the_only_one(world: World) -> None:
    FakeTrainer(world, new_incarnation(), key="t", instance="host/t", batch_key="lite-float32")
    again = FakeTrainer(world, new_incarnation(), key="t", instance="host/t", batch_key="lite-bfloat16")
    assert registered(again).worker == "trainer-1"


def test_a_second_worker_with_the_same_key_does_not_replace_a_living_one(world: World) -> None:
    first = FakeEnv(world, new_incarnation())
    world.wait(1)
    first.beat()
    second = FakeEnv(world, new_incarnation())
    for _ in range(4):
        world.wait(0.9)
        first.beat()
        second.beat()
    assert roles(world) == {"env-1": "beats", "env-2": "beats"}


def test_a_worker_that_comes_back_on_a_new_connection_keeps_its_work_and_gets_it_again(world: World) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    id = ask_step(world)
    (before,) = [send.message for send in trainer.inbox]
    trainer.connect()
    (after,) = [send.message for send in trainer.inbox]
    assert after == before
    run(trainer)
    assert len(world.answers(id)) == 2


def test_work_whose_answer_was_lost_with_the_connection_is_answered_again_but_done_once(world: World) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    id = ask_step(world)
    send = trainer.inbox.popleft()
    trainer.world.actors.pop(trainer.peer)  # the answer goes into a broken connection
    heard, world.event = world.event, lambda event: None  # type: ignore[method-assign]
    world.actors[trainer.peer] = trainer._take
    trainer.do(send)
    world.event = heard  # type: ignore[method-assign]
    trainer.connect()
    run(trainer)
    assert trainer.applied["a", "p", 1] == 1 or len(trainer.groups) == 2
    assert len(world.answers(id)) == 2


def test_work_that_could_not_be_delivered_is_sent_again(world: World) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    world.unreachable.add(trainer.peer)
    ask_step(world)
    assert not trainer.inbox
    world.unreachable.clear()
    world.wait(1.5)
    assert len(trainer.inbox) == 1


def test_a_worker_that_was_declared_dead_is_told_what_it_has_lost(world: World) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    ask_step(world)
    task = trainer.inbox[0].message
    assert isinstance(task, TrainGroup)
    world.wait(10)
    trainer.connect()
    assert registered(trainer).lost == (task.task,)


def test_a_connection_that_registers_another_incarnation_ends_the_first(world: World) -> None:
    worker = FakeEnv(world, new_incarnation())
    world.say(worker.peer, Register(role="env", incarnation="other", pid=2, credit={"data": 1}))
    assert [log.fields["why"] for log in world.logs if log.event == "worker_lost"] == [
        "its connection has another incarnation now"
    ]


def test_an_incarnation_cannot_be_taken_over_with_another_key(world: World) -> None:
    worker = FakeEnv(world, "mine", key="a")
    (answer,) = world.answers(
        world.say(world.new_peer("back"), Register(role="env", incarnation="mine", pid=2, credit={}), key="b")
    )
    assert answer.code is ErrorCode.CONFLICT  # type: ignore[attr-defined]
    assert registered(worker).worker == "env-1"


@pytest.mark.parametrize("kind", [FakeTrainer, FakeInference])
def test_a_worker_with_another_batch_key_is_refused_until_the_others_of_its_role_are_gone(
    world: World, kind: type[FakeTrainer] | type[FakeInference]
) -> None:
    first = kind(world, new_incarnation(), key="first", batch_key="lite-float32")
    kind(world, new_incarnation(), key="second", batch_key="lite-float32")
    other = kind(world, new_incarnation(), key="other", batch_key="lite-bfloat16")
    (refused,) = other.received
    assert isinstance(refused, Failure)
    assert refused.code is ErrorCode.CONFLICT
    assert "lite-float32" in refused.message
    assert "lite-bfloat16" in refused.message
    first.beat()
    world.wait(4)
    first.beat()
    world.wait(4)  # the second one is silent, the first one still there
    other.connect()
    assert isinstance(other.received[-1], Failure)
    world.wait(8)
    other.connect()
    assert registered(other).worker.endswith("-1")


def test_workers_of_other_backbones_and_roles_may_have_other_batch_keys(world: World) -> None:
    workers = [
        FakeTrainer(world, new_incarnation(), key="t", batch_key="lite-float32"),
        FakeTrainer(world, new_incarnation(), key="q", batch_key="qwen-bfloat16", backbone_name="qwen"),
        FakeInference(world, new_incarnation(), key="i", batch_key="lite-float16"),
    ]
    assert [registered(worker).worker for worker in workers] == ["trainer-1", "trainer-2", "inference-1"]


def test_workers_that_register_again_after_a_master_restart_go_on(world: World) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    ask_step(world)
    run(trainer)
    world.crash()
    ask_step(world, 2)
    trainer.connect()
    run(trainer)
    assert trainer.applied["a", "p", 2] == 1


def test_beats_are_answered_and_shown(world: World) -> None:
    worker = FakeInference(world, new_incarnation())
    id = world.say(worker.peer, Beat(progress=7, phase="working", busy_s=1.5, detail={"device": "cpu"}))
    assert world.answers(id) == [BeatAck()]
    (role,) = world.ask(Status(), ClusterStatus, operator=True).roles
    assert (role.role, role.progress, role.busy_s, role.detail) == ("inference", 7, 1.5, {"device": "cpu"})


def test_how_busy_a_worker_is_goes_by_the_life_of_its_process_not_by_when_the_master_met_it(world: World) -> None:
    worker = FakeInference(world, new_incarnation())
    for seconds in (0.0, 30.0):  # one that has loaded for long, or that met another master before
        world.wait(seconds)
        world.say(worker.peer, Beat(progress=1, phase="idle", busy_s=90.0, uptime_s=100.0 + seconds))
        (role,) = world.ask(Status(), ClusterStatus, operator=True).roles
        assert (role.busy_s, role.uptime_s) == (90.0, pytest.approx(100.0 + seconds))


def test_news_of_a_beat_stand_beside_what_a_worker_registered_with(world: World) -> None:
    peer = world.new_peer("back")
    detail = {"numerics": "exact", "features_hits": "0"}
    world.say(peer, Register(role="trainer", incarnation="i", pid=1, credit={"train": 1}, detail=detail))
    for hits in ("1", "2"):
        world.say(peer, Beat(progress=1, phase="working", busy_s=0.0, detail={"features_hits": hits}))
    (role,) = world.ask(Status(), ClusterStatus, operator=True).roles
    assert role.detail == {"numerics": "exact", "features_hits": "2"}


def test_status_tells_a_tenant_nothing_that_others_work_changes_but_the_phase(world: World) -> None:
    canary = "canary of another tenant"
    offered = {"backbone": "tiny", "device": "cpu", "dtype": "float32", "numerics": "exact", "simulators": "s"}
    peer = world.new_peer("back")
    detail = {**offered, "host": canary}
    world.say(peer, Register(role="trainer", incarnation="i", pid=4711, credit={"train": 1}, detail=detail))
    before = world.ask(Status(), ClusterStatus).roles
    news = {"features_hits": "12", "features_misses": "3", "device": canary, "last": canary}
    world.say(peer, Beat(progress=7, phase="starting", busy_s=1.5, detail=news))
    world.wait(3)
    after = world.ask(Status(), ClusterStatus).roles
    assert after == before
    assert [(role.role, role.worker, role.phase, role.pid, role.detail) for role in after] == [
        ("trainer", "trainer-1", "starting", 0, offered)
    ]
    (seen,) = world.ask(Status(), ClusterStatus, operator=True).roles
    assert (seen.pid, seen.progress, seen.detail["features_hits"], seen.detail["last"]) == (4711, 7, "12", canary)


def test_status_shows_a_tenant_its_own_work_and_an_operator_everything(world: World) -> None:
    for tenant in ("a", "b"):
        world.create(tenant=tenant)
        world.tell(OptimStep(policy="p", lease=world.lease(tenant=tenant), seq=1), tenant=tenant)
    mine = world.ask(Status(), ClusterStatus)
    assert [(lane.queue, lane.tenant, lane.waiting) for lane in mine.lanes] == [("training", "a", 1)]
    assert mine.policies == 1
    everything = world.ask(Status(), ClusterStatus, operator=True)
    assert {lane.tenant for lane in everything.lanes} == {"a", "b"}
    assert everything.policies == 2
    health = FakeWorker(world, new_incarnation(), key="h", role="health", credit={})
    (seen,) = world.answers(world.say(health.peer, Status()))
    assert seen.policies == 2  # type: ignore[attr-defined]
