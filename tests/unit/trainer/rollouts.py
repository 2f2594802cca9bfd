"""Rollouts for tests: made up of random numbers, or by a policy that acts in a point mass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from joynexus.simulation.trajectories import Trajectories


def made_up(
    seed: int,
    *,
    lengths: Sequence[int] = (3, 1, 4),
    seeds: Sequence[int] | None = None,
    chunk: int = 3,
    actions: int = 2,
    values: int = 0,
    **changes: Any,
) -> Trajectories:
    """Return episodes of random numbers; the first and every other one is ended by its task, in the middle of a chunk."""
    dice = np.random.default_rng(seed)
    episodes, decisions = len(lengths), sum(lengths)
    terminated = np.arange(episodes) % 2 == 0
    executed = np.full(decisions, chunk)
    executed[np.cumsum(lengths)[terminated] - 1] = max(1, chunk - 1)
    rewards = dice.standard_normal((decisions, chunk), dtype=np.float32)
    last_value = dice.standard_normal((episodes, values), dtype=np.float32)
    last_value[terminated] = 0.0
    numbers: dict[str, Any] = {
        "version": 1,
        "contract": "",
        "instruction": "reach",
        "lengths": np.array(lengths),
        "seeds": np.arange(episodes) if seeds is None else np.array(seeds),
        "draws": 100 * seed + np.arange(episodes),
        "success": terminated,
        "terminated": terminated,
        "last_value": last_value,
        "state": dice.standard_normal((decisions, 4), dtype=np.float32),
        "images": (),
        "keys": ("",) * decisions,
        "sample": dice.standard_normal((decisions, chunk, actions), dtype=np.float32),
        "log_prob": dice.standard_normal((decisions, chunk, actions), dtype=np.float32),
        "value": dice.standard_normal((decisions, values), dtype=np.float32),
        "rewards": np.where(np.arange(chunk) < executed[:, None], rewards, np.float32(0)),
        "executed": executed,
    }
    return Trajectories(**(numbers | changes))
