"""Promises of the MetaWorld environments: seeds decide everything, pictures are drawn when needed, contracts hold."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("metaworld")

from joynexus.contract import Camera
from joynexus.simulation.interface import SimObservation, SimulatorError, SimulatorOptions, StepResult
from services.env.simulators import metaworld, rendering
from services.env.simulators.metaworld import MetaWorld, expert
from services.env.simulators.metaworld_tasks import INSTRUCTIONS
from services.env.simulators.metaworld_tasks import contract as metaworld_contract
from services.env.simulators.registry import make_simulator, open_pool

BLIND = SimulatorOptions(cameras=())
PUSH = np.tile(np.array([0.3, -0.2, 0.1, 0.5], np.float32), (8, 1))
pytestmark = pytest.mark.slow


def make(task: str = "reach-v3", options: SimulatorOptions = BLIND) -> MetaWorld:
    simulator = make_simulator(f"metaworld/{task}", options)
    assert isinstance(simulator, MetaWorld)
    return simulator


def trajectory(simulator: MetaWorld, seed: int, chunks: int = 3, render: bool = False) -> np.ndarray:
    states = [simulator.reset(seed, render=render).state]
    states += [simulator.step_chunk(PUSH, render=render).observation.state for _ in range(chunks)]
    return np.array(states)


def test_a_seed_gives_the_same_episode_whatever_came_before_and_whoever_draws() -> None:
    one, other = make(), make()
    first = trajectory(one, 3)
    trajectory(one, 4)
    assert np.array_equal(trajectory(one, 3), first)
    assert np.array_equal(trajectory(other, 3), first)
    assert np.array_equal(trajectory(make(options=SimulatorOptions()), 3, render=True), first)


def test_seeds_differ_in_their_goals() -> None:
    """MetaWorld ignores `reset(seed=...)` and freezes the goal of goal-observable tasks: all seeds would be alike."""
    simulator = make()
    goals = np.array([simulator.reset(seed).state[-3:] for seed in range(8)])
    assert len(np.unique(goals, axis=0)) == 8


def test_pictures_are_the_same_for_the_same_seed_and_upright() -> None:
    options = SimulatorOptions(cameras=(Camera(name="corner2", height=32, width=32, rotation_deg=180),))
    one, other = make(options=options), make(options=options)
    (picture,) = one.reset(5).images
    assert (picture.shape, picture.dtype) == ((32, 32, 3), np.uint8)
    one.step_chunk(PUSH)
    assert np.array_equal(one.reset(5).images[0], picture)
    assert np.array_equal(other.reset(5).images[0], picture)
    assert not np.array_equal(other.reset(6).images[0], picture)
    floor, wall = picture[20:24, 26:].mean(), picture[:6].mean()
    assert floor > wall + 20, "the light floor is below the grey wall"
    turned = make(options=SimulatorOptions(cameras=(Camera(name="corner2", height=32, width=32),)))
    assert np.array_equal(turned.reset(5).images[0], picture[::-1, ::-1])


def test_several_cameras_come_in_the_contracts_order_and_sizes() -> None:
    cameras = (
        Camera(name="gripperPOV", height=24, width=40, rotation_deg=90),
        Camera(name="corner2", height=16, width=16, rotation_deg=180),
    )
    observation = make(options=SimulatorOptions(cameras=cameras)).reset(0)
    assert [image.shape for image in observation.images] == [(24, 40, 3), (16, 16, 3)]
    assert all(image.std() > 5 for image in observation.images)


def test_nothing_is_drawn_that_nobody_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    real = metaworld._Painter.draw
    monkeypatch.setattr(metaworld._Painter, "draw", lambda self, *a: (drawn.append(a[0]), real(self, *a))[1])
    simulator = make(options=SimulatorOptions(episode_limit=10))
    simulator.reset(0, render=False)
    assert drawn == []
    result = simulator.step_chunk(PUSH)
    assert (len(drawn), len(result.observation.images)) == (1, 1)  # one for eight steps
    result = simulator.step_chunk(PUSH)
    assert (result.done, result.observation.images, len(drawn)) == (True, (), 1)  # none for an ended episode
    simulator.reset(0, render=False)
    frames = simulator.step_chunk(PUSH, render=False, record=True).frames
    assert [frame.shape for frame in frames] == [(256, 256, 3)] * 8


def test_an_episode_ends_at_its_limit_or_by_success_and_not_later() -> None:
    simulator = make(options=SimulatorOptions(cameras=(), episode_limit=10))
    simulator.reset(0)
    first, last = simulator.step_chunk(PUSH), simulator.step_chunk(PUSH)
    assert (first.steps, first.success, first.done, first.terminated) == (8, False, False, False)
    assert (last.steps, last.success, last.done, last.terminated) == (2, False, True, False)
    with pytest.raises(ValueError, match="has ended"):
        simulator.step_chunk(PUSH)
    act, simulator = expert("reach-v3"), make()
    state = simulator.reset(0).state
    while not (result := simulator.step_chunk(act(state)[None])).done:
        state = result.observation.state
    assert result.success
    assert result.terminated
    with pytest.raises(ValueError, match="has ended"):
        simulator.step_chunk(PUSH)


def test_success_need_not_end_an_episode() -> None:
    """Who is paid for each step must be able to go on being paid."""
    act, simulator = expert("reach-v3"), make(options=SimulatorOptions(cameras=(), end_at_success=False))
    state, results = simulator.reset(0).state, []
    while not results or not results[-1].done:
        results.append(simulator.step_chunk(act(state)[None]))
        state = results[-1].observation.state
    assert len(results) == simulator.contract.episode_limit
    assert any(result.success for result in results[:-10]), "solved long before the limit"
    assert not any(result.terminated for result in results)


def test_the_last_moment_is_drawn_for_whoever_asks_for_it() -> None:
    simulator = make(options=SimulatorOptions(episode_limit=8))
    simulator.reset(0, render=False)
    seen = simulator.step_chunk(PUSH, render=False, final=True)
    assert (seen.done, seen.terminated, len(seen.observation.images)) == (True, False, 1)
    simulator.reset(0, render=False)
    assert simulator.step_chunk(PUSH[:4], render=False, final=True).observation.images == ()  # it goes on


def test_actions_that_make_no_sense_are_refused() -> None:
    simulator = make()
    simulator.reset(0)
    for bad in (np.zeros((4,)), np.zeros((2, 3)), np.zeros((0, 4))):
        with pytest.raises(ValueError, match="actions have shape"):
            simulator.step_chunk(bad.astype(np.float32))
    with pytest.raises(ValueError, match="not finite"):
        simulator.step_chunk(PUSH * np.nan)


def test_actions_are_clipped_to_the_contracts_limits() -> None:
    simulator = make()
    simulator.reset(1)
    within = simulator.step_chunk(np.sign(PUSH)).observation.state
    simulator.reset(1)
    assert np.array_equal(simulator.step_chunk(PUSH * 100).observation.state, within)


def test_without_opengl_the_missing_package_is_named_and_states_still_work() -> None:
    script = (
        "from services.env.simulators.registry import make_simulator\n"
        "from joynexus.simulation.interface import SimulatorOptions\n"
        "print(make_simulator('metaworld/reach-v3', SimulatorOptions(cameras=())).reset(0).state.shape)\n"
        "try:\n    make_simulator('metaworld/reach-v3')\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "MUJOCO_GL": "disabled"},
        capture_output=True,
        text=True,
        check=True,
    )
    shape, error = run.stdout.strip().splitlines()
    assert shape == "(39,)"
    assert error == "SimulatorError no OpenGL library is installed to draw pictures with: install " + rendering.PACKAGES


def test_a_missing_simulator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "metaworld.env_dict", None)
    with pytest.raises(SimulatorError, match=r"pip install 'joynexus\[metaworld\]'"):
        MetaWorld("reach-v3", metaworld_contract(BLIND))


def test_all_fifty_tasks_follow_their_seeds() -> None:
    for task in INSTRUCTIONS:
        simulator = make(task)
        first = trajectory(simulator, 7, chunks=1)
        other = trajectory(simulator, 8, chunks=1)
        assert np.isfinite(first).all()
        assert first.shape == (2, simulator.contract.state_dim)
        assert not np.array_equal(first, other), f"{task} ignores its seed"
        assert np.array_equal(trajectory(simulator, 7, chunks=1), first), f"{task} remembers earlier episodes"
        simulator.close()


def test_worker_processes_give_the_same_episode_as_this_one() -> None:
    expected = make(options=SimulatorOptions()).reset(3)
    with open_pool("metaworld/reach-v3", 2) as pool:
        observations = pool.reset({0: 3, 1: 3})
        results = pool.step({0: PUSH, 1: PUSH}, render=False)
    states = trajectory(make(), 3, chunks=1)
    for row in (0, 1):
        observation, result = observations[row], results[row]
        assert isinstance(observation, SimObservation)
        assert isinstance(result, StepResult)
        assert np.array_equal(observation.state, expected.state)
        assert np.array_equal(observation.images[0], expected.images[0])
        assert np.array_equal(result.observation.state, states[1])
