"""An environment of your own: push a point to the middle of a table.

Run `joynexus env serve point_mass:make_env` in this folder, then evaluate or train with `env: own/point_mass`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from joynexus.contract import Contract
from joynexus.simulation.interface import SimObservation, StepResult

Vector = npt.NDArray[np.float32]
STEP_S, FRICTION, NEAR = 0.1, 0.5, 0.1


class PointMass:
    """State: position x, y within 1, velocity x, y. Action: force x, y within 1. Solved: at rest near the middle."""

    contract = Contract(
        robot="point_mass",
        cameras=(),
        state_dim=4,
        action_dim=2,
        state_names=("x", "y", "vx", "vy"),
        action_low=(-1.0, -1.0),
        action_high=(1.0, 1.0),
        rate_hz=1 / STEP_S,
        episode_limit=60,
    )
    instruction = "push the point to the middle"

    def reset(self, seed: int, *, render: bool = True) -> SimObservation:
        """Begin the episode of a seed: all that is random comes from it."""
        self._state = np.zeros(4, np.float32)
        self._state[:2] = np.random.default_rng(seed).uniform(-1.0, 1.0, 2)
        self._steps = 0
        return SimObservation(self._state.copy(), images=())

    def step_chunk(
        self, actions: Vector, *, render: bool = True, final: bool = False, record: bool = False
    ) -> StepResult:
        """Execute actions [k, 2] until they or the episode end; whether solving it ends it is the job's to say."""
        rewards: list[float] = []
        solved = over = False
        for force in actions:
            position, velocity = self._state[:2], self._state[2:]
            velocity += STEP_S * (force - FRICTION * velocity)
            position += STEP_S * velocity
            self._steps += 1
            distance, speed = float(np.linalg.norm(position)), float(np.linalg.norm(velocity))
            rewards.append(-distance)
            solved = solved or (distance < NEAR and speed < NEAR)
            over = self._steps >= self.contract.episode_limit
            if over:
                break
        seen = SimObservation(self._state.copy(), images=())
        return StepResult(seen, np.array(rewards, np.float32), success=solved, done=over, terminated=False)

    def close(self) -> None:
        """Nothing is held."""


def make_env() -> PointMass:
    """Return a new environment; called once for each that is to run."""
    return PointMass()
