"""Work of the `simulator` lane: episodes of one version in a simulator.

In: `Rollout`s. Out: `RolloutDone`s, videos as blobs. Never: an episode under a contract that differs from the policy's,
or a simulator made anew while one that fits stands idle.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from joynexus.contract import Contract, first_difference
from joynexus.simulation.episodes import Actions, Question, run_episodes
from joynexus.simulation.interface import Picture, SimulatorError, SimulatorOptions
from joynexus.wire import ErrorCode, failure
from joynexus.wire.back import Rollout, RolloutDone
from joynexus.wire.front import EpisodeResult
from services.env.asking import Asker
from services.env.encoding import write_video
from services.env.simulators.registry import contract_of
from services.env.warm_pools import WarmPools

_PACKAGES = ("metaworld", "mujoco", "numpy")


class VideoStore(Protocol):
    """What of `BlobAccess` this needs."""

    def put_file(self, path: Path, *, move: bool = True) -> tuple[str, int]:
        """Store a file; returns digest and size."""


class RolloutWork:
    """Does the work of the `simulator` lane.

    Args:
        pools: where simulators come from.
        videos: where videos go.
        scratch: folder for files that are deleted again.
        alive: called with each executed chunk; raises if the task is not wanted any more.
        child_busy: told the CPU seconds of the simulator's process.
    """

    def __init__(
        self,
        pools: WarmPools,
        videos: VideoStore,
        scratch: Path,
        *,
        alive: Callable[[str], None] = lambda task: None,
        child_busy: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._pools, self._videos, self._scratch = pools, videos, scratch
        self._alive, self._child_busy = alive, child_busy
        scratch.mkdir(parents=True, exist_ok=True)

    def run(self, message: Rollout, ask: Asker) -> RolloutDone:
        """Run a page of episodes.

        Raises:
            JoyNexusError: what the master answered to a request to act.
        """
        options, contract, problem = _environment(message)
        if contract is None:
            return RolloutDone(
                task=message.task, attempt=message.attempt, error=failure(ErrorCode.CONTRACT_MISMATCH, problem)
            )
        try:
            return self._run(message, ask, options, contract)
        except (SimulatorError, ValueError) as error:
            code = ErrorCode.UNAVAILABLE if isinstance(error, SimulatorError) else ErrorCode.INVALID
            return RolloutDone(task=message.task, attempt=message.attempt, error=failure(code, str(error)))

    def _run(self, message: Rollout, ask: Asker, options: SimulatorOptions, contract: Contract) -> RolloutDone:
        busy = time.thread_time()
        with self._pools.lend(message.env, options) as pool:
            instruction, child = pool.instruction, pool.cpu_s()

            def act(questions: list[Question]) -> Actions:
                self._alive(message.task)
                states = np.stack([question.observation.state for question in questions])
                views = zip(*(question.observation.images for question in questions), strict=True)
                draws = [question.draw for question in questions]
                return ask(states, [np.stack(view) for view in views], [instruction] * len(questions), draws)

            results = run_episodes(
                pool,
                act,
                message.seeds,
                episode_limit=contract.episode_limit,
                execute=min(message.execute, message.chunk),
                render=bool(contract.cameras),
                record=frozenset(message.videos) if contract.cameras else frozenset(),
                on_step=lambda *_: self._alive(message.task),
                on_episode=lambda _: self._alive(message.task),
            )
            child = pool.cpu_s() - child
        self._child_busy(child)
        episodes, videos = [], []
        for result in results:
            video = ""
            if result.frames:
                video, nbytes = self._store_video(result.frames, contract.rate_hz)
                videos.append((video, nbytes))
            episodes.append(
                EpisodeResult(
                    seed=result.seed,
                    success=result.success,
                    steps=result.steps,
                    reward=result.reward,
                    failure=result.failure,
                    video=video,
                )
            )
        return RolloutDone(
            task=message.task,
            attempt=message.attempt,
            episodes=tuple(episodes),
            contract_digest=contract.digest(),
            software=software(),
            videos=tuple(videos),
            busy_s=time.thread_time() - busy + child,
        )

    def _store_video(self, frames: tuple[Picture, ...], fps: float) -> tuple[str, int]:
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            path = Path(folder) / "episode.mp4"
            write_video(path, frames, fps)
            return self._videos.put_file(path, move=True)


def _environment(message: Rollout) -> tuple[SimulatorOptions, Contract | None, str]:
    """Return how to run the task for this policy and the environment's contract, or None and why it cannot act there.

    Cameras are set up as the policy's contract has them. The episode limit is the evaluation's choice, so that it is
    left out of the comparison.
    """
    policy = message.contract
    same = SimulatorOptions(cameras=policy.cameras, episode_limit=policy.episode_limit)
    chosen = SimulatorOptions(cameras=policy.cameras, episode_limit=message.episode_limit or policy.episode_limit)
    try:
        difference = first_difference(policy, contract_of(message.env, same))
        contract = contract_of(message.env, chosen)
    except ValueError as error:
        return chosen, None, str(error)
    return chosen, None if difference else contract, difference or ""


def software() -> dict[str, str]:
    """Return the versions that numbers of a simulator depend on, and how it draws."""
    versions = {"renderer": os.environ.get("MUJOCO_GL", "")}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
