"""A module whose import registers environments with gymnasium, as a plug-in's does."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Reach(gymnasium.Env[dict[str, Any], Any]):
    """A point that an action moves; solved within 0.1 of zero."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
    observation_space = spaces.Dict(
        {"velocity": spaces.Box(-1, 1, (1,), np.float32), "place": spaces.Box(-9, 9, (2,), np.float32)}
    )
    action_space = spaces.Box(-1, 1, (2,), np.float32)
    instruction = "go to the middle"

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._place = np.zeros(2, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], Any]:
        super().reset(seed=seed)
        self._place = self.np_random.uniform(1, 2, 2).astype(np.float32)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self._place = self._place + action
        distance = float(np.abs(self._place).max())
        return self._observe(), -distance, bool(distance > 8), False, {"is_success": distance < 0.1}

    def render(self) -> np.ndarray:
        return np.full((8, 6, 3), 50, np.uint8)

    def _observe(self) -> dict[str, Any]:
        return {"velocity": np.zeros(1, np.float32), "place": self._place}


class Unlimited(Reach):
    """The same, without a limit of steps."""


gymnasium.register("Joy/Reach-v0", Reach, max_episode_steps=5)
gymnasium.register("Unlimited-v0", Unlimited)
