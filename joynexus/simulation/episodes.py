"""Run a policy in simulators: many episodes in lockstep, one question to the policy for all of them.

In: a pool of environments, something that answers observations with actions, seeds. Out: one result an episode, in the
order asked for. Never: a result that depends on how many rows run side by side, or on a worker process that was lost on
the way (the episode is done again from its seed).
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
        self,
        actions: Mapping[int, Actions],
        *,
        render: bool = True,
        final: bool = False,
        record: Collection[int] = (),
    ) -> dict[int, StepResult | Lost]:
        """Execute a chunk in some rows; `final` as in `Simulator`."""


class Episode(NamedTuple):
    """What an episode is made from.

    Attributes:
        seed: that the environment is reset with.
        draw: seed of all that the policy draws; episodes from the same start differ by it.
    """

    seed: int
    draw: int


class Question(NamedTuple):
    """One row's observation, and all that a policy may derive its randomness from.

    Attributes:
        episode: which one it is of.
        step: steps already executed in it.
        observation: what is seen.
        last: the episode was cut off here: what this is worth is wanted, no action.
    """

    episode: Episode
    step: int
    observation: SimObservation
    last: bool = False

    @property
    def seed(self) -> int:
        """Seed of the episode."""
        return self.episode.seed

    @property
    def draw(self) -> int:
        """Seed of what the policy draws for this row: the same whenever and with whomever the episode runs."""
        return derived_seed("rollout", self.episode.draw, self.step)


class EpisodeResult(NamedTuple):
    """How an episode went.

    Attributes:
        seed, draw: of the episode.
        success: whether the task was solved.
        steps: actions executed.
        reward: sum of rewards.
        failure: empty on success; else `limit`, `terminated`, or that the simulator was lost.
        chunks: how often the policy was asked.
        frames: one picture a step, if the episode was recorded.
    """

    seed: int
    draw: int
    success: bool
    steps: int
    reward: float
    failure: str
    chunks: int
    frames: tuple[Picture, ...]

    @property
    def lost(self) -> bool:
        """Whether it could not be run to its end in any attempt."""
        return self.failure not in ("", LIMIT, TERMINATED)


class _Live:
    """An episode under way in a row."""

    def __init__(self, episode: Episode, attempt: int) -> None:
        self.episode, self.attempt = episode, attempt
        self.observation: SimObservation | None = None
        self.steps, self.chunks, self.reward = 0, 0, 0.0
        self.success = False
        self.frames: list[Picture] = []

    def add(self, step: StepResult) -> None:
        """Count a chunk."""
        self.observation = step.observation
        self.steps += step.steps
        self.chunks += 1
        self.reward += step.reward
        self.frames += step.frames
        self.success = self.success or step.success

    def result(self, failure: str) -> EpisodeResult:
        """Return how it went, up to now."""
        return EpisodeResult(
            seed=self.episode.seed,
            draw=self.episode.draw,
            success=self.success and not failure,
            steps=self.steps,
            reward=self.reward,
            failure=failure,
            chunks=self.chunks,
            frames=tuple(self.frames),
        )


def run_episodes(
    pool: Rows,
    act: Callable[[list[Question]], Actions],
    seeds: Sequence[int],
    *,
    draws: Sequence[int] = (),
    episode_limit: int,
    execute: int = 0,
    render: bool = True,
    record: Collection[int] = (),
    ask_last: bool = False,
    attempts: int = ATTEMPTS,
    on_step: Callable[[Question, Actions, StepResult], None] | None = None,
    on_episode: Callable[[EpisodeResult], None] | None = None,
    alive: Callable[[], None] = lambda: None,
) -> list[EpisodeResult]:
    """Run one episode for each seed.

    Args:
        pool: environments; a row that finishes takes the next seed.
        act: answers n questions with actions [n, chunk, A].
        seeds: may repeat where draws differ.
        draws: one a seed, of what the policy draws; none takes the seeds.
        episode_limit: steps after which an episode counts as failed.
        execute: actions of each chunk that are executed; 0 means all.
        render: draw pictures for the policy.
        record: seeds of the episodes to record for videos.
        ask_last: `act` is also asked about the observation behind the last action of an episode that was cut off
            (`Question.last`), together with the next questions; what it answers there is not executed.
        attempts: how often an episode is tried whose environment is lost.
        on_step: told each executed chunk; after a loss the episode starts again with `question.step` 0.
        on_episode: told each result, in the order in which episodes end.
        alive: called before each round of resets, questions and chunks; raises if the episodes are not wanted any more.

    Returns:
        Results in the order of `seeds`. An episode whose environment was lost in every attempt has failed, and says so.

    Raises:
        ValueError: for an episode that is asked for twice, or actions of a wrong shape.
        SimulatorError: if the simulator cannot be made.
    """
    episodes = [Episode(seed, draw) for seed, draw in zip(seeds, draws or seeds, strict=True)]
    if len(set(episodes)) != len(episodes):
        raise ValueError("some seeds repeat: episodes need distinct ones, or distinct seeds of what is drawn")
    waiting = deque((episode, 1) for episode in episodes)
    live: dict[int, _Live] = {}
    cut_off: list[tuple[Question, EpisodeResult]] = []
    results: dict[Episode, EpisodeResult] = {}

    def end(result: EpisodeResult) -> None:
        results[Episode(result.seed, result.draw)] = result
        if on_episode is not None:
            on_episode(result)

    def lose(row: int, reason: str) -> None:
        lost = live.pop(row)
        if lost.attempt < attempts:
            waiting.appendleft((lost.episode, lost.attempt + 1))
        else:
            end(lost.result(f"the simulator was lost {attempts} times: it {reason}"))

    while waiting or live or cut_off:
        alive()
        fresh = {}
        for row in range(pool.rows):
            if row not in live and waiting:
                live[row] = _Live(*waiting.popleft())
                fresh[row] = live[row].episode.seed
        for row, observation in (pool.reset(fresh, render=render) if fresh else {}).items():
            if isinstance(observation, Lost):
                lose(row, observation.reason)
            else:
                live[row].observation = observation

        questions = {
            row: Question(begun.episode, begun.steps, begun.observation)
            for row, begun in sorted(live.items())
            if begun.observation is not None
        }
        if not questions and not cut_off:
            continue
        asked = [*questions.values(), *(question for question, _ in cut_off)]
        answers = act(asked)
        if answers.ndim != 3 or len(answers) != len(asked) or answers.shape[1] < max(1, execute):
            raise ValueError(
                f"the policy answered {len(asked)} observations with actions of shape {answers.shape}: "
                f"[{len(asked)}, chunk, A] with a chunk of at least {max(1, execute)} is needed"
            )
        for _, ended in cut_off:
            end(ended)
        cut_off = []
        chunks = {}
        for row, answer in zip(questions, answers, strict=False):
            count = min(execute or len(answer), episode_limit - live[row].steps)
            chunks[row] = np.ascontiguousarray(answer[:count], np.float32)
        if not chunks:
            continue
        recorded = [row for row in chunks if live[row].episode.seed in record]
        for row, step in pool.step(chunks, render=render, final=render and ask_last, record=recorded).items():
            if isinstance(step, Lost):
                lose(row, step.reason)
                continue
            if on_step is not None:
                on_step(questions[row], chunks[row][: step.steps], step)
            begun = live[row]
            begun.add(step)
            if step.done or begun.steps >= episode_limit:
                del live[row]
                result = begun.result("" if begun.success else TERMINATED if step.terminated else LIMIT)
                if ask_last and not step.terminated:
                    cut_off.append((Question(begun.episode, begun.steps, step.observation, last=True), result))
                else:
                    end(result)
    return [results[episode] for episode in episodes]
