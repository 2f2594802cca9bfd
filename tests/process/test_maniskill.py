"""ManiSkill through a whole cluster: demonstrations, SFT, RL and evaluation, by state and by picture.

Everything is small: what is asked is that the parts fit, not that two updates teach anything. What is collected is
compared with a plain loop over the same environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("mani_skill", reason="ManiSkill is not installed: make install-simulators")

import joynexus
from joynexus import Client, GrpoSpec, PpoSpec, RlPolicy, SftPolicy, launch
from joynexus.contract import Camera
from joynexus.seeds import derived_seed
from joynexus.simulation.asking import Answer, Asker, Explored
from joynexus.simulation.interface import Picture, SimulatorOptions
from joynexus.simulation.trajectories import Trajectories, unpack
from joynexus.simulation.work import options_of, run_rollout
from joynexus.wire.back import Collect, Rollout
from services.env.producers.demos import write_demonstrations
from services.env.simulators.maniskill import ManiSkillFamily
from services.env.simulators.registry import make_simulator, open_pool
from services.trainer.rl.experience import make_experience
from tests.process.clusters import running

Floats = npt.NDArray[np.float32]

CAMERAS = (Camera(name="base_camera", height=48, width=48),)
CHUNK, LIMIT = 8, 20
pytestmark = [
    pytest.mark.simulators,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(ManiSkillFamily().missing()), reason=ManiSkillFamily().missing()),
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    options = launch.Options(backbone="lite", simulator_processes=2)
    with (
        running(tmp_path_factory.mktemp("cluster"), options) as cluster,
        joynexus.connect(cluster.client_file) as client,
    ):
        yield client


@pytest.mark.parametrize("cameras", [(), CAMERAS], ids=["state", "rgb"])
@pytest.mark.parametrize("task", ["PickCube-v1", "PushCube-v1"])
def test_sft_then_rl_then_evaluation_of_one_policy(
    client: Client, tmp_path: Path, task: str, cameras: tuple[Camera, ...]
) -> None:
    env, name = f"maniskill/{task}", f"{task[:4].lower()}-{'rgb' if cameras else 'state'}"
    options = SimulatorOptions(cameras=cameras)
    seeds = write_demonstrations(tmp_path / "set", env, 2, options=options, processes=1)
    info = client.datasets.push(name, tmp_path / "set", progress=False)
    assert (info.state, info.episodes) == ("ready", len(seeds)), info.faults

    create = SftPolicy(chunk=CHUNK, seed=1)
    sft = client.sft(policy=name, dataset=name, steps=30, batch_size=8, create=create)
    losses = sft.wait(progress=False, timeout_s=300).losses
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])

    algorithm = PpoSpec(epochs=2, minibatch=8)
    fields: dict[str, Any] = {"episodes": 4, "episode_limit": LIMIT, "algorithm": algorithm}
    rl = client.rl(policy=name, env=env, updates=2, **fields).wait(progress=False, timeout_s=600)
    assert [(point.update, point.episodes, point.steps) for point in rl.updates] == [(u, 4, 4 * LIMIT) for u in (0, 1)]
    assert [point.version for point in rl.updates] == [rl.initial_version + 1, rl.initial_version + 2]
    assert all(0 < point.reward < LIMIT and point.staleness == 0 for point in rl.updates)
    assert all(np.isfinite(list(point.metrics.values())).all() for point in rl.updates)

    def evaluate() -> list[tuple[int, bool, float]]:
        job = client.evaluate(policy=name, env=env, episodes=3, episode_limit=LIMIT, videos=1 if cameras else 0)
        result = job.wait(progress=False, timeout_s=300).evaluation
        assert result is not None
        assert {"mani-skill", "sapien", "renderer"} <= set(result.software)
        assert [bool(episode.video) for episode in result.results] == [bool(cameras), False, False]
        return [(episode.seed, episode.success, episode.reward) for episode in result.results]

    table = evaluate()
    assert [seed for seed, _, _ in table] == [0, 1, 2]
    assert evaluate() == table


def test_grpo_makes_a_policy_for_a_task_that_had_none(client: Client) -> None:
    create = RlPolicy(chunk=CHUNK, seed=2)
    fields: dict[str, Any] = {"episodes": 4, "episode_limit": LIMIT, "warmup_episodes": 2, "create": create}
    algorithm = GrpoSpec(group_size=2, epochs=1, minibatch=8, filter_low=-1e6, filter_high=1e6)
    job = client.rl(policy="fresh", env="maniskill/PushCube-v1", updates=1, algorithm=algorithm, **fields)
    (point,) = job.wait(progress=False, timeout_s=300).updates
    assert (point.episodes, point.metrics["groups"], point.metrics["groups_kept"]) == (4, 2, 2)
    contract = client.policy("fresh").info().spec.contract
    assert (contract.robot, contract.control_mode) == ("panda", "pd_ee_delta_pose")


def drawn(state: Floats, seed: int) -> tuple[Floats, Floats, Floats]:
    """A policy without a network: action, log-probability and value of one row, from its state and seed alone."""
    action = np.random.default_rng(seed).uniform(-1, 1, (CHUNK, 7)).astype(np.float32)
    return action, -np.square(action), state[:1] + action[0, :1]


class PlainAsker(Asker):
    """Answers without a master."""

    def __init__(self) -> None:
        pass

    def __call__(
        self, states: Floats, images: Sequence[Any], instructions: Sequence[str], seeds: Sequence[int]
    ) -> Answer:
        assert set(instructions) == {"pick up the red cube and move it to the goal"}
        rows = [drawn(state, seed) for state, seed in zip(states, seeds, strict=True)]
        action, log_prob, value = (np.stack(part) for part in zip(*rows, strict=True))
        return Answer(5, action, Explored(action, log_prob, value, tuple(f"{seed:x}" for seed in seeds)))


class Kept:
    """Keeps what is put."""

    def __init__(self) -> None:
        self.blobs: list[bytes] = []

    def put_bytes(self, data: bytes) -> str:
        self.blobs.append(data)
        return "0"

    def put_video(self, frames: tuple[Picture, ...], fps: float) -> tuple[str, int]:
        raise AssertionError("nobody asked for a video")


@pytest.fixture(scope="module")
def collected() -> Trajectories:
    """Three episodes of a pool, two of them from one start; the last chunk of each is cut short by the limit."""
    simulator = make_simulator("maniskill/PickCube-v1", SimulatorOptions(cameras=()))
    message = Rollout(
        task="t",
        attempt=1,
        tenant="a",
        policy="p",
        version=5,
        contract=simulator.contract,
        chunk=CHUNK,
        env="maniskill/PickCube-v1",
        seeds=(4, 4, 5),
        draws=(11, 12, 13),
        episode_limit=LIMIT,
        collect=Collect(reward="dense", value=True),
    )
    kept = Kept()
    with open_pool(message.env, 2, processes=2, options=options_of(message)) as pool:
        done = run_rollout(message, pool, PlainAsker(), kept, software={})
    assert done.error is None
    return unpack(kept.blobs[0])


def test_what_is_collected_is_what_a_plain_loop_sees(collected: Trajectories) -> None:
    options = SimulatorOptions(cameras=(), episode_limit=LIMIT, end_at_success=False)
    simulator = make_simulator("maniskill/PickCube-v1", options)
    state, sample, log_prob, value, rewards, executed, last = ([] for _ in range(7))
    for seed, draw in ((4, 11), (4, 12), (5, 13)):
        seen, step, done = simulator.reset(seed).state, 0, False
        while not done:
            action, chances, worth = drawn(seen, derived_seed("rollout", draw, step))
            result = simulator.step_chunk(action)
            state.append(seen)
            sample.append(action)
            log_prob.append(chances)
            value.append(worth)
            executed.append(result.steps)
            rewards.append(np.pad(result.rewards, (0, CHUNK - result.steps)))
            seen, step, done = result.observation.state, step + result.steps, result.done
        last.append(drawn(seen, derived_seed("rollout", draw, step))[2])
    assert collected.version == 5
    assert collected.lengths.tolist() == [3, 3, 3]
    assert (collected.seeds.tolist(), collected.draws.tolist()) == ([4, 4, 5], [11, 12, 13])
    assert collected.executed.tolist() == executed == [8, 8, 4] * 3
    for name, plain in (("state", state), ("sample", sample), ("log_prob", log_prob), ("value", value)):
        assert np.array_equal(getattr(collected, name), np.stack(plain)), name
    assert np.array_equal(collected.rewards, np.stack(rewards))
    assert np.array_equal(collected.last_value, np.stack(last))
    assert not collected.terminated.any()


def test_advantages_and_masks_are_those_of_a_plain_loop(collected: Trajectories) -> None:
    algorithm = PpoSpec(level="chunk", gamma=0.9, lam=0.8)
    experience = make_experience(collected, algorithm, 1.0)
    expected: list[float] = []
    for episode in range(3):
        rows = range(3 * episode, 3 * episode + 3)
        paid = [float(collected.rewards[row].astype(np.float64).sum()) for row in rows]
        worth = [float(collected.value[row, 0]) for row in rows] + [float(collected.last_value[episode, 0])]
        surprise = [paid[t] + 0.9 * worth[t + 1] - worth[t] for t in range(3)]
        expected += [sum((0.9 * 0.8) ** (k - t) * surprise[k] for k in range(t, 3)) for t in range(3)]
    scaled = (np.array(expected) - np.mean(expected)) / (np.std(expected, ddof=1) + 1e-8)
    assert np.allclose(experience.advantage[:, 0], scaled, rtol=1e-5)
    assert np.allclose(experience.returns[:, 0], np.array(expected) + collected.value[:, 0], rtol=1e-5)
    assert experience.mask.tolist() == [[1.0]] * 9
    assert experience.executed.sum(1).tolist() == [8, 8, 4] * 3
    counted = [collected.log_prob[row, : collected.executed[row]].sum() for row in range(9)]
    assert np.allclose(experience.log_prob[:, 0], counted, rtol=1e-5)
