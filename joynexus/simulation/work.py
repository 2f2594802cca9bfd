"""The work of one message of the `simulator` lane, for whoever runs simulators: the env service or a tenant's machine.

In: a `Rollout` or `DescribeSimulator`, and a pool of the task's environments. Out: its answer; videos and trajectories
as blobs. Never: an episode under a contract that differs from the policy's, or part of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from joynexus.contract import Contract, why_unfit
from joynexus.simulation.asking import Answer, Asker
from joynexus.simulation.collecting import Collector
from joynexus.simulation.episodes import Actions, EpisodeResult, Question, Rows, run_episodes
from joynexus.simulation.interface import Picture, SimulatorOptions
from joynexus.simulation.trajectories import pack
from joynexus.simulation.warm_up import measure_statistics
from joynexus.wire import ErrorCode, JoyNexusError, failure
from joynexus.wire.back import Collect, DescribeSimulator, Rollout, RolloutDone, SimulatorDescribed
from joynexus.wire.front import EpisodeResult as EpisodeReport


class TaskRows(Rows, Protocol):
    """What of a `SimulatorPool` this needs."""

    @property
    def contract(self) -> Contract:
        """Of the environments."""

    @property
    def instruction(self) -> str:
        """Task text."""


class Store(Protocol):
    """Where results go."""

    def put_bytes(self, data: bytes) -> str:
        """Store a blob; returns its digest."""

    def put_video(self, frames: tuple[Picture, ...], fps: float) -> tuple[str, int]:
        """Store a video; returns digest and size."""


def options_of(message: Rollout | DescribeSimulator) -> SimulatorOptions:
    """Return how to make the environments that a message asks for: cameras and limit are the policy's, if it has any.

    Episodes with dense rewards do not end when the task is solved: who is paid for each step would rather not solve it.
    """
    if isinstance(message, DescribeSimulator):
        return SimulatorOptions(cameras=message.cameras, episode_limit=message.episode_limit)
    policy = message.contract
    return SimulatorOptions(
        cameras=policy.cameras,
        episode_limit=message.episode_limit or policy.episode_limit,
        end_at_success=message.collect is None or message.collect.reward == "success",
    )


def run_rollout(
    message: Rollout,
    pool: TaskRows,
    ask: Asker,
    store: Store,
    *,
    software: Mapping[str, str],
    alive: Callable[[], None] = lambda: None,
) -> RolloutDone:
    """Run a page of episodes.

    Args:
        message: what to run.
        pool: made with `options_of(message)`.
        ask: asks the policy; explores if `message.collect` is set.
        store: where videos and trajectories go.
        software: versions of what makes the numbers, for the record.
        alive: called with each executed chunk and stored video; raises if the page is not wanted any more.

    Raises:
        JoyNexusError: what the master answered to a request to act; UNAVAILABLE if the disk is full.
        SimulatorError: if the simulator cannot be made.
        ValueError: if the page contradicts itself, or episodes would never end.
    """
    contract, instruction = _limited(pool.contract), pool.instruction
    difference = why_unfit(message.contract, contract)
    if difference is not None:
        error = failure(ErrorCode.CONTRACT_MISMATCH, difference)
        return RolloutDone(task=message.task, attempt=message.attempt, error=error)

    def ask_all(questions: list[Question]) -> Answer:
        states = np.stack([question.observation.state for question in questions])
        views = zip(*(question.observation.images for question in questions), strict=True)
        draws = [question.draw for question in questions]
        return ask(states, [np.stack(view) for view in views], [instruction] * len(questions), draws)

    def act(questions: list[Question]) -> Actions:
        return ask_all(questions).actions

    collect = message.collect
    collector = Collector(ask_all, message.version, collect.reward) if collect else None
    results = run_episodes(
        pool,
        collector.act if collector else act,
        message.seeds,
        draws=message.draws,
        episode_limit=contract.episode_limit,
        execute=message.execute,
        render=bool(contract.cameras),
        record=frozenset(message.videos) if contract.cameras else frozenset(),
        ask_last=collect is not None and collect.value,
        on_step=collector.on_step if collector else None,
        alive=alive,
    )
    trajectories, nbytes = "", 0
    videos: list[tuple[str, int]] = []
    try:
        if collector:
            collected = collector.trajectories(results, message.contract.digest(), instruction)
            if collected is not None:
                blob = pack(collected)
                trajectories, nbytes = store.put_bytes(blob), len(blob)
        for result in results:
            alive()
            videos.append(store.put_video(result.frames, contract.rate_hz) if result.frames else ("", 0))
    except OSError as error:
        sentence = f"what was collected could not be stored ({error.strerror or error}): it is done again later"
        raise JoyNexusError(failure(ErrorCode.UNAVAILABLE, sentence, retry_after_ms=5000)) from error
    return RolloutDone(
        task=message.task,
        attempt=message.attempt,
        episodes=tuple(_report(result, video, collect) for result, (video, _) in zip(results, videos, strict=True)),
        contract_digest=contract.digest(),
        software=dict(software),
        videos=tuple(video for video in videos if video[0]),
        trajectories=trajectories,
        trajectories_nbytes=nbytes,
    )


def _limited(contract: Contract) -> Contract:
    """Return the contract of environments whose episodes end for certain; ValueError otherwise."""
    if contract.episode_limit < 1:
        raise ValueError("the environment's episodes have no end: set episode_limit in the job or in its contract")
    return contract


def _report(result: EpisodeResult, video: str, collect: Collect | None) -> EpisodeReport:
    """Return what the master hears of an episode: the reward is the one that is trained on."""
    by_success = collect is not None and collect.reward == "success"
    return EpisodeReport(
        seed=result.seed,
        success=result.success,
        steps=result.steps,
        reward=float(result.success) if by_success else result.reward,
        failure=result.failure,
        video=video,
    )


def describe_simulator(
    message: DescribeSimulator,
    pool: TaskRows,
    *,
    software: Mapping[str, str],
    alive: Callable[[], None] = lambda: None,
) -> SimulatorDescribed:
    """Say what a task is like, and measure what its states are like.

    Args:
        message: what to describe.
        pool: made with `options_of(message)`.
        software: versions of what makes the numbers, for the record.
        alive: called with each executed step; raises if nobody wants to know any more.

    Raises:
        SimulatorError: if the simulator cannot be made.
        ValueError: if its states cannot be measured, or episodes would never end.
    """
    contract, instruction = _limited(pool.contract), pool.instruction
    statistics = (
        measure_statistics(pool, contract, episodes=message.warmup_episodes, seed=message.seed, alive=alive)
        if message.warmup_episodes
        else None
    )
    return SimulatorDescribed(
        task=message.task,
        attempt=message.attempt,
        contract=contract,
        instruction=instruction,
        statistics=statistics,
        software=dict(software),
    )
