"""Every role of a cluster under load is started anew, and no tenant's operation fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import joynexus
from joynexus import Client, SftPolicy, launch, rolling
from joynexus.local import LocalCluster
from services.env.datasets.writer import LeRobotWriter
from tests.process.clusters import running
from tests.process.test_cluster import CONTRACT, observation
from tests.waiting import until

BACKBONE = "lite@64"  # loads in a second; that any will do is not what is tested here
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # each role starts once more, on a busy host in minutes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("rolling")
    options = launch.Options(backbone=BACKBONE, simulator_processes=1, timeout_s=300)
    with running(folder, options) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A connection of a tenant with a data set and a policy that acts."""
    folder = tmp_path_factory.mktemp("data") / "toy"
    random = np.random.default_rng(0)
    with LeRobotWriter(folder, 10.0, CONTRACT, video=False) as writer:
        states, actions = (random.normal(size=(24, size)).astype(np.float32) for size in (4, 2))
        images = random.integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)
        writer.add_episode(states, actions, {"front": images}, "follow the rule")
    with joynexus.connect(cluster.client_file) as client:
        assert client.datasets.push("toy", folder, progress=False).state == "ready"
        with client.create_policy("actor", dataset="toy", backbone=BACKBONE, chunk=4) as policy:
            policy.publish().result(60)
        yield client


class Load:
    """Calls something again and again in a thread, and keeps what failed."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.done = 0
        self.failed: list[BaseException] = []
        self._call = call
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set() and not self.failed:
            try:
                self._call()
            except Exception as error:
                self.failed.append(error)
            else:
                self.done += 1


def sft(client: Client, policy: str, steps: int) -> joynexus.Job:
    create = SftPolicy(backbone=BACKBONE, chunk=4, seed=3)
    return client.sft(policy=policy, dataset="toy", steps=steps, batch_size=4, create=create, checkpoint_every=20)


def test_every_role_is_restarted_under_load_and_no_operation_fails(cluster: LocalCluster, client: Client) -> None:
    actor = client.policy("actor")
    before = cluster.all_running()
    job = sft(client, "trained", 20_000)
    with client.create_policy("own", dataset="toy", backbone=BACKBONE, chunk=4) as own:

        def train() -> None:
            loss = own.forward_backward(dataset="toy", indices=range(4))
            own.optim_step().result(120)
            assert np.isfinite(loss.result(1).metrics["loss"])

        with Load(lambda: actor.act(*observation(), timeout_s=120)) as acting, Load(train) as training:
            until(lambda: acting.done > 5 and training.done > 5 and job.info().done > 5)
            said: list[str] = []
            names = rolling.restart(cluster.folder, say=said.append)
            counts = acting.done, training.done, job.info().done
            until(lambda: acting.done > counts[0] and training.done > counts[1] and job.info().done > counts[2])
        assert (acting.failed, training.failed) == ([], [])
    assert names == ["trainer", "inference", "env", "master", "health"]
    assert said == [f"restarting {name}" for name in names], "and each of them ended in its grace"
    after = cluster.all_running()
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    assert job.info().state == "running"
    job.cancel()
    report = cluster.load_health()
    assert report is not None
    assert [instance.state for instance in report.instances] == ["running"] * 4


def test_one_role_is_restarted_alone(cluster: LocalCluster, client: Client) -> None:
    before = cluster.all_running()
    assert rolling.restart(cluster.folder, ["env"]) == ["env"]
    after = cluster.all_running()
    assert {name for name in after if after[name] != before[name]} == {"env"}


def test_what_is_no_role_is_named(cluster: LocalCluster, client: Client) -> None:
    with pytest.raises(ValueError, match="'gripper' is no role of this cluster: it has master, trainer, inference"):
        rolling.restart(cluster.folder, ["env", "gripper"])


def test_a_folder_without_a_cluster_is_told_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="joynexus up"):
        rolling.restart(tmp_path)
