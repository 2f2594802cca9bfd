"""How far a policy's actions are from recorded ones, beside two trivial policies.

In: batches of recorded and predicted chunks. Out: the errors, in units of each action number's spread. Never: a step
past an episode's end, or an action number that never changes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from common.prepared import Batch
from joynexus.contract import VectorStatistics

Floats = npt.NDArray[np.float32]


class Errors(NamedTuple):
    """Mean absolute errors, each action number divided by its standard deviation in the training statistics.

    Attributes:
        policy: of the policy, over valid chunk steps and changing action numbers.
        mean_action: of always predicting the mean action.
        repeat_state: of predicting the current state; NaN where state and action differ in length.
        per_dimension: the policy's, by action number; NaN for one that never changes.
        per_step: the policy's, by step of the chunk; NaN for one that no episode reaches.
        samples: steps evaluated.
    """

    policy: float
    mean_action: float
    repeat_state: float
    per_dimension: tuple[float, ...]
    per_step: tuple[float, ...]
    samples: int


class ActionErrors:
    """Adds up errors over batches.

    Args:
        action: training statistics of the action.
        chunk: steps of a chunk.
    """

    def __init__(self, action: VectorStatistics, chunk: int) -> None:
        std = np.array(action.std, np.float64)
        self._changing = (np.array(action.max) > np.array(action.min)) & (std > 0)
        self._scale = np.where(self._changing, std, 1.0)
        self._mean = np.array(action.mean, np.float64)
        shape = (chunk, len(std))
        self._count = np.zeros(shape)
        self._sums = {name: np.zeros(shape) for name in ("policy", "mean_action", "repeat_state")}
        self._samples = 0
        self._same_length = True

    def add(self, recorded: Batch, predicted: Floats) -> None:
        """Count a batch; `predicted` is [B, chunk, A], raw units.

        Raises:
            ValueError: if the predictions have another shape than the recorded chunks.
        """
        if predicted.shape != recorded.action.shape:
            raise ValueError(
                f"predicted actions have shape {predicted.shape}, but recorded ones have {recorded.action.shape}"
            )
        valid = recorded.action_mask[:, :, None]
        self._same_length = recorded.state.shape[1] == recorded.action.shape[2]
        guesses: dict[str, npt.NDArray[Any]] = {"policy": predicted, "mean_action": self._mean}
        if self._same_length:
            guesses["repeat_state"] = recorded.state[:, None, :]
        for name, guess in guesses.items():
            self._sums[name] += (np.abs(recorded.action - guess) / self._scale * valid).sum(0)
        self._count += np.broadcast_to(valid, recorded.action.shape).sum(0)
        self._samples += len(recorded.state)

    def result(self) -> Errors:
        """Return the means over everything that was counted."""
        count = self._count[:, self._changing]
        means = {name: _mean(sums[:, self._changing].sum(), count.sum()) for name, sums in self._sums.items()}
        by_dimension = [_mean(a, b) for a, b in zip(self._sums["policy"].sum(0), self._count.sum(0), strict=True)]
        by_step = zip(self._sums["policy"][:, self._changing].sum(1), count.sum(1), strict=True)
        return Errors(
            policy=means["policy"],
            mean_action=means["mean_action"],
            repeat_state=means["repeat_state"] if self._same_length else float("nan"),
            per_dimension=tuple(
                mean if changing else float("nan") for mean, changing in zip(by_dimension, self._changing, strict=True)
            ),
            per_step=tuple(_mean(a, b) for a, b in by_step),
            samples=self._samples,
        )


def _mean(total: float, count: float) -> float:
    return float(total / count) if count else float("nan")
