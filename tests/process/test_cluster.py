"""A whole cluster of real processes, as `joynexus up` starts it: train, kill, serve, export.

One cluster serves all tests here; each test has policies of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import joynexus
from joynexus import Client, JoyNexusError, SftPolicy, launch
from joynexus.contract import Camera, Contract
from joynexus.local import LocalCluster
from joynexus.simulation.interface import SimulatorOptions
from joynexus.specs import PolicySpec
from joynexus.wire.front import EvaluationResult
from services.env.datasets.writer import LeRobotWriter
from services.env.simulators.metaworld_tasks import contract as metaworld_contract
from tests.process.clusters import running
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
BACKBONE = "tiny-qwen3vl"
CONTRACT = Contract(
    robot="toy", cameras=(Camera(name="front", height=32, width=32),), state_dim=4, action_dim=2, rate_hz=10.0
)
EPISODES, STEPS = 4, 24
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # on a busy host a cluster starts in minutes


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
def dataset(client: Client, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pushed set in which the action is a linear function of the state."""
    folder = tmp_path_factory.mktemp("data") / "toy"
    random = np.random.default_rng(0)
    weights = random.normal(size=(4, 2)).astype(np.float32)
    with LeRobotWriter(folder, 10.0, CONTRACT, video=False) as writer:
        for _ in range(EPISODES):
            states = random.normal(size=(STEPS, 4)).astype(np.float32)
            images = random.integers(0, 256, (STEPS, 32, 32, 3), dtype=np.uint8)
            writer.add_episode(states, np.tanh(states @ weights), {"front": images}, "follow the rule")
    info = client.datasets.push("toy", folder, progress=False)
    assert info.state == "ready", info.faults
    assert (info.episodes, info.steps) == (EPISODES, EPISODES * STEPS)
    return info.dataset


def create(seed: int = 3) -> SftPolicy:
    return SftPolicy(backbone=BACKBONE, chunk=4, seed=seed)


def sft(client: Client, policy: str, *, steps: int = 60, **more: object) -> joynexus.Job:
    return client.sft(
        policy=policy, dataset="toy", steps=steps, batch_size=8, create=create(), checkpoint_every=20, **more
    )


@pytest.fixture(scope="module")
def undisturbed(client: Client, dataset: str) -> list[float]:
    """The loss curve of a job that nothing happened to."""
    job = sft(client, "undisturbed", publish_initial=True)
    info = job.wait(progress=False, timeout_s=300)
    assert (info.initial_version, info.version) == (1, 2)
    return job.losses


def kill(cluster: LocalCluster, name: str) -> None:
    """Kill a role and wait until health has started another."""
    pid = cluster.running(name)
    os.kill(pid, signal.SIGKILL)
    until(lambda: cluster.running(name) not in (0, pid))


def observation(seed: int = 0) -> tuple[dict[str, npt.NDArray[np.uint8]], str, npt.NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    picture = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    return {"front": picture}, "follow the rule", random.normal(size=4).astype(np.float32)


def test_all_roles_are_up_and_say_what_they_are(client: Client, cluster: LocalCluster) -> None:
    status = client.status()
    assert {role.role for role in status.roles} == {"trainer", "inference", "env", "health"}
    assert set(cluster.all_running()) == {"master", "trainer", "inference", "env", "health"}
    trainer = next(role for role in status.roles if role.role == "trainer")
    assert trainer.detail["backbone"] == BACKBONE
    assert trainer.detail["numerics"]


def test_second_up_in_the_same_folder_is_refused(cluster: LocalCluster) -> None:
    with pytest.raises(ValueError, match=r"is up in .* already"):
        launch.up(cluster.folder, launch.Options())


def test_job_learns_and_each_sample_meets_the_backbone_once(client: Client, undisturbed: list[float]) -> None:
    assert len(undisturbed) == 60
    assert np.mean(undisturbed[-5:]) < 0.8 * np.mean(undisturbed[:5])
    info = next(info for info in client.jobs() if getattr(info.spec, "policy", "") == "undisturbed")
    assert info.samples == 60 * 8
    assert info.backbone_forwards <= EPISODES * STEPS


def test_served_versions_stand_side_by_side_and_say_who_acted(client: Client, undisturbed: list[float]) -> None:
    policy = client.policy("undisturbed")
    newest, first = policy.act(*observation()), policy.act(*observation(), version=1)
    assert (newest.version, first.version) == (2, 1)
    assert newest.actions.shape == (4, 2)
    assert not np.array_equal(newest.actions, first.actions)
    assert np.array_equal(policy.act(*observation()).actions, newest.actions)


@pytest.mark.parametrize("role", ["trainer", "master", "env"])
def test_killed_role_changes_nothing_of_a_jobs_losses(
    client: Client, cluster: LocalCluster, undisturbed: list[float], role: str
) -> None:
    job = sft(client, f"killed-{role}")
    until(lambda: job.info().done >= 25)
    kill(cluster, role)
    info = job.wait(progress=False, timeout_s=300)
    assert job.losses == undisturbed
    assert info.version == 1


def test_killed_inference_answers_again_with_the_same_version(
    client: Client, cluster: LocalCluster, undisturbed: list[float]
) -> None:
    policy = client.policy("undisturbed")
    before = policy.act(*observation())
    kill(cluster, "inference")
    after = policy.act(*observation(), timeout_s=90)
    assert after.version == before.version
    assert np.array_equal(after.actions, before.actions)


def evaluate(client: Client) -> joynexus.Job:
    return client.evaluate(policy="reacher", version=1, env="metaworld/reach-v3", episodes=10, episode_limit=40)


@pytest.fixture(scope="module")
def evaluated(client: Client) -> EvaluationResult:
    """The evaluation of a policy that nothing happened to."""
    contract = metaworld_contract(SimulatorOptions(cameras=()))
    spec = PolicySpec(backbone=BACKBONE, contract=contract, normalization="none")
    with client.create_policy("reacher", spec) as policy:
        policy.publish().result(60)
    result = evaluate(client).wait(progress=False, timeout_s=120).evaluation
    assert result is not None
    assert len({episode.reward for episode in result.results}) == 10, "each seed is another episode"
    return result


@pytest.mark.parametrize("role", ["env", "inference", "master"])
def test_killed_role_changes_no_episode_of_an_evaluation(
    client: Client, cluster: LocalCluster, evaluated: EvaluationResult, role: str
) -> None:
    job = evaluate(client)
    until(lambda: job.info().state != "waiting")
    kill(cluster, role)
    assert job.wait(progress=False, timeout_s=120).evaluation == evaluated


def test_own_loop_gives_the_jobs_losses(client: Client, undisturbed: list[float]) -> None:
    """The same op sequence by hand: what a job computes is no secret of the job."""
    policy = client.create_policy("loop", dataset="toy", backbone=BACKBONE, chunk=4, seed=3)
    with policy:
        losses = []
        for first in range(0, 40, 8):
            loss = policy.forward_backward(dataset="toy", indices=range(first, first + 8))
            step = policy.optim_step()
            losses.append(loss.result(60).metrics["loss"])
            assert step.result(60).metrics["step"] == len(losses)
        policy.save_state("five").result(60)
        policy.forward_backward(dataset="toy", indices=range(8)).result(60)
        policy.optim_step().result(60)
        policy.load_state("five").result(60)
        again = policy.forward_backward(dataset="toy", indices=range(8)).result(60).metrics["loss"]
        policy.load_state("five").result(60)
        assert policy.forward_backward(dataset="toy", indices=range(8)).result(60).metrics["loss"] == again
    assert len(set(losses)) == len(losses)


def test_inline_batch_and_uploaded_batch_give_finite_losses(client: Client, dataset: str) -> None:
    policy = client.create_policy("inline", dataset="toy", backbone=BACKBONE, chunk=4)
    random = np.random.default_rng(1)
    with policy:
        for count in (2, 128):
            batch = joynexus.Batch(
                state=random.normal(size=(count, 4)),
                action=random.normal(size=(count, 4, 2)),
                images=[random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)],
                instructions="follow the rule",
            )
            assert np.isfinite(policy.forward_backward(batch).result(120).metrics["loss"])


def test_asyncio_loop_gives_the_numbers_of_the_blocking_one(
    client: Client, cluster: LocalCluster, dataset: str
) -> None:
    """Ops are all called before the first is awaited; every second one has to upload its samples."""
    random = np.random.default_rng(2)
    batches = [
        joynexus.Batch(
            state=random.normal(size=(count, 4)),
            action=random.normal(size=(count, 4, 2)),
            images=[random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)],
            instructions="follow the rule",
        )
        for count in (2, 128, 3, 128)
    ]
    fields = {"dataset": dataset, "backbone": BACKBONE, "chunk": 4, "head": "groot", "seed": 5}

    async def awaited() -> list[float]:
        async with joynexus.connect_async(cluster.client_file) as twin:
            policy = await twin.create_policy("awaited", **fields)
            futures = [(policy.forward_backward(batch), policy.optim_step()) for batch in batches]
            return [(await loss).metrics["loss"] for loss, _ in reversed(futures)][::-1]

    with client.create_policy("waited", **fields) as policy:
        waited = []
        for batch in batches:
            waited.append(policy.forward_backward(batch).result(120).metrics["loss"])
            policy.optim_step().result(60)
    assert asyncio.run(awaited()) == waited


def test_own_weights_act_as_where_they_came_from(
    client: Client, dataset: str, undisturbed: list[float], tmp_path: Path
) -> None:
    folder = client.policy("undisturbed").export(tmp_path / "exported")
    with client.create_policy("heir", dataset=dataset, backbone=BACKBONE, chunk=4, seed=99) as policy:
        policy.load_weights(folder).result(60)
        policy.publish().result(60)
    ours, theirs = client.policy("heir").act(*observation(6)), client.policy("undisturbed").act(*observation(6))
    assert np.array_equal(ours.actions, theirs.actions)


def test_two_drivers_of_one_policy_are_told_apart(client: Client, cluster: LocalCluster, dataset: str) -> None:
    policy = client.create_policy("driven", dataset="toy", backbone=BACKBONE, chunk=4)
    policy.forward_backward(dataset="toy", indices=[0]).result(60)
    with joynexus.connect(cluster.client_file) as other, pytest.raises(JoyNexusError) as refused:
        other.policy("driven").optim_step().result(30)
    assert refused.value.code == "CONFLICT"
    policy.release()


def test_exported_policy_acts_without_the_cluster_bit_for_bit(
    client: Client, cluster: LocalCluster, undisturbed: list[float], tmp_path: Path
) -> None:
    policy = client.policy("undisturbed")
    served = policy.act(*observation(5))
    folder = policy.export(tmp_path / "exported")
    assert {path.name for path in folder.iterdir()} == {
        "policy.safetensors", "config.json", "contract.json", "statistics.json", "README.txt",
    }  # fmt: skip
    images, instruction, state = observation(5)
    np.savez(tmp_path / "observation.npz", front=images["front"], state=state)
    program = (
        "import sys, json, numpy as np, joynexus, pathlib\n"
        f"policy = joynexus.load_policy({str(folder)!r}, cache_dir=pathlib.Path({str(cluster.folder / 'cache')!r}))\n"
        f"seen = np.load({str(tmp_path / 'observation.npz')!r})\n"
        f"actions = policy.act({{'front': seen['front']}}, {instruction!r}, seen['state'])\n"
        "print(json.dumps({'bit_equal': policy.numerics.bit_equal, 'actions': actions.tolist()}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    actions = np.asarray(found["actions"], dtype=np.float32)
    if found["bit_equal"]:
        assert np.array_equal(actions, served.actions)
    np.testing.assert_allclose(actions, served.actions, atol=1e-5)


def test_each_piece_of_work_is_found_in_every_roles_log_under_one_trace(
    client: Client, cluster: LocalCluster, undisturbed: list[float], evaluated: EvaluationResult
) -> None:
    def ops(role: str, **values: str) -> list[dict[str, str]]:
        lines = cluster.log_file(role).read_text(errors="replace").splitlines()
        found = [dict(re.findall(r"(\w+)=([^\s]+)", line)) for line in lines if re.search(r"\] op +\S*=", line)]
        return [line for line in found if values.items() <= line.items()]

    jobs = {type(info.spec).__name__: info.job for info in client.jobs() if info.state == "succeeded"}
    learned, measured = jobs["SftSpec"], jobs["EvaluateSpec"]
    for job in (learned, measured):
        assert ops("master", op="submit_job", job=job, outcome="ok")
    assert ops("env", op="SampleIndices", trace=learned)
    assert ops("trainer", op="train_step", trace=learned, outcome="ok")
    assert ops("env", op="Rollout", trace=measured, outcome="ok")
    assert ops("inference", op="predict", trace=measured, outcome="ok")
    with client.policy("undisturbed") as policy:
        policy.save_state("traced").result(60)
    until(lambda: ops("master", op="save_state", policy="undisturbed"))
    (asked,) = ops("master", op="save_state", policy="undisturbed")
    assert ops("trainer", op="save_state", policy="undisturbed", trace=asked["trace"])


def test_usage_is_metered(client: Client, undisturbed: list[float]) -> None:
    lines = [line for line in client.usage().lines if line.policy == "undisturbed"]
    assert max(line.samples for line in lines if line.job) >= 60 * 8
    assert sum(line.trainer_s for line in lines) > 0


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda client: client.policy("nobody").info(), "nobody"),
        (lambda client: client.datasets.get("nothing"), "nothing"),
        (
            lambda client: client.sft(policy="x", dataset="nothing", steps=1).wait(progress=False, timeout_s=60),
            "nothing",
        ),
        (lambda client: client.evaluate(policy="nobody", env="metaworld/reach-v3"), "nobody"),
        (
            lambda client: client.create_policy("y", dataset="toy", backbone=BACKBONE, head="otf"),
            "otf",
        ),
    ],
)
def test_what_does_not_exist_is_named(
    client: Client, dataset: str, ask: Callable[[Client], object], sentence: str
) -> None:
    with pytest.raises(JoyNexusError, match=sentence) as refused:
        ask(client)
    assert refused.value.failure.category == "user"


def test_robots_key_may_act_and_nothing_else(client: Client, cluster: LocalCluster, undisturbed: list[float]) -> None:
    from joynexus.keyring import Keyring

    file = Keyring(cluster.keys).issue("arm", tenant="default", scope="act")
    with joynexus.connect(file) as robot:
        assert robot.policy("undisturbed").act(*observation()).version == 2
        with pytest.raises(JoyNexusError) as refused:
            robot.sft(policy="mine", dataset="toy", steps=1)
        assert refused.value.code == "FORBIDDEN"
        Keyring(cluster.keys).registry.revoke("arm")
        with pytest.raises(JoyNexusError):
            robot.policy("undisturbed").act(*observation(), timeout_s=5)


def test_other_tenant_sees_nothing(client: Client, cluster: LocalCluster, undisturbed: list[float]) -> None:
    from joynexus.keyring import Keyring

    file = Keyring(cluster.keys).issue("stranger", tenant="stranger")
    with joynexus.connect(file) as stranger:
        assert stranger.policies() == ()
        assert stranger.jobs() == ()
        with pytest.raises(JoyNexusError) as foreign:
            stranger.policy("undisturbed").info()
        with pytest.raises(JoyNexusError) as absent:
            stranger.policy("no-such-thing").info()
    assert str(foreign.value).replace("undisturbed", "X") == str(absent.value).replace("no-such-thing", "X")
