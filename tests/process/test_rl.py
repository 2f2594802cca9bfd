"""Reinforcement learning by a whole cluster of real processes: simulators, inference and trainer in one loop.

One cluster serves all tests here; each test has a policy of its own.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator

import pytest

import joynexus
from joynexus import Client, launch
from joynexus.local import LocalCluster
from joynexus.specs import EvaluateSpec, GrpoSpec, OptimizerSpec, PpoSpec, RlPolicy, RlSpec
from joynexus.wire.front import EvaluationResult, UpdatePoint
from tests.process.clusters import running
from tests.waiting import until

BACKBONE = "lite@64"  # loads in a second, which counts where roles are killed
ENV = "metaworld/reach-v3"
PPO = PpoSpec(epochs=2, minibatch=16)
EPISODES, UPDATES = 6, 3
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # on a busy host a cluster starts in minutes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    options = launch.Options(backbone=BACKBONE, simulator_processes=2, timeout_s=300)
    with pytest.MonkeyPatch.context() as environment:  # health's: it need not wait long before it takes one for wedged
        environment.setenv("JOYNEXUS_LOST_S", "5")
        environment.setenv("JOYNEXUS_MASTER_SILENT_S", "15")
        with running(folder, options) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[Client]:
    with joynexus.connect(cluster.client_file) as client:
        yield client


def rl(policy: str, **changes: object) -> RlSpec:
    fields = {
        "policy": policy,
        "env": ENV,
        "algorithm": PPO,
        "updates": UPDATES,
        "episodes": EPISODES,
        "episode_limit": 24,
        "create": RlPolicy(backbone=BACKBONE, chunk=4, optimizer=OptimizerSpec(lr=1e-3)),
        "warmup_episodes": 2,
        "checkpoint_every": 2,
        **changes,
    }
    return RlSpec(**fields)  # type: ignore[arg-type]  # the values are what the fields want


def learn(client: Client, spec: RlSpec) -> list[UpdatePoint]:
    """Run a job to its end; return its learning curve."""
    job = client.submit(spec)
    info = job.wait(progress=False, timeout_s=240)
    assert (info.state, info.done, info.version) == ("succeeded", spec.updates, spec.updates + 1)
    points = job.updates
    assert [point.update for point in points] == list(range(spec.updates))
    assert all(point.episodes == spec.episodes for point in points)
    assert all(0 <= point.staleness <= spec.max_staleness for point in points)
    assert all(math.isfinite(value) for point in points for value in point.metrics.values())
    return points


@pytest.fixture(scope="module")
def undisturbed(client: Client) -> list[UpdatePoint]:
    """The learning curve of a job that nothing happened to."""
    return learn(client, rl("undisturbed"))


def strike(cluster: LocalCluster, how: signal.Signals, *names: str) -> None:
    """Send roles a signal and wait until health has started others."""
    pids = {name: cluster.running(name) for name in names}
    for pid in pids.values():
        os.kill(pid, how)
    for name, pid in pids.items():
        until(lambda name=name, pid=pid: cluster.running(name) not in (0, pid), seconds=150)


def numbers(points: list[UpdatePoint]) -> list[tuple[object, ...]]:
    """What must not depend on anything but seeds."""
    return [(point.success, point.reward, point.length, point.steps, point.metrics) for point in points]


def test_ppo_runs_from_a_task_name_to_a_version(client: Client, undisturbed: list[UpdatePoint]) -> None:
    policy = client.policy("undisturbed").info()
    assert policy.spec.contract.cameras == ()
    assert policy.spec.statistics is not None
    assert [version.version for version in policy.versions] == [1, UPDATES + 1]
    assert policy.driver == ""
    assert {point.steps for point in undisturbed} == {EPISODES * 24}
    assert all(point.metrics["decisions"] == EPISODES * 6 for point in undisturbed)


def test_the_same_seeds_give_the_same_curve(client: Client, undisturbed: list[UpdatePoint]) -> None:
    assert numbers(learn(client, rl("again"))) == numbers(undisturbed)


def test_training_reads_the_features_that_acting_made(client: Client, undisturbed: list[UpdatePoint]) -> None:
    job = next(info for info in client.jobs() if info.spec.policy == "undisturbed")
    assert job.samples > 0
    assert job.backbone_forwards == 0


def test_grpo_runs(client: Client) -> None:
    spec = rl("grpo", algorithm=GrpoSpec(epochs=2, minibatch=16, group_size=3, filter_low=-1e9, filter_high=1e9))
    points = learn(client, spec)
    assert all(point.metrics["groups"] == 2 for point in points)


def test_asynchronous_ppo_stays_within_its_staleness(client: Client) -> None:
    points = learn(client, rl("async", updates=4, max_staleness=1))
    assert max(point.staleness for point in points) <= 1


@pytest.mark.parametrize("victim", ["env", "inference", "trainer", "master"])
def test_whoever_is_killed_the_curve_is_that_of_an_undisturbed_job(
    client: Client, cluster: LocalCluster, undisturbed: list[UpdatePoint], victim: str
) -> None:
    job = client.submit(rl(f"killed-{victim}"))
    until(lambda: job.info().done >= 1, seconds=90)
    strike(cluster, signal.SIGKILL, victim)
    info = job.wait(progress=False, timeout_s=240)
    assert info.state == "succeeded"
    assert numbers(job.updates) == numbers(undisturbed)


@pytest.mark.parametrize("victims", [("env", "inference", "trainer"), ("master",)], ids=["workers", "master"])
def test_whoever_hangs_is_replaced_and_the_curve_is_that_of_an_undisturbed_job(
    client: Client, cluster: LocalCluster, undisturbed: list[UpdatePoint], victims: tuple[str, ...]
) -> None:
    job = client.submit(rl(f"hung-{victims[0]}"))
    until(lambda: job.info().done >= 1)
    strike(cluster, signal.SIGSTOP, *victims)
    info = job.wait(progress=False, timeout_s=240)
    assert info.state == "succeeded"
    assert numbers(job.updates) == numbers(undisturbed)


def test_stages_follow_one_another_on_one_policy(client: Client) -> None:
    evaluate = EvaluateSpec(policy="staged", env=ENV, episodes=2, episode_limit=24)
    job = client.pipeline("staged", rl("staged", updates=1), evaluate)
    info = job.wait(progress=False, timeout_s=300)
    assert [(stage.kind, stage.state) for stage in info.stages] == [("rl", "succeeded"), ("evaluate", "succeeded")]
    result = client.job(info.stages[1].job).result
    assert isinstance(result, EvaluationResult)
    assert (result.version, result.episodes) == (2, 2)


def test_a_task_that_does_not_exist_is_said_in_one_sentence(client: Client) -> None:
    job = client.submit(rl("nowhere", env="metaworld/reach-v99"))
    until(lambda: job.info().state == "failed")
    assert "reach-v99" in job.info().message
