"""A job's spec, compiled: which ops in which order, which pages of batches, which episodes together.

In: a checked spec and what was decided when it started. Out: plans that answer by position, so that progress is a
number and a restart needs nothing else. Never: state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from joynexus.seeds import derived_seed
from joynexus.specs import EvaluateSpec, GrpoSpec, RlSpec, SftSpec
from joynexus.wire.front import EpisodeResult, EvaluationResult, TaskResult

_PAGE_INDICES = 65_536
_ENDED = frozenset({"", "limit", "terminated"})
"""What `EpisodeResult.failure` says of an episode that ended; of one that could not be run it says why."""
_Z95 = 1.959963984540054


class PlannedOp(msgspec.Struct, frozen=True):
    """One op of a job that trains.

    Attributes:
        step: of a `train_step`, counts from 0.
        update, epoch: of an `rl_epoch`, count from 0.
    """

    kind: Literal["train_step", "publish", "rl_begin", "rl_epoch"]
    step: int = 0
    update: int = 0
    epoch: int = 0


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The ops of an SFT job: maybe a publish, then its steps, maybe a publish.

    Attributes:
        steps: optimizer steps.
        initial: it starts with a publish.
        final: it ends with one.
        page_steps: steps whose batches are drawn together.
    """

    steps: int
    initial: bool
    final: bool
    page_steps: int

    @property
    def total(self) -> int:
        """Number of ops."""
        return self.initial + self.steps + self.final

    def op(self, index: int) -> PlannedOp:
        """Return the op at a position, counted from 0."""
        step = index - self.initial
        if 0 <= step < self.steps:
            return PlannedOp("train_step", step)
        return PlannedOp("publish")

    def page(self, step: int) -> tuple[int, int]:
        """Return the page that holds a step's batch: its first step and number of steps."""
        first = step - step % self.page_steps
        return first, min(self.page_steps, self.steps - first)


def compile_training(spec: SftSpec, *, initial: bool, page_steps: int) -> TrainingPlan:
    """Lay out an SFT job; a page has `page_steps` steps, or fewer if they would not fit into one message."""
    fitting = max(1, _PAGE_INDICES // spec.batch_size)
    return TrainingPlan(steps=spec.steps, initial=initial, final=spec.publish, page_steps=min(page_steps, fitting))


class RlPlan(msgspec.Struct, frozen=True, kw_only=True):
    """An RL job: it begins, publishes, and then each update is some epochs over its rollouts and a publish.

    Attributes:
        updates: how many there are, at most.
        epochs: of each update.
        episodes: of each update.
        group: consecutive episodes that start from the same seed: an advantage group.
        page_episodes: episodes that are run together, whole advantage groups.
        first_seed, seed: of the spec.
    """

    updates: int
    epochs: int
    episodes: int
    group: int
    page_episodes: int
    first_seed: int
    seed: int

    @property
    def total(self) -> int:
        """Number of ops."""
        return 2 + self.updates * (self.epochs + 1)

    def op(self, index: int) -> PlannedOp:
        """Return the op at a position, counted from 0."""
        if index == 0:
            return PlannedOp("rl_begin")
        update, epoch = divmod(index - 2, self.epochs + 1)
        if index == 1 or epoch == self.epochs:
            return PlannedOp("publish")
        return PlannedOp("rl_epoch", update=update, epoch=epoch)

    def last_epoch(self, update: int) -> int:
        """Return the position of an update's last epoch."""
        return 1 + (update + 1) * (self.epochs + 1) - 1

    @property
    def pages(self) -> int:
        """Rollouts of each update."""
        return -(-self.episodes // self.page_episodes)

    def page(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the seeds that a rollout's episodes start from, and the seeds of what is drawn in them."""
        update, page = divmod(number, self.pages)
        first = page * self.page_episodes
        places = range(first, min(first + self.page_episodes, self.episodes))
        episodes = [update * self.episodes + place for place in places]
        seeds = tuple(self.first_seed + episode // self.group for episode in episodes)
        return seeds, tuple(derived_seed("episode", self.seed, episode) for episode in episodes)


def compile_rl(spec: RlSpec, *, rollout_episodes: int) -> RlPlan:
    """Lay out an RL job; a rollout has about `rollout_episodes` episodes, and whole advantage groups."""
    group = spec.algorithm.group_size if isinstance(spec.algorithm, GrpoSpec) else 1
    return RlPlan(
        updates=spec.updates,
        epochs=spec.algorithm.epochs,
        episodes=spec.episodes,
        group=group,
        page_episodes=group * max(1, rollout_episodes // group),
        first_seed=spec.first_seed,
        seed=spec.seed,
    )


def has_ended(episode: EpisodeResult) -> bool:
    """Tell whether an episode ended, or could not be run."""
    return episode.failure in _ENDED


class EvaluationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The pages of an evaluation, task by task: seeds that are run together, so that their rows act together."""

    tasks: tuple[str, ...]
    first_seed: int
    episodes: int
    videos: int
    page_episodes: int

    @property
    def pages(self) -> int:
        """Number of pages."""
        return len(self.tasks) * self._of_task

    @property
    def _of_task(self) -> int:
        return -(-self.episodes // self.page_episodes)

    def task(self, page: int) -> str:
        """Return a page's simulator task."""
        return self.tasks[page // self._of_task]

    def seeds(self, page: int) -> tuple[int, ...]:
        """Return a page's seeds."""
        first = page % self._of_task * self.page_episodes
        return tuple(range(self.first_seed + first, self.first_seed + min(first + self.page_episodes, self.episodes)))

    def recorded(self, page: int) -> tuple[int, ...]:
        """Return those of its seeds whose episodes are recorded."""
        return tuple(seed for seed in self.seeds(page) if seed < self.first_seed + self.videos)


def compile_evaluation(spec: EvaluateSpec, *, page_episodes: int) -> EvaluationPlan:
    """Lay out an evaluation."""
    return EvaluationPlan(
        tasks=spec.tasks,
        first_seed=spec.first_seed,
        episodes=spec.episodes,
        videos=spec.videos,
        page_episodes=page_episodes,
    )


def summarize(
    version: int, tasks: Mapping[str, Sequence[EpisodeResult]], contracts: Mapping[str, str], software: dict[str, str]
) -> EvaluationResult:
    """Turn episodes (of each task at least one, in seed order) into the result of an evaluation.

    Args:
        tasks: episodes by task.
        contracts: digest of each task's contract.
        software: versions that made these numbers.
    """
    by_task = tuple(_task_result(env, episodes, contracts[env]) for env, episodes in tasks.items())
    results = tuple(
        msgspec.structs.replace(episode, env=env) if len(tasks) > 1 else episode
        for env, episodes in tasks.items()
        for episode in episodes
    )
    whole = _task_result("", results, by_task[0].contract_digest)
    fields = {field: getattr(whole, field) for field in TaskResult.__struct_fields__ if field != "env"}
    return EvaluationResult(version=version, software=software, results=results, tasks=by_task, **fields)


def _task_result(env: str, episodes: Sequence[EpisodeResult], contract_digest: str) -> TaskResult:
    count = len(episodes)
    successes = sum(episode.success for episode in episodes)
    low, high = wilson(successes, count)
    failures: dict[str, int] = {}
    for episode in episodes:
        if not episode.success:
            reason = episode.failure or "limit"
            failures[reason] = failures.get(reason, 0) + 1
    return TaskResult(
        env=env,
        successes=successes,
        episodes=count,
        success=successes / count,
        low=low,
        high=high,
        mean_steps=mean([episode.steps for episode in episodes]),
        mean_reward=mean([episode.reward for episode in episodes]),
        failures=failures,
        contract_digest=contract_digest,
    )


def mean(values: Sequence[float]) -> float:
    """Return the mean, 0 of nothing; NaN if it is no number, because a simulator pays what it likes."""
    try:
        return math.fsum(values) / len(values) if values else 0.0
    except (OverflowError, ValueError):  # too large, or both infinities
        return math.nan


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a success rate (Wilson, 1927), within [0, 1].

    Args:
        successes: between 0 and `count`.
        count: at least 1.
    """
    rate, z2 = successes / count, _Z95**2
    centre = (rate + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z95 / (1 + z2 / count) * math.sqrt(rate * (1 - rate) / count + z2 / (4 * count**2))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    return low, 1.0 if successes == count else min(1.0, centre + half)
