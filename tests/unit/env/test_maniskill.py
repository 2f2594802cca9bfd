"""Promises of the ManiSkill environments: seeds decide everything, conventions hold, pictures only when needed."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("mani_skill", reason="ManiSkill is not installed: make install-simulators")

from common.blobs import BlobStore
from common.prepared import PreparedDataset
from joynexus.contract import Camera
from joynexus.simulation.interface import SimObservation, SimulatorError, SimulatorOptions, StepResult
from services.env.datasets.prepare import prepare_dataset
from services.env.producers.demos import write_demonstrations
from services.env.simulators.maniskill import ManiSkill, ManiSkillFamily
from services.env.simulators.maniskill_tasks import TASKS
from services.env.simulators.registry import make_simulator, open_pool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.simulators,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(ManiSkillFamily().missing()), reason=ManiSkillFamily().missing()),
    pytest.mark.filterwarnings("ignore"),  # SAPIEN's and gymnasium's
]
BLIND = SimulatorOptions(cameras=())
GOING_ON = SimulatorOptions(cameras=(), end_at_success=False)
SMALL = SimulatorOptions(cameras=(Camera(name="base_camera", height=32, width=48),))
States = npt.NDArray[np.float32]


def make(task: str, options: SimulatorOptions = BLIND) -> ManiSkill:
    simulator = make_simulator(f"maniskill/{task}", options)
    assert isinstance(simulator, ManiSkill)
    return simulator


@pytest.fixture(scope="module")
def push() -> Iterator[ManiSkill]:
    """The cube stands in front of the gripper."""
    simulator = make("PushCube-v1", GOING_ON)
    yield simulator
    simulator.close()


@pytest.fixture(scope="module")
def seen() -> Iterator[ManiSkill]:
    """With a small picture."""
    simulator = make("PickCube-v1", SMALL)
    yield simulator
    simulator.close()


def move(simulator: ManiSkill, steps: int, **sizes: float) -> npt.NDArray[np.float32]:
    """The same action `steps` times: `ee_dx=1.0` and so on, the gripper closed."""
    names = simulator.contract.action_names
    action = [sizes.get(name, -1.0 if name == "gripper" else 0.0) for name in names]
    return np.tile(np.array(action, np.float32), (steps, 1))


def part(simulator: ManiSkill, state: States, name: str) -> States:
    """The numbers of a state whose names begin so."""
    return state[[i for i, other in enumerate(simulator.contract.state_names) if other.startswith(name)]]


def trajectory(simulator: ManiSkill, seed: int) -> States:
    """Behind the cube, down to it, and into it: contacts are what a simulator might remember."""
    states = [simulator.reset(seed).state]
    cube = part(simulator, states[0], "obj_pose_")[:3]
    for offset, steps in (((-0.12, 0.0, 0.1), 12), ((-0.12, 0.0, 0.0), 8), ((0.1, 0.0, 0.0), 12)):
        for _ in range(steps):
            way = cube + np.array(offset, np.float32) - part(simulator, states[-1], "tcp_pose_")[:3]
            x, y, z = np.clip(way / 0.1, -1, 1).tolist()
            chunk = move(simulator, 1, ee_dx=x, ee_dy=y, ee_dz=z)
            states.append(simulator.step_chunk(chunk, render=False).observation.state)
    return np.array(states)


def test_a_seed_gives_the_same_episode_whatever_was_touched_before(push: ManiSkill) -> None:
    first = trajectory(make("PushCube-v1", GOING_ON), 3)
    trajectory(push, 4)
    assert np.array_equal(trajectory(push, 3), first)
    assert not np.array_equal(trajectory(push, 4), first)
    cube = part(push, first[-1], "obj_pose_")[:3] - part(push, first[0], "obj_pose_")[:3]
    assert np.linalg.norm(cube) > 0.01, "the cube was pushed: the test is about contacts"


def test_conventions_are_as_the_contract_states(push: ManiSkill) -> None:
    contract = push.contract
    assert (contract.robot, contract.control_mode, contract.rate_hz) == ("panda", "pd_ee_delta_pose", 20.0)
    assert (contract.episode_limit, contract.gripper) == (50, "-1_close_+1_open")
    assert (contract.action_low, contract.action_high) == ((-1.0,) * 7, (1.0,) * 7)
    assert len(contract.state_names) == contract.state_dim

    def moved(name: str, steps: int = 4, **sizes: float) -> States:
        before = part(push, push.reset(0).state, name)
        return part(push, push.step_chunk(move(push, steps, **sizes)).observation.state, name) - before

    for axis, name in enumerate(("ee_dx", "ee_dy", "ee_dz")):
        change = moved("tcp_pose_", **{name: 0.3})[:3]
        assert change[axis] > 0.03
        assert abs(np.delete(change, axis)).max() < 0.02
    assert moved("qpos_", gripper=1.0)[7:].min() > moved("qpos_", gripper=-1.0)[7:].max() + 0.02, "+1 opens"


def test_an_action_of_one_turns_by_minus_a_tenth_of_a_radian(push: ManiSkill) -> None:
    assert push.contract.rotation == "action:-0.1*euler_xyz_base,state:quat_wxyz"
    before = part(push, push.reset(0).state, "tcp_pose_q").astype(np.float64)
    after = part(push, push.step_chunk(move(push, 10, ee_rz=0.5)).observation.state, "tcp_pose_q").astype(np.float64)
    # The rotation about the base's z axis is the vector part of after * before^-1.
    angle = 2 * np.arcsin(after[3] * before[0] - after[0] * before[3] - after[1] * before[2] + after[2] * before[1])
    assert -0.5 < angle < -0.1, "ten times -0.05 rad, less what the arm lags behind"


def test_an_episode_ends_at_its_limit_and_not_later() -> None:
    simulator = make("PushCube-v1", SimulatorOptions(cameras=(), episode_limit=10))
    simulator.reset(0)
    still = move(simulator, 8)
    first, last = simulator.step_chunk(still), simulator.step_chunk(still)
    assert (first.steps, first.success, first.done, first.terminated) == (8, False, False, False)
    assert (last.steps, last.success, last.done, last.terminated) == (2, False, True, False)
    assert first.rewards.dtype == np.float32
    assert 0 < first.rewards.mean() < 1, "the normalised dense reward"
    with pytest.raises(ValueError, match="has ended"):
        simulator.step_chunk(still)
    with pytest.raises(ValueError, match="actions have shape"):
        simulator.step_chunk(still[:, :4])


def test_what_a_policy_sees_depends_on_its_cameras(push: ManiSkill, seen: ManiSkill) -> None:
    assert any(name.startswith("obj_pose") for name in push.contract.state_names)
    assert not any(name.startswith("obj_pose") for name in seen.contract.state_names)
    assert push.reset(0).images == ()
    (picture,) = seen.reset(0).images
    assert (picture.shape, picture.dtype) == ((32, 48, 3), np.uint8)
    assert seen.contract.rendering == ("shader=minimal", "shadows=off")


def test_pictures_are_the_same_for_the_same_seed(seen: ManiSkill) -> None:
    (picture,) = seen.reset(5).images
    moved = seen.step_chunk(move(seen, 8, ee_dz=-0.5)).observation.images[0]
    assert not np.array_equal(moved, picture)
    assert np.array_equal(seen.reset(5).images[0], picture)
    assert np.array_equal(seen.step_chunk(move(seen, 8, ee_dz=-0.5)).observation.images[0], moved)
    assert not np.array_equal(seen.reset(6).images[0], picture)


def test_nothing_is_drawn_that_nobody_needs(seen: ManiSkill, monkeypatch: pytest.MonkeyPatch) -> None:
    from mani_skill.sensors.camera import Camera as Sensor

    drawn: list[int] = []
    real = Sensor.capture
    monkeypatch.setattr(Sensor, "capture", lambda self: (drawn.append(1), real(self))[1])
    seen.reset(0, render=False)
    assert drawn == []
    assert len(seen.step_chunk(move(seen, 8)).observation.images) == len(drawn) == 1  # one for eight steps
    seen.reset(0, render=False)
    frames = seen.step_chunk(move(seen, 3), render=False, record=True).frames
    assert [frame.shape for frame in frames] == [(170, 256, 3)] * 3
    assert len(drawn) == 4


def test_several_cameras_come_in_the_contracts_order_and_turned() -> None:
    cameras = (
        Camera(name="hand_camera", height=40, width=24, rotation_deg=90),
        Camera(name="base_camera", height=16, width=16),
    )
    observation = make("StackCube-v1", SimulatorOptions(cameras=cameras)).reset(0)
    assert [image.shape for image in observation.images] == [(40, 24, 3), (16, 16, 3)]
    assert all(image.std() > 5 for image in observation.images)
    with pytest.raises(ValueError, match="no camera 'front': use base_camera or hand_camera"):
        make("StackCube-v1", SimulatorOptions(cameras=(Camera(name="front", height=16, width=16),)))


def test_what_must_be_downloaded_is_named_and_nobody_is_asked() -> None:
    for task, entry in TASKS.items():
        if entry.assets:
            with pytest.raises(SimulatorError, match=f"download_asset {entry.assets[0]}"):
                make(task)


def test_every_task_that_needs_no_download_follows_its_seeds() -> None:
    for task, entry in TASKS.items():
        if entry.assets or entry.packages:
            continue
        simulator = make(task)
        size = simulator.contract.action_dim
        chunk = np.random.default_rng(1).uniform(-1, 1, (4, size)).astype(np.float32)

        def episode(seed: int, simulator: ManiSkill = simulator, chunk: States = chunk) -> States:
            start = simulator.reset(seed).state
            return np.stack([start, simulator.step_chunk(chunk).observation.state])

        first, other = episode(7), episode(8)
        assert np.isfinite(first).all()
        assert first.shape == (2, simulator.contract.state_dim) == (2, len(simulator.contract.state_names))
        assert len(simulator.contract.action_names) == size
        assert not np.array_equal(first, other), f"{task} ignores its seed"
        assert np.array_equal(episode(7), first), f"{task} remembers earlier episodes"
        assert tuple(simulator.environment._sensors) == entry.cameras
        simulator.close()


def test_a_worker_process_gives_the_same_episode_as_this_one(push: ManiSkill) -> None:
    chunk = move(push, 4, ee_dx=0.5)
    expected = push.reset(3), push.step_chunk(chunk).observation
    with open_pool("maniskill/PushCube-v1", 1, options=BLIND) as pool:
        observation, result = pool.reset({0: 3})[0], pool.step({0: chunk})[0]
        assert pool.contract == push.contract
    assert isinstance(observation, SimObservation)
    assert isinstance(result, StepResult)
    assert np.array_equal(observation.state, expected[0].state)
    assert np.array_equal(result.observation.state, expected[1].state)


@pytest.mark.parametrize("task", ["PickCube-v1", "PushCube-v1"])
def test_demonstrations_of_the_planner_replay_to_success(task: str, tmp_path: Path) -> None:
    seeds = write_demonstrations(tmp_path / "set", f"maniskill/{task}", 2, options=BLIND, processes=1)
    store = BlobStore(tmp_path / "blobs")
    manifest = prepare_dataset(tmp_path / "set", store)
    simulator = make(task, GOING_ON)
    assert manifest.contract == simulator.contract
    data, start = PreparedDataset(manifest, store.path), 0
    for seed, episode in zip(seeds, manifest.episodes, strict=True):
        batch = data.batch(range(start, start + episode.length), chunk=1)
        assert np.array_equal(batch.state[0], simulator.reset(seed).state)
        result = simulator.step_chunk(batch.action[:, 0], render=False)
        assert (result.success, result.steps, result.done) == (True, episode.length, False)
        more = simulator.step_chunk(move(simulator, 1))  # solved tasks go on where they do not end by that
        assert (more.steps, more.terminated) == (1, False)
        start += episode.length
    ending = make(task)
    ending.reset(seeds[0])
    actions = data.batch(range(manifest.episodes[0].length), chunk=1).action[:, 0]
    result = ending.step_chunk(actions)
    assert (result.success, result.done, result.terminated) == (True, True, True)
