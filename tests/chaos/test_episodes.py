"""A role dies at a named place of reinforcement learning, in a whole cluster: the learning curve does not change.

One cluster serves all cases here; each has a policy of its own, of the same spec and seeds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet

from joynexus.specs import RlSpec
from joynexus.wire.front import UpdatePoint
from tests.chaos.cluster import Cluster, chaotic
from tests.chaos.verdict import Verdict
from tests.process.test_rl import learn, numbers, rl
from tests.waiting import until

# On a busy host a cluster starts in minutes.
pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with chaotic(tmp_path_factory.mktemp("cluster"), JOYNEXUS_BEAT_MS="300", JOYNEXUS_SILENT_S="4") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def disarmed(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.points.disarm()


def short(policy: str) -> RlSpec:
    return rl(policy, updates=2)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[UpdatePoint]:
    """The learning curve of a job that nothing happened to."""
    return learn(cluster.client, short("undisturbed"))


def at(number: int, name: str, time: int, what: str) -> ParameterSet:
    """A kill of whoever comes by at a place for the n-th time since the job was submitted."""
    return pytest.param(name, time, marks=pytest.mark.case(number, what), id=name)


KILLS = [
    at(4, "env.before_blob", 2, "env is killed with episodes done and not yet stored"),
    at(2, "trainer.write_checkpoint", 1, "the trainer is killed in an RL job"),
    at(4, "env.between_blob_and_answer", 2, "env is killed between episodes' blob and its answer"),
    at(3, "inference.load_version", 2, "inference is killed as rollouts wait for a version"),
    at(3, "inference.before_answer", 9, "inference is killed with the actions of rollouts at hand"),
]


@pytest.mark.parametrize(("name", "time"), KILLS)
def test_learning_curve_is_that_of_an_undisturbed_job_wherever_a_role_is_killed(
    cluster: Cluster, undisturbed: list[UpdatePoint], verdict: Verdict, name: str, time: int
) -> None:
    role = name.partition(".")[0]
    before = cluster.health_of(role).restarts
    cluster.points.arm(name, f"{time}*kill")
    with verdict("I3"):
        points = learn(cluster.client, short(f"killed-{name.replace('.', '-')}"))
    assert cluster.points.struck(name), f"nobody came by at {name}"
    with verdict("I1"):
        assert numbers(points) == numbers(undisturbed)
    with verdict("I4"):
        until(cluster.idle)
    with verdict("I6"):
        until(lambda: cluster.health_of(role).restarts > before)
        assert "SIGKILL" in cluster.health_of(role).reason
