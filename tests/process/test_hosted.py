"""`joynexus env serve` against a whole cluster, from a process that has the wheel alone.

One cluster serves all tests here; each test serves an environment under a name of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import joynexus
from joynexus import Client, JoyNexusError, launch
from joynexus.keyring import Keyring
from joynexus.local import LocalCluster
from joynexus.specs import PolicySpec, PpoSpec, RlPolicy
from joynexus.wire.front import EvaluationResult
from tests.process.clusters import running
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "own_environment" / "point_mass.py"
BACKBONE = "lite@64"  # loads in a second, which counts where roles are killed
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # on a busy host a cluster starts in minutes

WITHOUT_SERVICES = """
import signal
import sys

class OnlyTheWheel:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"services", "common", "torch", "transformers"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, OnlyTheWheel())
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
"""What a machine is like on which `pip install joynexus` has run and nothing else, with a keyboard that sends Ctrl-C
(processes in the background ignore it); `site` runs it in each process."""

HANGS = """
import time
from point_mass import PointMass

class Hangs(PointMass):
    def step_chunk(self, actions, **how):
        time.sleep(600)

make_env = Hangs
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    options = launch.Options(backbone=BACKBONE, simulator_processes=1, timeout_s=300)
    with running(folder, options) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[Client]:
    with joynexus.connect(cluster.client_file) as client:
        yield client


@pytest.fixture(scope="module")
def policy(client: Client) -> str:
    """A policy for the example's contract, with one version."""
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        from point_mass import PointMass
    finally:
        sys.path.pop(0)
    spec = PolicySpec(backbone=BACKBONE, contract=PointMass.contract, normalization="none", chunk=2, seed=1)
    with client.create_policy("pusher", spec) as policy:
        policy.publish().result(60)
    return "pusher"


Serve = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def serve(cluster: LocalCluster, tmp_path: Path) -> Iterator[Serve]:
    """Starts hosts in a folder with the example, and ends those that are left."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(WITHOUT_SERVICES)
    shutil.copy(EXAMPLE, tmp_path)
    hosts: list[subprocess.Popen[str]] = []

    def start(target: str, *options: str, config: Path = cluster.client_file) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "joynexus", "env", "serve", target, "--config", str(config), *options]
        host = subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site)},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        hosts.append(host)
        return host

    try:
        yield start
    finally:
        for host in hosts:
            if host.poll() is None:
                host.kill()
            host.wait()
            assert host.stderr is not None
            host.stderr.close()


def served(client: Client, name: str, hosts: int = 1) -> None:
    until(lambda: sum(role.detail.get("simulators") == f"own/{name}" for role in client.status().roles) == hosts, 60)


def evaluate(client: Client, name: str, **more: object) -> joynexus.Job:
    fields = {"episodes": 20, "execute": 1, **more}
    return client.evaluate(policy="pusher", env=f"own/{name}", **fields)


def result_of(job: joynexus.Job) -> EvaluationResult:
    evaluation = job.wait(progress=False, timeout_s=120).evaluation
    assert evaluation is not None
    return evaluation


def numbers(evaluation: EvaluationResult) -> list[tuple[int, float, int]]:
    return [(episode.seed, episode.reward, episode.steps) for episode in evaluation.results]


def test_evaluation_runs_on_the_tenants_machine_with_the_wheel_alone(client: Client, policy: str, serve: Serve) -> None:
    job = evaluate(client, "point_mass")
    until(lambda: "start it with `joynexus env serve`" in job.info().message)
    host = serve("point_mass:make_env")
    result = result_of(job)
    assert [episode.seed for episode in result.results] == list(range(20))
    assert len({episode.reward for episode in result.results}) == 20
    assert result.software["environment"] == "point_mass:make_env"
    assert use(client, policy) == (0.0, True)
    host.send_signal(signal.SIGINT)
    assert host.wait(60) == 0
    assert host.stderr is not None
    said = host.stderr.read()
    assert "'push the point to the middle' is served as own/point_mass" in said
    assert "5 episodes of policy 'pusher'" in said
    assert "Traceback" not in said
    served(client, "point_mass", hosts=0)


def use(client: Client, policy: str, other: str = "inference_s") -> tuple[float, bool]:
    """Seconds of simulators that a policy was charged with, and whether it was charged with others."""
    lines = [line for line in client.usage().lines if line.policy == policy]
    return sum(line.env_s for line in lines), sum(getattr(line, other) for line in lines) > 0


def test_killed_host_changes_no_episode(client: Client, policy: str, serve: Serve) -> None:
    serve("point_mass:make_env", "--name", "killed")
    served(client, "killed")
    undisturbed = result_of(evaluate(client, "killed"))
    first = serve("point_mass:make_env", "--name", "killed")
    served(client, "killed", hosts=2)
    job = evaluate(client, "killed")
    until(lambda: job.info().done > 0)
    first.kill()
    assert job.info().done < 20
    assert numbers(result_of(job)) == numbers(undisturbed)


def test_page_of_the_last_host_waits_for_another_one(client: Client, policy: str, serve: Serve) -> None:
    host = serve("point_mass:make_env", "--name", "alone")
    served(client, "alone")
    job = evaluate(client, "alone", episodes=30)
    until(lambda: job.info().done > 0)
    host.terminate()
    assert host.wait(60) == 0
    assert host.stderr is not None
    assert "Traceback" not in host.stderr.read()
    until(lambda: "start it with" in job.info().message)
    serve("point_mass:make_env", "--name", "alone", "--processes", "2")
    assert [episode.seed for episode in result_of(job).results] == list(range(30))


def test_policy_is_trained_on_the_tenants_machine(client: Client, serve: Serve) -> None:
    """Described, warmed up, two updates, one of them with another host than it began with."""
    job = client.rl(
        policy="learner",
        env="own/gym",
        algorithm=PpoSpec(epochs=2, minibatch=128),
        updates=2,
        episodes=10,
        warmup_episodes=4,
        create=RlPolicy(backbone=BACKBONE, seed=2),
    )
    until(lambda: "own/gym: start it with" in job.info().message)
    first = serve("point_mass:make_env", "--name", "gym")
    until(lambda: job.info().done > 0)
    first.kill()
    serve("point_mass:make_env", "--name", "gym", "--processes", "2")
    info = job.wait(progress=False, timeout_s=300)
    assert [point.update for point in info.updates] == [0, 1]
    assert all(point.episodes == 10 and point.steps == 600 for point in info.updates)
    assert info.version == info.initial_version + 2
    assert use(client, "learner", "trainer_s") == (0.0, True)


def test_master_that_restarts_finds_its_hosts_again(
    client: Client, cluster: LocalCluster, policy: str, serve: Serve
) -> None:
    serve("point_mass:make_env", "--name", "stays")
    served(client, "stays")
    job = evaluate(client, "stays")
    until(lambda: job.info().done > 0)
    os.kill(cluster.running("master"), signal.SIGKILL)
    assert [episode.seed for episode in result_of(job).results] == list(range(20))


def test_environment_that_hangs_fails_its_job_with_a_sentence_and_is_served_on(
    client: Client, policy: str, serve: Serve, tmp_path: Path
) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    host = serve("hangs:make_env", "--timeout", "1", "--environments", "1")
    served(client, "hangs")
    job = evaluate(client, "hangs", episodes=1)
    with pytest.raises(JoyNexusError, match=r"own/hangs: none of 1 episodes .* took longer than 1 s to step"):
        job.wait(progress=False, timeout_s=300)
    assert host.poll() is None


def test_another_tenant_sees_and_gets_nothing(client: Client, cluster: LocalCluster, policy: str, serve: Serve) -> None:
    stranger = Keyring(cluster.keys).issue("stranger", tenant="stranger")
    serve("point_mass:make_env", "--name", "theirs", config=stranger)
    with joynexus.connect(stranger) as theirs:
        served(theirs, "theirs")
        assert "start it with" in evaluate(client, "theirs", episodes=1).info().message
        with pytest.raises(JoyNexusError, match="no policy 'pusher'"):
            evaluate(theirs, "theirs")


def test_contract_that_differs_is_named(client: Client, policy: str, serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(
        "import msgspec\nfrom point_mass import PointMass\n"
        "class Other(PointMass):\n"
        "    contract = msgspec.structs.replace(PointMass.contract, control_mode='force', robot='arm')\n"
        "make_env = Other\n"
    )
    serve("other:make_env")
    served(client, "other")
    with pytest.raises(JoyNexusError, match="contract field 'robot' differs") as refused:
        evaluate(client, "other").wait(progress=False, timeout_s=60)
    assert refused.value.code == "CONTRACT_MISMATCH"


def test_what_cannot_be_served_is_told_on_the_terminal(cluster: LocalCluster, serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("def make_env():\n    raise ZeroDivisionError('no physics')\n")
    host = serve("fails:make_env")
    assert host.wait(60) == 1
    assert host.stderr is not None
    assert "ZeroDivisionError: no physics" in host.stderr.read().splitlines()[-1]


def test_robots_key_may_not_serve(cluster: LocalCluster, serve: Serve) -> None:
    host = serve("point_mass:make_env", config=Keyring(cluster.keys).issue("arm", tenant="default", scope="act"))
    assert host.wait(60) == 1
    assert host.stderr is not None
    assert "needs a key of scope 'all'" in host.stderr.read()
