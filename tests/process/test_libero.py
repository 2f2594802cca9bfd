"""LIBERO through a whole cluster: demonstrations in both formats train one policy, which is evaluated with pictures.

Pictures are what costs: two take a quarter of a second on one core here, whatever their size. So the demonstrations are
the first steps of the expert's episodes, and episodes of the evaluation end after two chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("libero", reason="LIBERO is not installed: make install-simulators")

import joynexus
from joynexus import Client, Job, SftPolicy, launch
from joynexus.contract import Camera
from joynexus.seeds import derived_seed
from joynexus.simulation.interface import SimulatorOptions
from joynexus.wire import Message
from joynexus.wire.arrays import ArrayPacker
from joynexus.wire.back import Rollout, RolloutDone, WorkerAct
from joynexus.wire.front import Act, Actions
from services.env.datasets.libero_writer import LiberoWriter
from services.env.datasets.writer import LeRobotWriter
from services.env.producers.libero_demos import LiberoExpert
from services.env.simulators import libero_tasks
from services.env.simulators.libero import LiberoFamily
from tests.process.clusters import running
from tests.process.fake_master import FakeMaster
from tests.process.test_env import env_process

TASK = "libero/libero_object/0"
CAMERAS = tuple(Camera(name=n, height=64, width=64, rotation_deg=180) for n in libero_tasks.CAMERA_NAMES)
CHUNK, STEPS = 8, 24
pytestmark = [
    pytest.mark.simulators,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(LiberoFamily().missing()), reason=LiberoFamily().missing()),
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    options = launch.Options(backbone="lite", simulator_processes=1)
    with (
        running(tmp_path_factory.mktemp("cluster"), options) as cluster,
        joynexus.connect(cluster.client_file) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The first steps of two of the expert's episodes, as LIBERO's HDF5 and as LeRobot's set."""
    folder = tmp_path_factory.mktemp("demonstrations")
    folders = {"hdf5": folder / "hdf5", "lerobot": folder / "lerobot"}
    with (
        LiberoExpert(TASK, SimulatorOptions(cameras=CAMERAS), 1) as expert,
        LiberoWriter(folders["hdf5"], expert.contract, expert.describe()) as hdf5,
        LeRobotWriter(folders["lerobot"], 20.0, expert.contract, video=False) as lerobot,
    ):
        for attempt in expert.attempt((10, 11)):
            episode = expert.play(attempt._replace(actions=attempt.actions[:STEPS]))
            hdf5.add_episode(episode)
            images = {camera.name: pictures for camera, pictures in zip(CAMERAS, episode.images, strict=True)}
            lerobot.add_episode(episode.states, episode.actions, images, expert.instruction)
    return folders


@pytest.fixture(scope="module")
def trained(client: Client, demonstrations: dict[str, Path]) -> dict[str, Job]:
    """A job for each format, both done."""
    jobs = {}
    for kind, folder in demonstrations.items():
        info = client.datasets.push(kind, folder, progress=False)
        assert info.state == "ready", info.faults
        assert info.steps == 2 * STEPS
        create = SftPolicy(chunk=CHUNK, seed=1)
        jobs[kind] = client.sft(policy=kind, dataset=kind, steps=30, batch_size=8, create=create)
    for job in jobs.values():
        job.wait(progress=False, timeout_s=600)
    return jobs


def test_both_formats_train_a_policy_with_the_same_losses(trained: dict[str, Job]) -> None:
    losses = trained["hdf5"].losses
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    assert trained["lerobot"].losses == losses


def test_ten_fixed_initial_states_are_evaluated_with_both_cameras(client: Client, trained: dict[str, Job]) -> None:
    def evaluate() -> Job:
        return client.evaluate(policy="hdf5", env=TASK, episodes=10, episode_limit=2 * CHUNK, videos=1)

    result = evaluate().wait(progress=False, timeout_s=600).evaluation
    assert result is not None
    assert [episode.seed for episode in result.results] == list(range(10))
    assert {episode.steps for episode in result.results} == {2 * CHUNK}
    assert {episode.failure for episode in result.results} == {"limit"}
    assert [bool(episode.video) for episode in result.results] == [True] + [False] * 9
    assert result.software["libero_initial_state"] == "seed modulo 50"
    assert {"robosuite", "mujoco", "renderer"} <= set(result.software)


def test_what_demonstrations_state_is_the_simulators_contract(client: Client, trained: dict[str, Job]) -> None:
    """Orientation, gripper and rotation among it: they are compared before a policy acts."""
    expected = libero_tasks.contract("libero_object/0", SimulatorOptions(cameras=CAMERAS))
    for kind in trained:
        assert client.policy(kind).info().spec.contract == expected


def test_the_scripted_oracle_solves_four_of_five_episodes_of_the_env_service(tmp_path: Path) -> None:
    """It is told where things are, which no policy is: what it does is found out beforehand, and answered here."""
    with LiberoExpert(TASK, SimulatorOptions(cameras=()), 1) as expert:
        contract, attempts = expert.contract, expert.attempt(range(5))
    limit = contract.episode_limit
    said = {
        derived_seed("rollout", attempt.seed, step): attempt.actions[step : step + CHUNK]
        for attempt in attempts
        for step in range(0, len(attempt.actions), CHUNK)
    }
    page = Rollout(
        task="r1",
        attempt=1,
        tenant="a",
        policy="oracle",
        version=1,
        contract=contract,
        chunk=CHUNK,
        env=TASK,
        seeds=tuple(range(5)),
    )
    with FakeMaster(tmp_path) as master, env_process(master):
        master.give(page)
        for _ in range(5 * limit):
            packet = master.expect(Message, timeout_s=300)
            if isinstance(packet.message, RolloutDone):
                break
            assert isinstance(packet.message, WorkerAct)
            act = msgspec.msgpack.decode(packet.message.act, type=Act)
            packer = ArrayPacker()
            chunks = [np.pad(said[seed], ((0, CHUNK - len(said[seed])), (0, 0)), mode="edge") for seed in act.seeds]
            master.give(Actions(version=1, actions=packer.add(np.stack(chunks))), packer.buffers, re=packet.header.id)
    done = packet.message
    assert isinstance(done, RolloutDone)
    assert done.error is None, done.error
    assert [(e.success, e.steps) for e in done.episodes] == [(a.success, len(a.actions)) for a in attempts]
    assert sum(episode.success for episode in done.episodes) >= 4
