"""What a host says: held against what it was asked, within bounds, and a lie is its own job's alone."""

from __future__ import annotations

import msgspec
import pytest

from joynexus.contract import Camera
from joynexus.wire import Array, ErrorCode, Failure, Message, failure
from joynexus.wire.back import Collect, DescribeSimulator, Rollout, RolloutDone, SimulatorDescribed
from joynexus.wire.front import Act, Actions, ClusterStatus, Done, EpisodeResult, GetUsage, Status, UsageReport
from joynexus.wire.hosted import EnvironmentOffered, HostAct, HostDone, WithdrawEnvironment
from services.master.config import CoreConfig
from services.master.tasks import Task, simulator_need
from tests.unit.master.actors import FakeInference, new_incarnation
from tests.unit.master.acts import publish
from tests.unit.master.hosts import CONFIG, FakeHost, evaluate, info, one_page, solved
from tests.unit.master.world import CONTRACT, STATISTICS, World, run


@pytest.fixture
def world() -> World:
    world = World()
    for tenant in ("a", "b"):
        world.create(tenant=tenant)
        publish(world, tenant=tenant)
    return world


# What a host says is held against what it was asked


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
