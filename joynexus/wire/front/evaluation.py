"""What evaluations find. Parts of messages: nothing here travels by itself."""

from __future__ import annotations

from joynexus.bounds import Many, Short, Text
from joynexus.wire.base import Wire


class EpisodeResult(Wire, frozen=True, kw_only=True):
    """One evaluated episode.

    Attributes:
        seed: seed it was reset with.
        success: the simulator's own flag was raised.
        steps: steps taken.
        reward: sum of rewards.
        failure: empty, or why it did not succeed: `limit`, `terminated`.
        video: blob digest of its MP4, if one was asked for.
        env: its task, where there are several.
    """

    seed: int
    success: bool
    steps: int
    reward: float
    failure: Text = ""
    video: Short = ""
    env: Short = ""


class TaskResult(Wire, frozen=True, kw_only=True):
    """What an evaluation found on one of its tasks; see `EvaluationResult`."""

    env: str
    successes: int
    episodes: int
    success: float
    low: float
    high: float
    mean_steps: float
    mean_reward: float
    failures: dict[str, int]
    contract_digest: str


class EvaluationResult(Wire, frozen=True, kw_only=True):
    """What an evaluation found.

    Attributes:
        version: version that acted.
        successes, episodes: counts.
        success, low, high: success rate with its 95 % Wilson interval.
        mean_steps, mean_reward: over all episodes.
        failures: count by reason.
        contract_digest: the environment's contract; the first task's if there are several.
        tasks: the same for each task.
        software: versions of simulator, renderer and packages that made these numbers.
        results: episodes by task, in seed order.
    """

    version: int
    successes: int
    episodes: int
    success: float
    low: float
    high: float
    mean_steps: float
    mean_reward: float
    failures: dict[str, int]
    contract_digest: str
    software: dict[str, str]
    results: tuple[EpisodeResult, ...]
    tasks: tuple[TaskResult, ...] = ()


class ActionError(Wire, frozen=True, kw_only=True):
    """Mean absolute action error on held-out steps, raw units, with two trivial policies beside it.

    Attributes:
        policy: error of the policy, mean over valid chunk steps and dimensions, each divided by that dimension's
            standard deviation in the training statistics (dimensions that never change are left out).
        mean_action: the same for always predicting the mean action.
        repeat_state: the same for predicting the current state as the action; NaN where state and action differ in
            length.
        per_dimension, per_step: the policy's error by action dimension and by step of the chunk.
        samples: steps evaluated.
    """

    version: int
    policy: float
    mean_action: float
    repeat_state: float
    per_dimension: Many[float]
    per_step: Many[float]
    samples: int
