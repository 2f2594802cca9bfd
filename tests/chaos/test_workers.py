"""Env workers that are broken, slow or cut off from the shared disk, and trainers that lose their device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from joynexus import launch, rolling
from joynexus.local import ClusterPlan
from joynexus.specs import RlSpec
from joynexus.wire.front import RoleStatus, UpdatePoint
from tests.chaos import faulty_simulator as faulty
from tests.chaos.cluster import Cluster, chaotic
from tests.chaos.jobs import DATASET, Numbers, push, sft
from tests.chaos.jobs import numbers as leaves
from tests.chaos.verdict import Verdict
from tests.process.test_rl import learn, numbers, rl
from tests.waiting import until

# On a busy host a cluster starts in minutes.
pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(500)]
MODULE = faulty.__name__
STEPS = 20


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that says what is wrong with the simulators of the second env worker."""
    return tmp_path_factory.mktemp("faults") / "fault"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, fault: Path) -> Iterator[Cluster]:
    make_plan = launch.make_plan

    def with_a_faulty_one(*args: object) -> ClusterPlan:
        plan = make_plan(*args)  # type: ignore[arg-type]  # passed on as they are
        roles = tuple(
            msgspec.structs.replace(role, env=role.env | {faulty.VARIABLE: str(fault)})
            if role.name == "env-2"
            else role
            for role in plan.roles
        )
        return msgspec.structs.replace(plan, roles=roles)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "make_plan", with_a_faulty_one)
        folder = tmp_path_factory.mktemp("cluster")
        variables = {"JOYNEXUS_GYMNASIUM_MODULES": MODULE, "JOYNEXUS_STEP_S": "8"}
        with chaotic(folder, env_workers=2, **variables) as cluster:
            yield cluster


def spec(policy: str, **changes: object) -> RlSpec:
    return rl(policy, env=f"gymnasium/{MODULE}:Faulty-v0", updates=4, episodes=24, episode_limit=12, **changes)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[UpdatePoint]:
    """The learning curve of a job that nothing happened to."""
    return learn(cluster.client, spec("undisturbed"))


def worker_of(cluster: Cluster, name: str) -> RoleStatus:
    """What operators are told of a process."""
    pid = cluster.pid(name)
    return next(role for role in cluster.client.status().roles if role.pid == pid and role.phase != "lost")


@pytest.mark.case(27, "rewards that are no numbers, observations of another shape, steps that never return")
def test_worker_with_broken_simulators_is_set_aside_and_no_episode_is_lost(
    cluster: Cluster, undisturbed: list[UpdatePoint], verdict: Verdict, fault: Path
) -> None:
    fault.write_text(faulty.BROKEN)
    with verdict("I3"):
        points = learn(cluster.client, spec("disturbed"))
    with verdict("I1"):
        assert numbers(points) == numbers(undisturbed)
    with verdict("I6"):
        role = worker_of(cluster, "env-2")
        assert role.phase == "quarantined"
        assert "3 pieces of work for gymnasium in a row came to nothing here" in role.detail["quarantined"]
        assert cluster.log("master").count("worker_quarantined") == 1
    with verdict("I4"):
        until(cluster.idle)
        fault.unlink()
        rolling.restart(cluster.local.folder, ["env-2"])
        assert worker_of(cluster, "env-2").phase != "quarantined"
        done = cluster.log("env-2").count("Rollout")
        assert numbers(learn(cluster.client, spec("mended"))) == numbers(undisturbed)
        assert cluster.log("env-2").count("Rollout") > done


@pytest.mark.case(28, "one env worker takes a hundred times as long as the other")
def test_slow_worker_holds_up_nothing_that_may_go_on_and_nothing_trained_on_is_too_old(
    cluster: Cluster, undisturbed: list[UpdatePoint], verdict: Verdict, fault: Path
) -> None:
    before = {name: cluster.log(name).count("Rollout") for name in ("env", "env-2")}
    fault.write_text(faulty.SLOW)
    try:
        with verdict("I1"):  # without tickets to spare the rule says the same curve, whoever takes how long
            assert numbers(learn(cluster.client, spec("in-turn"))) == numbers(undisturbed)
        with verdict("I3"):  # with tickets, `learn` holds each update to its staleness and its whole number of episodes
            learn(cluster.client, spec("ahead", max_staleness=2))
    finally:
        fault.unlink()
    with verdict("I5"):
        done = {name: cluster.log(name).count("Rollout") - before[name] for name in before}
        assert done["env"] > done["env-2"] > 0, "who is free takes the work; who is slow is not set aside for that"
        assert worker_of(cluster, "env-2").phase != "quarantined"


@pytest.fixture(scope="module")
def trained(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """What a supervised job leaves that nothing happened to."""
    push(cluster.client, tmp_path_factory.mktemp("data") / DATASET)
    return leaves(cluster.client, sft(cluster.client, "calm", STEPS), "calm", STEPS)


DEVICE_FAULTS = [
    pytest.param("raise:torch.AcceleratorError", True, id="device"),
    pytest.param("raise:torch.OutOfMemoryError", False, id="memory"),
]


@pytest.mark.case(33, "the trainer loses its device, or finds no memory")
@pytest.mark.parametrize(("raised", "ends"), DEVICE_FAULTS)
def test_run_goes_on_bit_for_bit_behind_a_fault_of_the_device(
    cluster: Cluster, trained: Numbers, verdict: Verdict, raised: str, ends: bool
) -> None:
    pid, restarts = cluster.pid("trainer"), cluster.health_of("trainer").restarts
    policy = f"behind-{raised.rpartition('.')[2].lower()}"
    cluster.points.arm("trainer.forward_backward", f"15*{raised}")
    with verdict("I3"):
        found = leaves(cluster.client, sft(cluster.client, policy, STEPS), policy, STEPS)
        assert cluster.points.struck("trainer.forward_backward")
    with verdict("I1"):
        assert found == trained
    with verdict("I4"):
        until(cluster.idle)
        assert (cluster.pid("trainer") != pid) == ends
    with verdict("I6"):
        if ends:
            until(lambda: cluster.health_of("trainer").restarts > restarts)
            assert "code 1" in cluster.health_of("trainer").reason
            assert "AcceleratorError" in cluster.log("trainer")
        else:
            assert "slot_failed" in cluster.log("master")


def start_again(cluster: Cluster) -> None:
    """Have env workers run with the settings that the plan has now."""
    for names in (["health"], ["env"]):
        rolling.restart(cluster.local.folder, names)


@pytest.mark.case(4, "an env worker without the shared disk is killed as it sends trajectories")
def test_curve_is_the_same_when_an_upload_of_trajectories_ends_with_its_worker(
    cluster: Cluster, verdict: Verdict
) -> None:
    plan = cluster.local.load_plan()
    apart = tuple(
        msgspec.structs.replace(role, env={k: v for k, v in role.env.items() if k != "JOYNEXUS_BLOBS_DIR"})
        if role.role == "env"
        else role
        for role in plan.roles
    )
    cluster.local.save_plan(msgspec.structs.replace(plan, roles=apart))
    try:
        start_again(cluster)
        restarts = sum(cluster.health_of(name).restarts for name in ("env", "env-2"))
        cluster.points.arm("worker.push_blob", "2*kill")
        with verdict("I3"):
            points = learn(cluster.client, spec("sent", first_seed=9))  # other episodes: those known are not sent
            assert cluster.points.struck("worker.push_blob")
        with verdict("I1"):
            assert numbers(points) == numbers(learn(cluster.client, spec("sent-in-peace", first_seed=9)))
        with verdict("I6"):
            until(lambda: sum(cluster.health_of(name).restarts for name in ("env", "env-2")) > restarts)
        with verdict("I4"):
            until(cluster.idle)
    finally:
        cluster.local.save_plan(plan)
        start_again(cluster)
