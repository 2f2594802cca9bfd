"""Any `gymnasium.Env` as a simulator. Nothing of gymnasium is imported here: its interface is enough.

In: an environment whose observations and actions are boxes of numbers; pictures are boxes [H, W, 3] of uint8. Out: a
`Simulator` whose contract comes from the environment's spaces. Never: a guess about success: only `success` or
`is_success` in the step's info count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from joynexus.contract import Camera, Contract
from joynexus.simulation.interface import Picture, SimObservation, SimulatorOptions, StepResult, check_chunk

RENDER = "render"
"""Name of the camera that draws with `Env.render`, of environments made with `render_mode="rgb_array"`."""
_ONLY = ""  # key of an observation that is no dictionary
_SUCCESS = ("success", "is_success")


class GymnasiumSimulator:
    """One environment; see `Simulator`.

    Observations: one box, or a dictionary of boxes (taken in the order of their names): numbers end to end are the
    state, boxes [H, W, 3] of uint8 are cameras under their names.

    Args:
        env: the environment.
        options: cameras are those among the observations unless others are named; `render` is one where the environment
            was made with `render_mode="rgb_array"`.
        instruction: task text; empty takes `env.unwrapped.instruction`, or names the environment.

    Raises:
        ValueError: if its spaces are other ones, or the options ask for what it has not.
    """

    def __init__(self, env: Any, options: SimulatorOptions, instruction: str = "") -> None:
        self._env = env
        self._end_at_success = options.end_at_success
        spec = getattr(env, "spec", None)
        name = str(getattr(spec, "id", "") or type(env.unwrapped).__name__)
        boxes = _boxes(env.observation_space, name)
        self._pictures = {key: box for key, box in boxes.items() if _is_picture(box)}
        self._numbers = [key for key in boxes if key not in self._pictures]
        state_names = tuple(label for key in self._numbers for label in _labels(key, boxes[key]))
        low, high = _action_limits(env.action_space, name)
        limited = bool(np.isfinite(low).all() and np.isfinite(high).all())
        self._low, self._high = low, high
        self._action_shape = env.action_space.shape
        self._last: Any = None  # the newest observation
        self._steps, self._done = 0, True
        self.instruction = instruction or str(getattr(env.unwrapped, "instruction", "")) or f"control {name}"
        self.contract = Contract(
            robot=name,
            cameras=self._cameras(options, name),
            state_dim=len(state_names),
            action_dim=len(low),
            state_names=state_names if any(self._numbers) else (),
            action_low=tuple(map(float, low)) if limited else (),
            action_high=tuple(map(float, high)) if limited else (),
            rate_hz=float(getattr(env, "metadata", {}).get("render_fps") or 0.0),
            episode_limit=options.episode_limit or int(getattr(spec, "max_episode_steps", 0) or 0),
        )

    def reset(self, seed: int, *, render: bool = True) -> SimObservation:
        """Begin the episode of a seed (0 or more)."""
        self._last, _ = self._env.reset(seed=seed)
        self._steps, self._done = 0, False
        return self._observe(render)

    def step_chunk(
        self, actions: npt.NDArray[np.float32], *, render: bool = True, final: bool = False, record: bool = False
    ) -> StepResult:
        """Execute actions [k, A] until they or the episode end."""
        check_chunk(actions, self.contract.action_dim, self._done)
        rewards: list[float] = []
        frames: list[Picture] = []
        success = terminated = False
        for action in np.clip(actions, self._low, self._high):
            self._last, reward, over, truncated, info = self._env.step(action.reshape(self._action_shape))
            rewards.append(float(reward))
            self._steps += 1
            success = success or any(bool(np.any(info.get(key, False))) for key in _SUCCESS)
            terminated = bool(over) or (success and self._end_at_success)
            limit = self.contract.episode_limit
            self._done = terminated or bool(truncated) or 0 < limit <= self._steps
            if record and self.contract.cameras:
                frames.append(self._draw(self.contract.cameras[0]))
            if self._done:
                break
        observation = self._observe(final if self._done else render)
        paid = np.array(rewards, np.float32)
        return StepResult(observation, paid, success, self._done, terminated, tuple(frames))

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _cameras(self, options: SimulatorOptions, name: str) -> tuple[Camera, ...]:
        seen = tuple(Camera(name=key, height=box.shape[0], width=box.shape[1]) for key, box in self._pictures.items())
        if options.cameras is None:
            return seen
        for camera in options.cameras:
            if camera.name == RENDER and getattr(self._env, "render_mode", None) == "rgb_array":
                continue
            if camera not in seen:
                names = ", ".join(f"{one.name} ({one.height}x{one.width})" for one in seen) or "none"
                raise ValueError(
                    f"{name} has no camera '{camera.name}' of {camera.height}x{camera.width} that is not rotated: "
                    f"it has {names}; '{RENDER}' needs render_mode=\"rgb_array\""
                )
        return options.cameras

    def _observe(self, render: bool) -> SimObservation:
        parts = [np.asarray(self._part(key), np.float32).reshape(-1) for key in self._numbers]
        state = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        if len(state) != self.contract.state_dim:
            raise ValueError(f"it shows {len(state)} numbers, its observation space has {self.contract.state_dim}")
        return SimObservation(state, tuple(map(self._draw, self.contract.cameras)) if render else ())

    def _part(self, key: str) -> Any:
        return self._last if key == _ONLY else self._last[key]

    def _draw(self, camera: Camera) -> Picture:
        if camera.name in self._pictures:
            picture = np.asarray(self._part(camera.name), np.uint8)
            if picture.shape != (camera.height, camera.width, 3):
                raise ValueError(f"'{camera.name}' is a picture of {picture.shape}, which its space contradicts")
        else:
            picture = np.asarray(self._env.render(), np.uint8)
            if picture.shape != (camera.height, camera.width, 3) or camera.rotation_deg:
                raise ValueError(f"render() gives pictures of {picture.shape}: give camera '{RENDER}' their size")
        return np.array(picture)  # environments reuse their arrays


def _boxes(space: Any, name: str) -> dict[str, Any]:
    """Return the boxes of an observation space, by name."""
    spaces = getattr(space, "spaces", None)
    boxes = dict(sorted(spaces.items())) if isinstance(spaces, Mapping) else {_ONLY: space}
    for key, box in boxes.items():
        if not hasattr(box, "low") or not hasattr(box, "high"):
            what = f"observation '{key}'" if key else "the observation"
            raise ValueError(f"{what} of {name} is a {type(box).__name__}: it must be a Box; wrap the environment")
    return boxes


def _is_picture(box: Any) -> bool:
    return box.dtype == np.uint8 and len(box.shape) == 3 and box.shape[2] == 3


def _labels(key: str, box: Any) -> list[str]:
    count = int(np.prod(box.shape, dtype=np.int64))
    return [key] if key and count == 1 else [f"{key}[{index}]" for index in range(count)]


def _action_limits(space: Any, name: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    if not hasattr(space, "low") or not hasattr(space, "high"):
        raise ValueError(f"actions of {name} are a {type(space).__name__}: they must be a Box of numbers")
    return np.asarray(space.low, np.float32).reshape(-1), np.asarray(space.high, np.float32).reshape(-1)
