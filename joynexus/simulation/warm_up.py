"""Normalisation statistics of a simulator task that nobody has data of: from episodes with random actions.

In: a pool of the task's environments, how many episodes, a seed. Out: `Statistics`, the same for the same seed. Never:
a scale so small that a state which only a better policy reaches is thrown far out of what networks are used to.

Random actions are held for a while each: white noise only makes a robot tremble. What they show is still a part of what
a policy will see, so a state's scale is the largest of

- its standard deviation;
- a third of how far it ever was from its mean: what was rare here is common later;
- `LEAST` of the mean's magnitude, or of 1 where that is larger: what hardly moved here may move later;
- 1, for a number that never changed: nothing is known of it, so that it is only moved to 0.

Actions are scaled by their limits: their middle becomes 0 and half their range 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from joynexus.contract import Contract, Statistics, VectorStatistics
from joynexus.seeds import derived_seed
from joynexus.simulation.episodes import Actions, Question, Rows, run_episodes
from joynexus.simulation.interface import SimulatorError
from joynexus.statistics import vector_statistics

LEAST = 0.07
_FURTHEST = 3.0  # no state of the warm-up is further out than this, in scales
_SAME = 1e-6  # relative to the mean's magnitude or 1: numbers closer together are one
_HOLDS = 8  # an action is held for at most this part of an episode


def measure_statistics(
    pool: Rows,
    contract: Contract,
    *,
    episodes: int,
    seed: int,
    alive: Callable[[], None] = lambda: None,
) -> Statistics:
    """Run episodes with random actions and measure their states.

    Args:
        pool: environments of the task.
        contract: theirs.
        episodes: how many, on seeds `seed`, `seed + 1`, …
        seed: also of the actions.
        alive: as in `run_episodes`.

    Raises:
        SimulatorError: if the simulator cannot be made, or no episode could be run.
    """
    low, high = action_limits(contract)
    limit = contract.episode_limit
    plans = {
        number: _plan(derived_seed("warm-up", number), low, high, limit) for number in range(seed, seed + episodes)
    }
    seen: dict[tuple[int, int], npt.NDArray[np.float32]] = {}

    def act(questions: list[Question]) -> Actions:
        for question in questions:
            seen[question.seed, question.step] = question.observation.state
        return np.stack([plans[question.seed][question.step : question.step + 1] for question in questions])

    results = run_episodes(pool, act, list(plans), episode_limit=limit, render=False, alive=alive)
    whole = {result.seed: result.steps for result in results if not result.lost}
    states = [seen[key] for key in sorted(seen) if key[1] < whole.get(key[0], 0)]
    if not states:
        raise SimulatorError(f"no episode with random actions could be run: {results[0].failure}")
    return Statistics(count=len(states), state=_widened(np.stack(states)), action=_of_limits(low, high))


def action_limits(contract: Contract) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the least and the largest action [A]; -1 and 1 where the contract has no limit."""
    low, high = (
        np.array(values or [unlimited] * contract.action_dim, np.float64)
        for values, unlimited in ((contract.action_low, -1.0), (contract.action_high, 1.0))
    )
    limited = np.isfinite(low) & np.isfinite(high)
    return np.where(limited, low, -1.0), np.where(limited, high, 1.0)


def _plan(seed: int, low: npt.NDArray[np.float64], high: npt.NDArray[np.float64], steps: int) -> Actions:
    """Draw the actions [steps, A] of an episode: each held for 1 to `steps / _HOLDS` steps."""
    generator = np.random.default_rng(seed)
    holds = generator.integers(1, max(1, steps // _HOLDS), steps, endpoint=True)
    return generator.uniform(low, high, (steps, len(low))).repeat(holds, axis=0)[:steps].astype(np.float32)


def _widened(states: npt.NDArray[np.float32]) -> VectorStatistics:
    """Return statistics of states [T, S] with the scales that the module's docstring gives."""
    measured = vector_statistics(states)
    mean, low, high = (np.array(values) for values in (measured.mean, measured.min, measured.max))
    size = np.maximum(np.abs(mean), 1.0)
    furthest = np.maximum(high - mean, mean - low)
    std = np.max([measured.std, furthest / _FURTHEST, LEAST * size], axis=0)
    std = np.where(furthest <= _SAME * size, 1.0, std)
    return VectorStatistics(
        mean=_floats(mean),
        std=_floats(std),
        min=_floats(np.minimum(low, mean - std)),
        max=_floats(np.maximum(high, mean + std)),
        q01=_floats(np.minimum(measured.q01, mean - std)),
        q99=_floats(np.maximum(measured.q99, mean + std)),
    )


def _of_limits(low: npt.NDArray[np.float64], high: npt.NDArray[np.float64]) -> VectorStatistics:
    lows, highs = _floats(low), _floats(high)
    middle, half = _floats((low + high) / 2), _floats((high - low) / 2)
    return VectorStatistics(mean=middle, std=half, min=lows, max=highs, q01=lows, q99=highs)


def _floats(values: Sequence[float] | npt.NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
