"""A gymnasium environment as a simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from joynexus.contract import Camera
from joynexus.simulation.gymnasium_env import GymnasiumSimulator
from joynexus.simulation.interface import SimulatorOptions

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces


class Reach(gymnasium.Env):  # type: ignore[misc]  # gymnasium ships no types
    """Solved at the third step; ends by itself at the fifth."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
    instruction = "reach it"

    def __init__(self, action_space: Any = None, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Dict(
            {
                "speed": spaces.Box(-1, 1, (1,), np.float64),
                "joints": spaces.Box(-1, 1, (2,), np.float32),
                "eye": spaces.Box(0, 255, (3, 5, 3), np.uint8),
            }
        )
        self.action_space = action_space or spaces.Box(-2.0, 2.0, (2, 1), np.float32)
        self.render_mode = render_mode
        self.actions: list[np.ndarray] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps, self._start = 0, self.np_random.uniform(-1, 1, 2)
        return self._see(), {}

    def step(self, action: np.ndarray) -> Any:
        self.actions.append(action)
        self._steps += 1
        return self._see(), 1.5, self._steps == 5, False, {"is_success": self._steps == 3}

    def render(self) -> np.ndarray:
        return np.full((4, 4, 3), self._steps, np.uint8)

    def _see(self) -> dict[str, np.ndarray]:
        eye = np.full((3, 5, 3), 7, np.uint8)
        return {"speed": np.array([self._steps / 10]), "joints": self._start.astype(np.float32), "eye": eye}


def options(**fields: Any) -> SimulatorOptions:
    return SimulatorOptions(**{"episode_limit": 10, **fields})


def test_contract_comes_from_the_spaces() -> None:
    contract = GymnasiumSimulator(Reach(), options()).contract
    assert (contract.robot, contract.rate_hz, contract.episode_limit) == ("Reach", 20.0, 10)
    assert (contract.state_dim, contract.state_names) == (3, ("joints[0]", "joints[1]", "speed"))
    assert (contract.action_dim, contract.action_low, contract.action_high) == (2, (-2.0, -2.0), (2.0, 2.0))
    assert contract.cameras == (Camera(name="eye", height=3, width=5),)
    endless = Reach(spaces.Box(-np.inf, np.inf, (1,)))
    assert GymnasiumSimulator(endless, options()).contract.action_low == ()


def test_same_seed_gives_the_same_episode() -> None:
    one, other = GymnasiumSimulator(Reach(), options()), GymnasiumSimulator(Reach(), options())
    assert np.array_equal(one.reset(5).state, other.reset(5).state)
    assert not np.array_equal(one.reset(5).state, other.reset(6).state)


def test_actions_are_clipped_and_have_the_environments_shape() -> None:
    env = Reach()
    simulator = GymnasiumSimulator(env, options())
    simulator.reset(0)
    simulator.step_chunk(np.array([[9.0, -9.0]], np.float32))
    assert np.array_equal(env.actions[0], [[2.0], [-2.0]])


def test_success_in_the_info_ends_an_episode_if_that_was_asked() -> None:
    for end, steps in ((True, 3), (False, 5)):
        simulator = GymnasiumSimulator(Reach(), options(end_at_success=end))
        simulator.reset(0)
        result = simulator.step_chunk(np.zeros((9, 2), np.float32))
        assert (result.steps, result.success, result.done, result.terminated) == (steps, True, True, True)
        with pytest.raises(ValueError, match="reset the simulator"):
            simulator.step_chunk(np.zeros((1, 2), np.float32))


def test_limit_cuts_an_episode_off() -> None:
    simulator = GymnasiumSimulator(Reach(), options(episode_limit=2))
    simulator.reset(0)
    result = simulator.step_chunk(np.zeros((9, 2), np.float32))
    assert (result.steps, result.done, result.terminated) == (2, True, False)


def test_pictures_are_those_that_were_chosen() -> None:
    painted = Camera(name="render", height=4, width=4)
    simulator = GymnasiumSimulator(Reach(render_mode="rgb_array"), options(cameras=(painted,)))
    assert [image.shape for image in simulator.reset(0).images] == [(4, 4, 3)]
    assert GymnasiumSimulator(Reach(), options(cameras=())).reset(0).images == ()
    with pytest.raises(ValueError, match=r"no camera 'render' of 4x4 .* it has eye \(3x5\)"):
        GymnasiumSimulator(Reach(), options(cameras=(painted,)))


@pytest.mark.parametrize(
    ("part", "shown", "sentence"),
    [
        ("joints", np.zeros(3, np.float32), "it shows 4 numbers, its observation space has 3"),
        ("eye", np.zeros((5, 3, 3), np.uint8), "'eye' is a picture of \\(5, 3, 3\\), which its space contradicts"),
    ],
)
def test_an_observation_that_contradicts_its_space_reaches_no_policy(
    monkeypatch: pytest.MonkeyPatch, part: str, shown: np.ndarray, sentence: str
) -> None:
    env = Reach()
    simulator, see = GymnasiumSimulator(env, options()), env._see
    simulator.reset(0)
    monkeypatch.setattr(env, "_see", lambda: see() | {part: shown})
    with pytest.raises(ValueError, match=sentence):
        simulator.step_chunk(np.zeros((1, 2), np.float32))


def test_spaces_that_are_no_boxes_are_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="actions of Reach are a Discrete: they must be a Box"):
        GymnasiumSimulator(Reach(spaces.Discrete(3)), options())
    env = Reach()
    env.observation_space = spaces.Discrete(4)
    with pytest.raises(ValueError, match="the observation of Reach is a Discrete: it must be a Box"):
        GymnasiumSimulator(env, options())


def test_pendulum_runs_to_its_own_limit() -> None:
    simulator = GymnasiumSimulator(gymnasium.make("Pendulum-v1"), SimulatorOptions())
    assert (simulator.contract.robot, simulator.contract.episode_limit) == ("Pendulum-v1", 200)
    assert simulator.instruction == "control Pendulum-v1"
    simulator.reset(1)
    result = simulator.step_chunk(np.zeros((300, 1), np.float32))
    assert (result.steps, result.done, result.terminated, result.success) == (200, True, False, False)
