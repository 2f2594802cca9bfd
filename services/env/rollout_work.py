"""Work of the `simulator` lane: episodes of one version in a simulator, or what a simulator is like.

In: `Rollout`s and `DescribeSimulator`s. Out: their answers; videos and trajectories as blobs. Never: a simulator made
anew while one that fits stands idle.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from common.failpoints import failpoint
from joynexus.simulation.asking import Asker
from joynexus.simulation.interface import Picture, SimulatorError
from joynexus.simulation.pool import SimulatorPool
from joynexus.simulation.work import describe_simulator, options_of, run_rollout
from joynexus.wire import ErrorCode, Failure, failure
from joynexus.wire.back import DescribeSimulator, Rollout, RolloutDone, SimulatorDescribed
from services.env.encoding import write_video
from services.env.simulators.registry import family_of
from services.env.warm_pools import WarmPools


class Blobs(Protocol):
    """What of `BlobAccess` this needs."""

    def put_bytes(self, data: bytes | memoryview) -> str:
        """Store a blob; returns its digest."""

    def put_file(self, path: Path, *, move: bool = True) -> tuple[str, int]:
        """Store a file; returns digest and size."""


class RolloutWork:
    """Does the work of the `simulator` lane.

    Args:
        pools: where simulators come from.
        blobs: where videos and trajectories go.
        scratch: folder for files that are deleted again.
        alive: called with each executed chunk of a task; raises if it is not wanted any more.
        child_busy: told the CPU seconds of the simulator's processes.
    """

    def __init__(
        self,
        pools: WarmPools,
        blobs: Blobs,
        scratch: Path,
        *,
        alive: Callable[[str], None] = lambda task: None,
        child_busy: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._pools, self._blobs, self._scratch = pools, blobs, scratch
        self._alive, self._child_busy = alive, child_busy
        scratch.mkdir(parents=True, exist_ok=True)

    def run(self, message: Rollout, ask: Asker) -> RolloutDone:
        """Run a page of episodes.

        Raises:
            JoyNexusError: what the master answered to a request to act; UNAVAILABLE if the disk is full.
        """
        try:
            with self._lend(message, len(message.seeds)) as (pool, software, alive):
                done = run_rollout(message, pool, ask, self, software=software, alive=alive)
                failpoint("env.between_blob_and_answer")
                return done
        except (SimulatorError, ValueError) as error:
            return RolloutDone(task=message.task, attempt=message.attempt, error=_failure(error))

    def describe(self, message: DescribeSimulator) -> SimulatorDescribed:
        """Say what a task is like."""
        try:
            with self._lend(message, message.warmup_episodes or 1) as (pool, software, alive):
                return describe_simulator(message, pool, software=software, alive=alive)
        except (SimulatorError, ValueError) as error:
            return SimulatorDescribed(task=message.task, attempt=message.attempt, error=_failure(error))

    @contextmanager
    def _lend(
        self, message: Rollout | DescribeSimulator, rows: int
    ) -> Iterator[tuple[SimulatorPool, dict[str, str], Callable[[], None]]]:
        """Lend environments as the message wants them, and what there is to know and to call beside."""
        alive = partial(self._alive, message.task)
        software = family_of(message.env).software()
        lent = self._pools.lend(message.env, options_of(message), rows=rows, alive=alive, busy=self._child_busy)
        with lent as pool:
            yield pool, software, alive

    def put_bytes(self, data: bytes) -> str:
        """Store a blob; returns its digest."""
        failpoint("env.before_blob")
        return self._blobs.put_bytes(data)

    def put_video(self, frames: tuple[Picture, ...], fps: float) -> tuple[str, int]:
        """Store a video; returns digest and size."""
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            path = Path(folder) / "episode.mp4"
            write_video(path, frames, fps)
            return self._blobs.put_file(path, move=True)


def _failure(error: SimulatorError | ValueError) -> Failure:
    return failure(ErrorCode.UNAVAILABLE if isinstance(error, SimulatorError) else ErrorCode.INVALID, str(error))
