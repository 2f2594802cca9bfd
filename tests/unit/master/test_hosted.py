"""Hosts of tenants' own environments: only their tenant's work, done exactly once, whatever is lost, late or a lie."""

from __future__ import annotations

import gc
import random
import weakref

import msgspec
import numpy as np
import pytest

from joynexus.specs import EvaluateSpec
from joynexus.wire import ErrorCode, Failure, failure
from joynexus.wire.back import Rollout, RolloutDone
from joynexus.wire.front import CancelJob, ClusterStatus, Done, JobInfo, Status, SubmitJob
from joynexus.wire.hosted import EnvironmentOffered, HostDone, PulledWork, PullWork, WithdrawEnvironment
from tests.unit.master.actors import FakeEnv, FakeInference, new_incarnation
from tests.unit.master.acts import publish
from tests.unit.master.hosts import CONFIG, FakeHost, evaluate, info, one_page, solved
from tests.unit.master.world import World, run


@pytest.fixture
def world() -> World:
    world = World()
    for tenant in ("a", "b"):
        world.create(tenant=tenant)
        publish(world, tenant=tenant)
    return world


def test_job_waits_for_a_host_and_says_how_to_start_one(world: World) -> None:
    FakeInference(world, new_incarnation())
    job = evaluate(world)
    assert job.message == "waits for own/mine: start it with `joynexus env serve`"
    host = FakeHost(world)
    host.work()
    solved(world, job)


def test_pull_is_answered_when_there_is_work_and_with_nothing_after_a_while(world: World) -> None:
    host = FakeHost(world)
    host.pull()
    assert world.answers(host.asked) == []
    world.wait(CONFIG.pull_s + 0.5)
    assert world.answers(host.asked) == [PulledWork()]
    host.pull()
    evaluate(world)
    (first,) = host.take()
    assert isinstance(first, Rollout)
    assert (first.env, first.policy, first.version, first.seeds) == ("own/mine", "p", 1, (0, 1, 2, 3, 4))


def test_lost_answer_gives_the_work_again_and_a_repeated_pull_gives_nothing_twice(world: World) -> None:
    host = FakeHost(world)
    evaluate(world)
    host.pull()  # its answer is lost on the way
    host.pull()
    (work,) = host.take()
    assert host.take() == []
    host.pull()
    assert world.answers(host.asked) == [], "it has what it was given"
    assert list(host.have.values()) == [work]


def test_hosts_of_one_name_share_the_work(world: World) -> None:
    hosts = [FakeHost(world) for _ in range(2)]
    job = evaluate(world)
    for host in hosts:
        host.pull()
    taken = [host.take() for host in hosts]
    assert [len(work) for work in taken] == [1, 1]
    assert {seed for (work,) in taken for seed in work.seeds} == set(range(10))  # type: ignore[union-attr]
    for host, (work,) in zip(hosts, taken, strict=True):
        assert isinstance(host.finish(work), Done)  # type: ignore[arg-type]
    solved(world, job)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"env": "own/Mine!"}, "'Mine!' cannot name a task"),
        ({"env": "own/"}, "is not a simulator task"),
        ({"videos": 1}, "no videos are recorded in 'own/mine': leave 'videos' out"),
    ],
)
def test_job_that_no_host_can_do_is_refused(world: World, changes: dict[str, object], sentence: str) -> None:
    spec = msgspec.structs.replace(EvaluateSpec(policy="p", env="own/mine"), **changes)
    refused = world.refused(SubmitJob(key="k", spec=spec), tenant="a")
    assert refused.code is ErrorCode.INVALID
    assert sentence in refused.message


def test_host_serves_only_its_own_tenant(world: World) -> None:
    """Also where another tenant has an environment of the same name, and asks for the very task."""
    mine, theirs = FakeHost(world), FakeHost(world, tenant="b")
    job = evaluate(world)
    theirs.pull()
    assert theirs.take() == []
    mine.pull()
    (work,) = mine.take()
    assert isinstance(work, Rollout)
    foreign = theirs.finish(work)
    assert isinstance(foreign, Failure)
    missing = theirs.finish(msgspec.structs.replace(work, task="z" * len(work.task)))
    assert isinstance(missing, Failure)
    assert foreign.code is missing.code is ErrorCode.STALE
    assert foreign.message.replace(work.task, "") == missing.message.replace("z" * len(work.task), "")
    stolen = HostDone(incarnation=mine.incarnation, rollout=mine.answer(work))
    refused = world.refused(stolen, tenant="b")
    unknown = world.refused(msgspec.structs.replace(stolen, incarnation="nobody"), tenant="b")
    assert refused == unknown
    assert refused.code is ErrorCode.NOT_REGISTERED
    mine.finish(work)
    mine.work()
    solved(world, job)


def test_shared_workers_never_get_an_own_environment(world: World) -> None:
    env = FakeEnv(world, new_incarnation(), key="env")
    evaluate(world)
    run(env)
    assert env.tasks == []


def test_silent_host_is_lost_and_its_pages_wait_for_the_next_one(world: World) -> None:
    FakeInference(world, new_incarnation(), key="i")
    host = FakeHost(world, credit=2)
    job = evaluate(world)
    host.pull()
    (work,) = host.take()
    assert isinstance(work, Rollout)
    world.wait(CONFIG.host_silent_s + CONFIG.pull_s + 1)
    assert world.refused(PullWork(incarnation=host.incarnation), tenant="a").code is ErrorCode.NOT_REGISTERED
    assert "start it with" in info(world, job).message
    late = host.finish(work)
    assert isinstance(late, Failure)
    assert late.code is ErrorCode.NOT_REGISTERED
    FakeHost(world).work()
    solved(world, job)


def test_host_that_pulls_is_never_lost(world: World) -> None:
    host = FakeHost(world)
    for _ in range(20):
        host.pull()
        world.wait(CONFIG.pull_s)
        assert world.answers(host.asked) == [PulledWork()]


def test_host_may_be_lost_any_number_of_times_over_one_page(world: World) -> None:
    job = evaluate(world)
    for _ in range(2 * CONFIG.kills):
        host = FakeHost(world)
        host.pull()
        assert len(host.take()) == 1
        host.ask(WithdrawEnvironment(incarnation=host.incarnation), Done)
    assert info(world, job).state != "failed"
    FakeHost(world).work()
    solved(world, job)


def test_result_of_an_earlier_attempt_is_refused(world: World) -> None:
    first = FakeHost(world)
    job = evaluate(world)
    first.pull()
    (work,) = first.take()
    assert isinstance(work, Rollout)
    first.ask(WithdrawEnvironment(incarnation=first.incarnation), Done)
    again = FakeHost(world)
    again.pull()
    (repeated,) = again.take()
    assert (repeated.task, repeated.attempt) == (work.task, work.attempt + 1)
    stale = again.finish(work)
    assert isinstance(stale, Failure)
    assert stale.code is ErrorCode.STALE
    again.have = {(repeated.task, repeated.attempt): repeated}
    again.finish(repeated)  # type: ignore[arg-type]
    again.work()
    solved(world, job)


def test_repeated_result_counts_once(world: World) -> None:
    host = FakeHost(world)
    job = evaluate(world)
    host.pull()
    (work,) = host.take()
    assert isinstance(work, Rollout)
    assert isinstance(host.finish(work), Done)
    again = host.finish(work)
    assert isinstance(again, Failure)
    assert again.code is ErrorCode.STALE
    host.work()
    solved(world, job)


def test_cancelled_work_is_named_at_once(world: World) -> None:
    host = FakeHost(world)
    job = evaluate(world)
    host.pull()
    host.take()
    host.pull()
    world.tell(CancelJob(job=job.job))
    (answer,) = world.answers(host.asked)
    assert isinstance(answer, PulledWork)
    assert answer.cancelled == tuple(task for task, _ in host.have)


def test_host_is_welcomed_again_after_a_restart_of_the_master_and_told_to_drop_what_it_has(world: World) -> None:
    host = FakeHost(world)
    job = evaluate(world)
    host.pull()
    (work,) = host.take()
    world.crash()
    host.peer = world.new_peer("front")
    host.pull()
    (unknown,) = world.answers(host.asked)
    assert isinstance(unknown, Failure)
    assert unknown.code is ErrorCode.NOT_REGISTERED
    host.ask(host.offering, EnvironmentOffered)
    host.pull()
    taken = host.take()
    assert work not in host.have.values()
    for piece in taken:
        host.finish(piece)  # type: ignore[arg-type]
    host.work()
    solved(world, job)


def test_connection_may_change_under_a_host(world: World) -> None:
    host = FakeHost(world)
    job = evaluate(world)
    host.pull()
    (work,) = host.take()
    host.peer = world.new_peer("front")
    host.ask(host.offering, EnvironmentOffered)
    assert isinstance(host.finish(work), Done)  # type: ignore[arg-type]
    host.work()
    solved(world, job)


def test_every_page_counts_once_whatever_is_lost_repeated_or_late() -> None:
    """Hosts come and go, answers are lost, results come twice and late, the master restarts: one result a page."""
    for seed in range(60):
        draw = random.Random(seed)
        world = World()
        world.create()
        publish(world)
        job = evaluate(world)
        hosts: list[FakeHost] = []
        old: list[tuple[FakeHost, Rollout]] = []
        for _ in range(40):
            match draw.randrange(9):
                case 0 if len(hosts) < 3:
                    hosts.append(FakeHost(world, credit=draw.randint(1, 3)))
                case 1 if hosts:
                    gone = hosts.pop(draw.randrange(len(hosts)))
                    if draw.random() < 0.5:
                        world.tell(WithdrawEnvironment(incarnation=gone.incarnation))
                case 2:
                    world.wait(draw.choice([0.5, 5.0, 20.0]), step=2.0)
                case 3 if draw.random() < 0.2:
                    world.crash()
                case 4 if old:
                    late, work = draw.choice(old)
                    late.finish(work)
                case _ if hosts:
                    host = draw.choice(hosts)
                    host.pull()
                    answers = world.answers(host.asked)
                    if answers and isinstance(answers[0], Failure):
                        host.ask(host.offering, EnvironmentOffered)
                    elif draw.random() < 0.8:  # else the answer is lost
                        host.take()
                    if host.have and draw.random() < 0.7:
                        work = draw.choice(list(host.have.values()))
                        assert isinstance(work, Rollout)
                        host.finish(work)
                        old.append((host, work))
        world.wait(CONFIG.host_silent_s + 5, step=2.0)
        FakeHost(world, credit=4).work()
        solved(world, job)


# Status


def test_a_tenant_sees_its_own_hosts_and_no_others(world: World) -> None:
    FakeHost(world)
    FakeHost(world, tenant="b", name="theirs")

    def seen(**who: object) -> set[str]:
        roles = world.ask(Status(), ClusterStatus, **who).roles
        return {role.detail["simulators"] for role in roles if role.role == "host"}

    assert seen(tenant="a") == {"own/mine"}
    assert seen(tenant="b") == {"own/theirs"}
    assert seen(tenant="a", operator=True) == {"own/mine", "own/theirs"}


# What is kept


def test_environments_of_any_number_of_names_leave_nothing_behind(world: World) -> None:
    for number in range(30):
        name = f"mine-{number}"
        jobs = [evaluate(world, key=f"{key}{number}", env=f"own/{name}") for key in ("served", "cancelled")]
        host = FakeHost(world, name=name)
        host.pull()
        (work,) = host.take()
        assert isinstance(work, Rollout)
        host.finish(work)
        host.work()
        late = evaluate(world, key=f"late{number}", env=f"own/{name}")
        host.ask(WithdrawEnvironment(incarnation=host.incarnation), Done)
        assert info(world, jobs[0]).state == "succeeded"
        world.ask(CancelJob(job=late.job), JobInfo)
        world.ask(CancelJob(job=evaluate(world, key=f"n{number}", env=f"own/nobody-{number}").job), JobInfo)
    queue = world.core._env
    for kept in (queue._waiting, queue._serving, queue._costs, queue._ready._ready):
        assert not [name for name in kept if "mine" in name or "nobody" in name]


def test_a_pull_that_waits_keeps_nothing_that_came_with_it(world: World) -> None:
    host = FakeHost(world)
    picture = np.zeros(8, np.uint8)
    kept = weakref.ref(picture)
    asked = world.tell(PullWork(incarnation=host.incarnation), peer=host.peer, buffers=(picture.data,))
    del picture
    gc.collect()
    assert kept() is None
    assert world.answers(asked) == []


def test_words_of_a_host_are_one_line_that_a_terminal_may_show(world: World) -> None:
    host, job, work = one_page(world)
    told = failure(ErrorCode.INVALID, "the arm\nis \x1b[31mbroken")
    host.finish(work, RolloutDone(task=work.task, attempt=work.attempt, error=told))
    assert info(world, job).message == "own/mine: the arm is [31mbroken"
