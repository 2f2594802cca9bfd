"""Run a policy in simulators: many episodes in lockstep, one question to the policy for all of them.

In: a pool of environments, something that answers observations with actions, seeds. Out: one result an episode, in the
order of the seeds. Never: a result that depends on how many rows run side by side, or on a worker process that was lost
on the way (the episode is done again from its seed).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from joynexus.seeds import derived_seed
from joynexus.simulation.interface import Picture, SimObservation, StepResult
from joynexus.simulation.pool import Lost

Actions = npt.NDArray[np.float32]

LIMIT = "limit"
"""Why an episode failed that ran to its end."""
TERMINATED = "terminated"
"""Why an episode failed that its task ended."""
ATTEMPTS = 3
"""How often an episode is tried whose environment is lost."""


class Rows(Protocol):
    """What of a `SimulatorPool` a rollout uses."""

    rows: int

    def reset(self, seeds: Mapping[int, int], *, render: bool = True) -> dict[int, SimObservation | Lost]:
        """Begin an episode in some rows."""

    def step(
        self, actions: Mapping[int, Actions], *, render: bool = True, record: Collection[int] = ()
    ) -> dict[int, StepResult | Lost]:
        """Execute a chunk in some rows."""


class Question(NamedTuple):
    """One row's observation, and all that a policy may derive its randomness from.

    Attributes:
        seed: of the episode.
        step: steps already executed in it.
        observation: what is seen.
    """

    seed: int
    step: int
    observation: SimObservation

    @property
    def draw(self) -> int:
        """Seed of what the policy draws for this row: the same whenever and with whomever the episode runs."""
        return derived_seed("rollout", self.seed, self.step)


class EpisodeResult(NamedTuple):
    """How an episode went.

    Attributes:
        seed: of the episode.
        success: whether the task was solved.
        steps: actions executed.
        reward: sum of rewards.
        failure: empty on success; else `limit`, `terminated`, or that the simulator was lost.
        chunks: how often the policy was asked.
        frames: one picture a step, if the episode was recorded.
    """

    seed: int
    success: bool
    steps: int
    reward: float
    failure: str
    chunks: int
    frames: tuple[Picture, ...]


class _Live:
    """An episode under way in a row."""

    def __init__(self, seed: int, attempt: int) -> None:
        self.seed, self.attempt = seed, attempt
        self.observation: SimObservation | None = None
        self.steps, self.chunks, self.reward = 0, 0, 0.0
        self.success = False
        self.frames: list[Picture] = []


def run_episodes(
    pool: Rows,
    act: Callable[[list[Question]], Actions],
    seeds: Sequence[int],
    *,
    episode_limit: int,
    execute: int = 0,
    render: bool = True,
    record: Collection[int] = (),
    attempts: int = ATTEMPTS,
    on_step: Callable[[Question, Actions, StepResult], None] | None = None,
    on_episode: Callable[[EpisodeResult], None] | None = None,
) -> list[EpisodeResult]:
    """Run one episode for each seed.

    Args:
        pool: environments; a row that finishes takes the next seed.
        act: answers n questions with actions [n, chunk, A].
        seeds: distinct seeds.
        episode_limit: steps after which an episode counts as failed.
        execute: actions of each chunk that are executed; 0 means all.
        render: draw pictures for the policy.
        record: seeds of the episodes to record for videos.
        attempts: how often an episode is tried whose environment is lost.
        on_step: told each executed chunk; after a loss the episode starts again with `question.step` 0.
        on_episode: told each result, in the order in which episodes end.

    Returns:
        Results in the order of `seeds`. An episode whose environment was lost in every attempt has failed, and says so.

    Raises:
        ValueError: for seeds that repeat, or actions of a wrong shape.
        SimulatorError: if the simulator cannot be made.
    """
    if len(set(seeds)) != len(seeds):
        raise ValueError("some seeds repeat: an evaluation needs distinct ones")
    waiting = deque((seed, 1) for seed in seeds)
    live: dict[int, _Live] = {}
    results: dict[int, EpisodeResult] = {}

    def end(row: int, success: bool, failure: str) -> None:
        episode = live.pop(row)
        numbers = (episode.steps, episode.reward, failure, episode.chunks, tuple(episode.frames))
        results[episode.seed] = result = EpisodeResult(episode.seed, success, *numbers)
        if on_episode is not None:
            on_episode(result)

    def lose(row: int, reason: str) -> None:
        if live[row].attempt < attempts:
            waiting.appendleft((live[row].seed, live.pop(row).attempt + 1))
        else:
            end(row, False, f"the simulator was lost {attempts} times: it {reason}")

    while waiting or live:
        fresh = {}
        for row in range(pool.rows):
            if row not in live and waiting:
                live[row] = _Live(*waiting.popleft())
                fresh[row] = live[row].seed
        for row, observation in (pool.reset(fresh, render=render) if fresh else {}).items():
            if isinstance(observation, Lost):
                lose(row, observation.reason)
            else:
                live[row].observation = observation

        questions = {
            row: Question(episode.seed, episode.steps, episode.observation)
            for row, episode in sorted(live.items())
            if episode.observation is not None
        }
        if not questions:
            continue
        answers = act(list(questions.values()))
        if answers.ndim != 3 or len(answers) != len(questions) or answers.shape[1] < max(1, execute):
            raise ValueError(
                f"the policy answered {len(questions)} observations with actions of shape {answers.shape}: "
                f"[{len(questions)}, chunk, A] with a chunk of at least {max(1, execute)} is needed"
            )
        chunks = {}
        for row, answer in zip(questions, answers, strict=True):
            count = min(execute or len(answer), episode_limit - live[row].steps)
            chunks[row] = np.ascontiguousarray(answer[:count], np.float32)
        recorded = [row for row in chunks if live[row].seed in record]
        for row, result in pool.step(chunks, render=render, record=recorded).items():
            if isinstance(result, Lost):
                lose(row, result.reason)
                continue
            episode = live[row]
            if on_step is not None:
                on_step(questions[row], chunks[row][: result.steps], result)
            episode.observation = result.observation
            episode.steps += result.steps
            episode.chunks += 1
            episode.reward += result.reward
            episode.frames += result.frames
            episode.success = episode.success or result.success
            if result.done or episode.steps >= episode_limit:
                end(row, episode.success, "" if episode.success else TERMINATED if result.terminated else LIMIT)
    return [results[seed] for seed in seeds]
