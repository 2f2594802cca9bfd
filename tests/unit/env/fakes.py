"""Simulators without physics whose seeds decide how they fail; importable by worker processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from joynexus.contract import Contract
from joynexus.simulation.interface import SimObservation, SimulatorError, SimulatorOptions, StepResult
from services.env.simulators import metaworld_tasks

HANGS, DIES, RAISES, HANGS_AT_RESET, EXPLODES, WORKS, OVERPAYS = range(1001, 1008)
TASK = "metaworld/reach-v3"  # any known name: the pool checks it


class CountingSimulator:
    """State = (seed, sum of the first action number); succeeds once that sum reaches 10."""

    def __init__(self, options: SimulatorOptions) -> None:
        self.contract: Contract = metaworld_tasks.contract(options)
        self.instruction = "count"
        self._seed, self._sum, self._steps = 0, 0.0, 0

    def reset(self, seed: int, *, render: bool = True) -> SimObservation:
        if seed == HANGS_AT_RESET:
            time.sleep(600)
        self._seed, self._sum, self._steps = seed, 0.0, 0
        return self._observe(render)

    def step_chunk(
        self, actions: npt.NDArray[np.float32], *, render: bool = True, final: bool = False, record: bool = False
    ) -> StepResult:
        if self._seed == HANGS:
            time.sleep(600)
        if self._seed == DIES:
            os._exit(1)
        if self._seed == RAISES:
            raise ZeroDivisionError("unstable physics")
        if self._seed == WORKS:
            until = time.process_time() + 0.25
            while time.process_time() < until:
                pass
        if self._seed == EXPLODES:
            self._sum = float("nan")
        rewards: list[float] = []
        frames = []
        for action in actions:
            self._sum += float(action[0])
            rewards.append(self._sum)
            self._steps += 1
            if record:
                frames.append(np.full((2, 2, 3), self._steps, np.uint8))
            if self._done():
                break
        solved, paid = self._sum >= 10, np.array(rewards, np.float32)
        if self._seed == OVERPAYS:
            paid[-1] = np.inf
        return StepResult(self._observe(render), paid, solved, self._done(), solved, tuple(frames))

    def close(self) -> None:
        pass

    def _done(self) -> bool:
        return self._sum >= 10 or self._steps >= self.contract.episode_limit

    def _observe(self, render: bool) -> SimObservation:
        images = (np.full((2, 2, 3), self._seed % 256, np.uint8),) if render else ()
        return SimObservation(np.array([self._seed, self._sum], np.float32), images)


def make_counting(task: str, options: SimulatorOptions) -> CountingSimulator:
    return CountingSimulator(options)


def make_impossible(task: str, options: SimulatorOptions) -> CountingSimulator:
    raise SimulatorError("no OpenGL library is installed")


def make_wrong(task: str, options: SimulatorOptions) -> CountingSimulator:
    raise ValueError("there is no camera 'front'")


def make_asking(task: str, options: SimulatorOptions) -> CountingSimulator:
    input("download the assets now? (y|n): ")
    raise AssertionError("nobody answers")


class LeakingSimulator(CountingSimulator):
    """Keeps at each reset as many MiB as its task's name ends in, or a file open if that is `file`."""

    def __init__(self, options: SimulatorOptions, leak: str) -> None:
        super().__init__(options)
        self._leak = leak
        self._kept: list[object] = []

    def reset(self, seed: int, *, render: bool = True) -> SimObservation:
        leak = self._leak
        self._kept.append(os.dup(0) if leak == "file" else np.ones((int(leak), 2**20), np.uint8))
        return super().reset(seed, render=render)


def make_leaking(task: str, options: SimulatorOptions) -> LeakingSimulator:
    return LeakingSimulator(options, task.partition("/")[2])


def make_endless(task: str, options: SimulatorOptions) -> CountingSimulator:
    time.sleep(600)
    raise AssertionError("unreachable")


def make_orphaned(task: str, options: SimulatorOptions) -> CountingSimulator:
    """The first time, by the file that the task's name ends in, who forked this process dies and takes it along."""
    mark = Path(task.partition("/")[2])
    if not mark.exists():
        mark.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    return CountingSimulator(options)


def make_deadly(task: str, options: SimulatorOptions) -> CountingSimulator:
    os._exit(1)
