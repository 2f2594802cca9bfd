"""Promises of gymnasium's environments: contract from the spaces, seeds decide, what cannot run is one sentence."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gymnasium")

from joynexus.contract import Camera
from joynexus.simulation.interface import SimObservation, Simulator, SimulatorError, SimulatorOptions, StepResult
from services.env.simulators import gymnasium as family
from services.env.simulators.registry import make_simulator, open_pool

PLUGIN = "tests.unit.env.gymnasium_plugin"
REACH = f"gymnasium/{PLUGIN}:Joy/Reach-v0"
RENDER = SimulatorOptions(cameras=(Camera(name="render", height=8, width=6),))


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(family.MODULES, f"other,{PLUGIN}")


def run(simulator: Simulator, seed: int, chunks: int = 3) -> np.ndarray:
    states = [simulator.reset(seed).state]
    chunk = np.full((4, simulator.contract.action_dim), 0.5, np.float32)
    states += [simulator.step_chunk(chunk).observation.state for _ in range(chunks)]
    return np.array(states)


def test_the_contract_comes_from_the_spaces_and_the_limit_from_the_registration() -> None:
    simulator = make_simulator("gymnasium/Pendulum-v1")
    contract = simulator.contract
    assert (contract.state_dim, contract.action_dim, contract.episode_limit) == (3, 1, 200)
    assert (contract.action_low, contract.action_high, contract.cameras) == ((-2.0,), (2.0,), ())
    assert simulator.instruction == "swing the pendulum up and hold it upright"
    assert np.array_equal(run(simulator, 3), run(make_simulator("gymnasium/Pendulum-v1"), 3))
    assert not np.array_equal(run(simulator, 3), run(simulator, 4))


def test_an_episode_may_be_longer_or_shorter_than_registered() -> None:
    for limit in (3, 300):
        simulator = make_simulator("gymnasium/Pendulum-v1", SimulatorOptions(episode_limit=limit))
        simulator.reset(0)
        result = simulator.step_chunk(np.zeros((400, 1), np.float32))
        assert (result.steps, result.done, result.terminated, result.success) == (limit, True, False, False)


def test_a_plug_in_says_what_it_is_and_when_it_is_solved() -> None:
    simulator = make_simulator(REACH, RENDER)
    contract = simulator.contract
    assert contract.state_names == ("place[0]", "place[1]", "velocity")
    assert (simulator.instruction, contract.rate_hz, contract.episode_limit) == ("go to the middle", 20.0, 5)
    seen = simulator.reset(1)
    assert [image.shape for image in seen.images] == [(8, 6, 3)]
    home = -seen.state[:2]
    result = simulator.step_chunk(np.stack([home.clip(-1, 1), home - home.clip(-1, 1), home]))
    assert (result.steps, result.success, result.done, result.terminated) == (2, True, True, True)
    on = make_simulator(REACH, SimulatorOptions(end_at_success=False))
    on.reset(1)
    result = on.step_chunk(np.stack([home.clip(-1, 1), home - home.clip(-1, 1), *np.zeros((3, 2), np.float32)]))
    assert (result.steps, result.success, result.done, result.terminated) == (5, True, True, False)


@pytest.mark.slow
def test_mujocos_environments_draw_in_the_size_that_is_asked_for() -> None:
    pytest.importorskip("mujoco")
    options = SimulatorOptions(cameras=(Camera(name="render", height=48, width=32),), episode_limit=9)
    simulator = make_simulator("gymnasium/Reacher-v5", options)
    (picture,) = simulator.reset(0).images
    assert (picture.shape, picture.dtype) == ((48, 32, 3), np.uint8)
    assert picture.std() > 5
    assert simulator.contract.episode_limit == 9
    simulator.close()


@pytest.mark.slow
def test_worker_processes_give_the_same_episode_as_this_one() -> None:
    expected = run(make_simulator(REACH), 7, chunks=1)
    with open_pool(REACH, 3, processes=2) as pool:
        assert pool.instruction == "go to the middle"
        observations = pool.reset({0: 7, 2: 7})
        results = pool.step({0: np.full((4, 2), 0.5, np.float32), 2: np.full((4, 2), 0.5, np.float32)})
    for row in (0, 2):
        observation, result = observations[row], results[row]
        assert isinstance(observation, SimObservation)
        assert isinstance(result, StepResult)
        assert np.array_equal([observation.state, result.observation.state], expected)


@pytest.mark.parametrize(
    ("task", "options", "error", "sentence"),
    [
        ("CartPole-v1", SimulatorOptions(), ValueError, "actions of CartPole-v1 are a Discrete"),
        (
            "Pendulun-v1",
            SimulatorOptions(),
            ValueError,
            "no environment 'Pendulun-v1' here: did you mean gymnasium/Pend",
        ),
        ("a b", SimulatorOptions(), ValueError, "'a b' is no id"),
        ("os:Thing-v0", SimulatorOptions(), ValueError, "does not import module 'os'.*joynexus env serve"),
        ("other:Thing-v0", SimulatorOptions(), SimulatorError, "cannot be imported: No module named 'other'"),
        (f"{PLUGIN}:Unlimited-v0", SimulatorOptions(), ValueError, "no limit of steps: give the job an episode_limit"),
        ("Pendulum-v1", SimulatorOptions(cameras=(Camera(name="eye", height=8, width=8),)), ValueError, "camera 'eye'"),
        (
            f"{PLUGIN}:Joy/Reach-v0",
            SimulatorOptions(cameras=(Camera(name="render", height=9, width=9),)),
            ValueError,
            r"render\(\) gives pictures of \(8, 6, 3\)",
        ),
    ],
)
def test_what_cannot_run_is_one_sentence(
    task: str, options: SimulatorOptions, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        make_simulator(f"gymnasium/{task}", options)
