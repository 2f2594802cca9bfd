"""Hosts of tenants' own environments: only their tenant's work, done exactly once, whatever is lost, late or a lie."""

from __future__ import annotations

import gc
import random
import weakref

import msgspec
import numpy as np
import pytest

from joynexus.contract import Camera
from joynexus.specs import EvaluateSpec
from joynexus.wire import Array, ErrorCode, Failure, Message, failure
from joynexus.wire.back import Collect, DescribeSimulator, Rollout, RolloutDone, SimulatorDescribed
from joynexus.wire.front import (
    Act,
    Actions,
    CancelJob,
    ClusterStatus,
    Done,
    EpisodeResult,
    GetJob,
    GetUsage,
    JobInfo,
    Status,
    SubmitJob,
    UsageReport,
)
from joynexus.wire.hosted import (
    EnvironmentOffered,
    HostAct,
    HostDone,
    OfferEnvironment,
    PulledWork,
    PullWork,
    WithdrawEnvironment,
)
from services.master.config import CoreConfig
from services.master.tasks import Task, simulator_need
from tests.unit.master.actors import FakeEnv, FakeInference, new_incarnation
from tests.unit.master.test_acting import publish
from tests.unit.master.world import CONTRACT, STATISTICS, World, run

CONFIG = CoreConfig()


class FakeHost:
    """A host that does what the test says, step by step."""

    def __init__(
        self, world: World, *, tenant: str = "a", name: str = "mine", credit: int = 1, offer: bool = True
    ) -> None:
        self.world, self.tenant = world, tenant
        self.incarnation = new_incarnation()
        self.peer = world.new_peer("front")
        self.offering = OfferEnvironment(
            name=name, incarnation=self.incarnation, credit=credit, contract=CONTRACT, instruction="go"
        )
        self.have: dict[tuple[str, int], Rollout | DescribeSimulator] = {}
        self.asked = ""
        if offer:
            self.ask(self.offering, EnvironmentOffered)

    def ask(self, message: Message, expect: type) -> Message:
        return self.world.ask(message, expect, tenant=self.tenant, peer=self.peer)

    def pull(self) -> None:
        """Ask for work, and take it as soon as it comes (`take`)."""
        message = PullWork(incarnation=self.incarnation, have=tuple(sorted(self.have)))
        self.asked = self.world.tell(message, tenant=self.tenant, peer=self.peer)

    def take(self) -> list[Rollout | DescribeSimulator]:
        """Take in the answer to the last pull, if there is one."""
        taken = []
        for answer in self.world.answers(self.asked):
            assert isinstance(answer, PulledWork), answer
            for task in answer.cancelled:
                self.have = {key: work for key, work in self.have.items() if key[0] != task}
            for work in (answer.rollout, answer.describe):
                if work is not None and (work.task, work.attempt) not in self.have:
                    self.have[work.task, work.attempt] = work
                    taken.append(work)
        return taken

    def work(self) -> int:
        """Pull, and do everything that comes."""
        done = 0
        while True:
            self.pull()
            if not self.take():
                return done
            for work in list(self.have.values()):
                self.finish(work)
                done += 1

    def answer(self, work: Rollout) -> RolloutDone:
        episodes = tuple(
            EpisodeResult(
                seed=seed, success=seed % 2 == 0, steps=10, reward=1.0, failure="" if seed % 2 == 0 else "limit"
            )
            for seed in work.seeds
        )
        return RolloutDone(task=work.task, attempt=work.attempt, episodes=episodes, contract_digest="c", busy_s=9e9)

    def finish(self, work: Rollout, done: RolloutDone | None = None) -> Message:
        """Give a result; return what the master says to it."""
        message = HostDone(incarnation=self.incarnation, rollout=done or self.answer(work))
        self.have.pop((work.task, work.attempt), None)
        answers = self.world.answers(self.world.tell(message, tenant=self.tenant, peer=self.peer))
        assert len(answers) == 1
        return answers[0]


@pytest.fixture
def world() -> World:
    world = World()
    for tenant in ("a", "b"):
        world.create(tenant=tenant)
        publish(world, tenant=tenant)
    return world


def evaluate(world: World, *, tenant: str = "a", key: str = "k", env: str = "own/mine", episodes: int = 10) -> JobInfo:
    spec = EvaluateSpec(policy="p", env=env, episodes=episodes)
    return world.ask(SubmitJob(key=key, spec=spec), JobInfo, tenant=tenant)


def info(world: World, job: JobInfo, *, tenant: str = "a") -> JobInfo:
    return world.ask(GetJob(job=job.job), JobInfo, tenant=tenant)


def solved(world: World, job: JobInfo) -> None:
    ended = info(world, job)
    assert ended.state == "succeeded", ended.message
    assert ended.evaluation is not None
    assert [episode.seed for episode in ended.evaluation.results] == list(range(10))
    assert ended.evaluation.successes == 5


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


# What a host says is held against what it was asked


def one_page(world: World) -> tuple[FakeHost, JobInfo, Rollout]:
    host = FakeHost(world)
    job = evaluate(world)
    host.pull()
    (work,) = host.take()
    assert isinstance(work, Rollout)
    return host, job, work


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"episodes": ()}, "the seeds of its 0 episodes are not the 5 that were asked for"),
        ({"contract_digest": "c" * 65}, "the digest of its contract is none"),
        ({"trajectories": "d" * 64}, "it has trajectories that nobody asked for"),
        ({"videos": (("d" * 64, 1),)}, "it has videos, which are not taken from hosts"),
    ],
)
def test_result_that_cannot_be_fails_the_job_with_a_sentence(
    world: World, changes: dict[str, object], sentence: str
) -> None:
    host, job, work = one_page(world)
    host.finish(work, msgspec.structs.replace(host.answer(work), **changes))
    ended = info(world, job)
    assert ended.error is not None
    assert ended.error.code is ErrorCode.BAD_DATA
    assert ended.message == f"own/mine gave a result that cannot be: {sentence}"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seed": 77}, "the seeds of its 5 episodes are not the 5"),
        ({"steps": -1}, "less than 0 or more than"),
        ({"steps": 10**9}, "less than 0 or more than"),
        ({"reward": float("nan")}, "the reward of an episode is no number within ±1e+30"),
        ({"reward": -1e300}, "the reward of an episode is no number within"),
        ({"video": "d" * 64}, "videos"),
    ],
)
def test_episode_that_cannot_be_fails_the_job_with_a_sentence(
    world: World, changes: dict[str, object], sentence: str
) -> None:
    host, job, work = one_page(world)
    done = host.answer(work)
    first, *rest = done.episodes
    episodes = (msgspec.structs.replace(first, **changes), *rest)
    host.finish(work, msgspec.structs.replace(done, episodes=episodes))
    assert sentence in info(world, job).message


def test_long_words_of_a_host_are_cut(world: World) -> None:
    host, job, work = one_page(world)
    done = host.answer(work)
    first, *rest = done.episodes
    loud = msgspec.structs.replace(first, success=False, failure="x" * 10_000, env="metaworld/reach-v3")
    software = {f"package-{index}": "1" * 1000 for index in range(1000)}
    host.finish(work, msgspec.structs.replace(done, episodes=(loud, *rest), software=software))
    host.work()
    result = info(world, job).evaluation
    assert result is not None
    assert max(map(len, result.failures)) == 400
    assert len(result.software) == 32
    assert set(map(len, result.software.values())) == {64}


def test_a_terminal_shows_what_hosts_say_as_it_is_and_never_for_what_the_cluster_says(world: World) -> None:
    host, job, work = one_page(world)
    done = msgspec.structs.replace(host.answer(work), software={"numpy\n": "\x1b[2J1.0"})
    host.finish(work, done)
    host.work()
    result = info(world, job).evaluation
    assert result is not None
    assert result.software == {"numpy": "[2J1.0"}
    other = FakeHost(world, offer=False)
    software = {"backbone": "none", "numerics": "not exact: call this number"}
    other.ask(msgspec.structs.replace(other.offering, software=software), EnvironmentOffered)
    details = [role.detail for role in world.ask(Status(), ClusterStatus).roles if role.role == "host"]
    assert not any({"backbone", "numerics"} & set(detail) for detail in details)
    assert details[-1]["software.backbone"] == "none"


def test_failure_that_a_host_tells_is_the_jobs_and_never_the_services(world: World) -> None:
    host, job, work = one_page(world)
    told = failure(ErrorCode.INTERNAL, "the physics " + "x" * 10_000)
    host.finish(work, RolloutDone(task=work.task, attempt=work.attempt, error=told))
    error = info(world, job).error
    assert error is not None
    assert (error.code, error.category) == (ErrorCode.BAD_DATA, "user")
    assert error.message.startswith("own/mine: the physics xxx")
    assert len(error.message) < 500


def test_environment_that_is_away_for_now_is_tried_again(world: World) -> None:
    host, job, work = one_page(world)
    away = failure(ErrorCode.UNAVAILABLE, "the simulator is being updated")
    host.finish(work, RolloutDone(task=work.task, attempt=work.attempt, error=away))
    world.wait(CONFIG.retry_s + 0.5)
    host.work()
    solved(world, job)


def test_nobody_is_charged_for_the_seconds_of_a_tenants_machine(world: World) -> None:
    job = evaluate(world)
    FakeHost(world).work()
    solved(world, job)
    report = world.ask(GetUsage(), UsageReport, tenant="a")
    assert sum(line.env_s for line in report.lines) == 0


def test_result_of_another_kind_is_refused(world: World) -> None:
    host, _, work = one_page(world)
    described = SimulatorDescribed(task=work.task, attempt=work.attempt, contract=CONTRACT)
    for message in (
        HostDone(incarnation=host.incarnation, described=described),
        HostDone(incarnation=host.incarnation),
    ):
        assert world.refused(message, tenant="a").code is ErrorCode.INVALID


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": "../up"}, "'../up' cannot name an environment"),
        ({"name": "x" * 65}, "cannot name an environment"),
        ({"incarnation": ""}, "incarnation must be an id"),
        ({"credit": 0}, "credit must lie between 1 and 64, not 0"),
        ({"credit": 10**9}, "credit must lie between 1 and 64"),
        ({"instruction": "x" * 5000}, "its instruction has 5000 characters: give one of at most 4000"),
        ({"software": {str(index): "1" for index in range(100)}}, "software has at most 32 entries"),
        ({"software": {"numpy": "\x1b[2J1.0"}}, "software has at most 32 entries of 64 characters each, on one line"),
        ({"contract": msgspec.structs.replace(CONTRACT, state_dim=10**9)}, "state_dim must lie between"),
        ({"contract": msgspec.structs.replace(CONTRACT, rate_hz=float("inf"))}, "rate_hz is not finite"),
        ({"contract": msgspec.structs.replace(CONTRACT, action_low=(-1.0,) * 9)}, "action_low has 9 values"),
        ({"contract": msgspec.structs.replace(CONTRACT, robot="x" * 500_000)}, "a contract has at most"),
        (
            {"contract": msgspec.structs.replace(CONTRACT, cameras=(Camera(name="c", height=1, width=10**6),))},
            "width of camera 'c' must lie",
        ),
    ],
)
def test_offer_that_cannot_be_is_refused_with_a_sentence(
    world: World, changes: dict[str, object], sentence: str
) -> None:
    offer = msgspec.structs.replace(FakeHost(world, offer=False).offering, **changes)
    refused = world.refused(offer, tenant="a")
    assert refused.code is ErrorCode.INVALID
    assert sentence in refused.message


def test_another_environment_under_a_served_name_is_refused_until_the_other_host_is_silent(world: World) -> None:
    FakeHost(world)
    other = FakeHost(world, offer=False)
    other.offering = msgspec.structs.replace(other.offering, instruction="stop")
    refused = world.refused(other.offering, tenant="a")
    assert refused.code is ErrorCode.CONFLICT
    assert "another host serves own/mine with another contract or instruction" in refused.message
    world.wait(CONFIG.host_silent_s + CONFIG.pull_s + 1)
    other.ask(other.offering, EnvironmentOffered)


def test_a_tenant_has_a_bounded_number_of_hosts() -> None:
    world = World(CoreConfig(max_hosts=2))
    hosts = [FakeHost(world) for _ in range(2)]
    assert world.refused(FakeHost(world, offer=False).offering, tenant="a").code is ErrorCode.OVERLOADED
    FakeHost(world, tenant="b")
    hosts[0].ask(WithdrawEnvironment(incarnation=hosts[0].incarnation), Done)
    FakeHost(world)


def test_withdrawing_twice_is_fine(world: World) -> None:
    host = FakeHost(world)
    for _ in range(2):
        host.ask(WithdrawEnvironment(incarnation=host.incarnation), Done)


# Actions


def act(policy: str = "p", version: int = 0) -> bytes:
    state = Array(dtype="<f4", shape=(1, 2), frame=0)
    images = (Array(dtype="|u1", shape=(1, 4, 4, 3), frame=1),)
    return msgspec.msgpack.encode(Act(policy=policy, version=version, state=state, images=images, instructions=("go",)))


BUFFERS = (b"\0" * 8, b"\0" * 48)


def test_policy_and_version_of_actions_come_from_the_task_and_inference_is_charged(world: World) -> None:
    inference = FakeInference(world, new_incarnation(), key="i")
    host, _, work = one_page(world)
    lies = HostAct(incarnation=host.incarnation, task=work.task, attempt=work.attempt, act=act("q", 99))
    asked = world.tell(lies, tenant="a", peer=host.peer, buffers=BUFFERS)
    world.wait(0.1)
    run(inference)
    (answer,) = world.answers(asked)
    assert isinstance(answer, Actions)
    (item,) = inference.groups[0].items
    assert (item.tenant, item.policy, item.version) == ("a", "p", 1)
    report = world.ask(GetUsage(), UsageReport, tenant="a")
    assert sum(line.inference_s for line in report.lines) > 0


def test_actions_for_a_task_of_somebody_else_and_for_none_get_the_same_answer(world: World) -> None:
    _, _, work = one_page(world)
    theirs = FakeHost(world, tenant="b")
    answers = []
    for task in (work.task, "z" * len(work.task)):
        message = HostAct(incarnation=theirs.incarnation, task=task, attempt=work.attempt, act=act())
        answers.append(world.refused(message, tenant="b", buffers=BUFFERS).message.replace(task, ""))
    assert answers[0] == answers[1]


def test_garbage_instead_of_a_request_to_act_is_refused(world: World) -> None:
    host, _, work = one_page(world)
    message = HostAct(incarnation=host.incarnation, task=work.task, attempt=work.attempt, act=b"\xff\xff")
    assert world.refused(message, tenant="a").code is ErrorCode.INVALID


# Experience and descriptions, whose jobs are tested elsewhere: here the tasks are put into the queue by hand


def submit(world: World, answer: type, make: object) -> tuple[list[Message], list[Failure]]:
    done: list[Message] = []
    failed: list[Failure] = []
    need = simulator_need("a", "own/mine")
    task = Task(
        tenant="a", policy="p", version=1, need=need, answer=answer, make=make, done=done.append, failed=failed.append
    )  # type: ignore[arg-type]
    world.core._env.submit(task)
    return done, failed


def collecting(task: str, attempt: int) -> Rollout:
    return Rollout(
        task=task, attempt=attempt, tenant="a", policy="p", version=1, contract=CONTRACT, chunk=1, env="own/mine",
        seeds=(5, 5), draws=(1, 2), collect=Collect(reward="dense", value=True),
    )  # fmt: skip


@pytest.mark.parametrize("uploader", ["a", "b", ""])
def test_trajectories_count_only_if_the_tenant_uploaded_them(world: World, uploader: str) -> None:
    done, failed = submit(world, RolloutDone, collecting)
    host, blob = FakeHost(world), "e" * 64
    if uploader:
        world.upload(blob, 1234, tenant=uploader)
    host.pull()
    (work,) = host.take()
    assert isinstance(work, Rollout)
    lie = msgspec.structs.replace(host.answer(work), trajectories=blob, trajectories_nbytes=10**15)
    host.finish(work, lie)
    if uploader == "a":
        (result,) = done
        assert isinstance(result, RolloutDone)
        assert (result.trajectories, result.trajectories_nbytes) == (blob, 1234)
    else:
        (error,) = failed
        assert error.message == "own/mine gave a result that cannot be: its trajectories were not uploaded"


def test_missing_trajectories_are_named(world: World) -> None:
    _, failed = submit(world, RolloutDone, collecting)
    host = FakeHost(world)
    host.pull()
    (work,) = host.take()
    assert isinstance(work, Rollout)
    host.finish(work)
    assert "its trajectories are missing" in failed[0].message


def test_a_page_in_which_no_episode_could_be_run_needs_no_trajectories(world: World) -> None:
    done, failed = submit(world, RolloutDone, collecting)
    host = FakeHost(world)
    host.pull()
    (work,) = host.take()
    assert isinstance(work, Rollout)
    page = host.answer(work)
    lost = tuple(msgspec.structs.replace(one, success=False, failure="the simulator was lost") for one in page.episodes)
    host.finish(work, msgspec.structs.replace(page, episodes=lost))
    assert not failed
    assert [isinstance(one, RolloutDone) and one.episodes for one in done] == [lost]


def test_page_of_which_no_episode_could_be_run_has_no_trajectories(world: World) -> None:
    done, _ = submit(world, RolloutDone, collecting)
    host = FakeHost(world)
    host.pull()
    (work,) = host.take()
    assert isinstance(work, Rollout)
    lost = EpisodeResult(seed=5, success=False, steps=3, reward=0.0, failure="the simulator was lost 3 times: it died")
    host.finish(work, msgspec.structs.replace(host.answer(work), episodes=(lost, lost)))
    assert len(done) == 1


def describing(task: str, attempt: int) -> DescribeSimulator:
    return DescribeSimulator(task=task, attempt=attempt, tenant="a", env="own/mine", warmup_episodes=2)


def test_description_comes_from_the_host_within_bounds(world: World) -> None:
    done, _ = submit(world, SimulatorDescribed, describing)
    host = FakeHost(world)
    host.pull()
    (work,) = host.take()
    described = SimulatorDescribed(
        task=work.task, attempt=work.attempt, contract=CONTRACT, instruction="go", statistics=STATISTICS, busy_s=5.0
    )
    host.ask(HostDone(incarnation=host.incarnation, described=described), Done)
    assert done == [msgspec.structs.replace(described, busy_s=0.0)]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"contract": None}, "its contract is missing"),
        ({"contract": msgspec.structs.replace(CONTRACT, state_dim=3)}, "contract's state_dim is 3"),
        ({"instruction": "x" * 5000}, "5000 characters"),
    ],
)
def test_description_that_cannot_be_is_a_failure(world: World, changes: dict[str, object], sentence: str) -> None:
    _, failed = submit(world, SimulatorDescribed, describing)
    host = FakeHost(world)
    host.pull()
    (work,) = host.take()
    described = SimulatorDescribed(
        task=work.task, attempt=work.attempt, contract=CONTRACT, instruction="go", statistics=STATISTICS
    )
    host.ask(HostDone(incarnation=host.incarnation, described=msgspec.structs.replace(described, **changes)), Done)
    assert failed[0].code is ErrorCode.BAD_DATA
    assert sentence in failed[0].message


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
