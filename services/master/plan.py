"""A job's spec, compiled: which ops in which order, which pages of batches, which episodes together.

In: a checked spec and what was decided when it started. Out: plans that answer by position, so that progress is a
number and a restart needs nothing else. Never: state.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from joynexus.specs import EvaluateSpec, SftSpec
from joynexus.wire.front import EpisodeResult, EvaluationResult

_PAGE_INDICES = 65_536
_Z95 = 1.959963984540054


class PlannedOp(msgspec.Struct, frozen=True):
    """One op of a training job; `step` counts optimizer steps from 0, for a `train_step`."""

    kind: Literal["train_step", "publish"]
    step: int = 0


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


class EvaluationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The pages of an evaluation: seeds that are run together, so that their rows act together."""

    first_seed: int
    episodes: int
    videos: int
    page_episodes: int

    @property
    def pages(self) -> int:
        """Number of pages."""
        return -(-self.episodes // self.page_episodes)

    def seeds(self, page: int) -> tuple[int, ...]:
        """Return a page's seeds."""
        first = page * self.page_episodes
        return tuple(range(self.first_seed + first, self.first_seed + min(first + self.page_episodes, self.episodes)))

    def recorded(self, page: int) -> tuple[int, ...]:
        """Return those of its seeds whose episodes are recorded."""
        return tuple(seed for seed in self.seeds(page) if seed < self.first_seed + self.videos)


def compile_evaluation(spec: EvaluateSpec, *, page_episodes: int) -> EvaluationPlan:
    """Lay out an evaluation."""
    return EvaluationPlan(
        first_seed=spec.first_seed, episodes=spec.episodes, videos=spec.videos, page_episodes=page_episodes
    )


def summarize(
    version: int, episodes: tuple[EpisodeResult, ...], contract_digest: str, software: dict[str, str]
) -> EvaluationResult:
    """Turn episodes (at least one, in seed order) into the result of an evaluation."""
    count = len(episodes)
    successes = sum(episode.success for episode in episodes)
    low, high = wilson(successes, count)
    failures: dict[str, int] = {}
    for episode in episodes:
        if not episode.success:
            reason = episode.failure or "limit"
            failures[reason] = failures.get(reason, 0) + 1
    return EvaluationResult(
        version=version,
        successes=successes,
        episodes=count,
        success=successes / count,
        low=low,
        high=high,
        mean_steps=sum(episode.steps for episode in episodes) / count,
        mean_reward=math.fsum(episode.reward for episode in episodes) / count,
        failures=failures,
        contract_digest=contract_digest,
        software=software,
        results=episodes,
    )


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
