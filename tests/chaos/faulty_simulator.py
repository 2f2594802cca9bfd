"""A module whose import registers an environment that goes wrong where a file says so, as a broken machine's would.

In: `FAULTY`, the path of a file, among the variables of an env service; seeds. Out: a point that actions move; in the
episodes of the seeds from `FIRST_SEED` on, while the file says `broken`, by turns of a page, rewards that are no
numbers, observations of another shape, steps that never return; while it says `slow`, steps that take long. Never: a
fault where the variable is not set.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

VARIABLE = "FAULTY"
FIRST_SEED, PAGE = 1_000_000, 8
BROKEN, SLOW = "broken", "slow"
FAULTS = ("reward", "shape", "hang")
SLOW_S = 0.05
"""Of a step; others take less than a millisecond."""


class Faulty(gymnasium.Env[Any, Any]):
    """A point in a plane."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)
    instruction = "go to the middle"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._place = self.np_random.uniform(1, 2, 2).astype(np.float32)
        self._fault = self._fault_of(seed or 0)
        return self._place, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._place = self._place + np.float32(0.1) * np.asarray(action, np.float32)
        distance = float(np.abs(self._place).max())
        if self._fault == "hang":
            threading.Event().wait()
        if self._fault == SLOW:
            time.sleep(SLOW_S)
        seen = np.zeros(3, np.float32) if self._fault == "shape" else self._place
        return (
            seen,
            float("nan") if self._fault == "reward" else -distance,
            False,
            False,
            {"is_success": distance < 0.1},
        )

    def _fault_of(self, seed: int) -> str:
        said = ""
        with suppress(OSError):
            said = Path(os.environ.get(VARIABLE, "")).read_text()
        if seed < FIRST_SEED or said != BROKEN:
            return said if seed >= FIRST_SEED else ""
        return FAULTS[(seed - FIRST_SEED) // PAGE % len(FAULTS)]


gymnasium.register("Faulty-v0", Faulty, max_episode_steps=12)
