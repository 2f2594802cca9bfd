"""A simulator whose process stops in the middle of its answer; importable by worker processes."""

from __future__ import annotations

import gc
import os
import struct
import time
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from joynexus.simulation.interface import SimulatorOptions, StepResult
from tests.unit.env.fakes import CountingSimulator

STALLS = 2001


class StallingSimulator(CountingSimulator):
    def step_chunk(
        self, actions: npt.NDArray[np.float32], *, render: bool = True, final: bool = False, record: bool = False
    ) -> StepResult:
        if self._seed == STALLS:
            pipe = next(thing for thing in gc.get_objects() if isinstance(thing, Connection))
            os.write(pipe.fileno(), struct.pack("!i", 1000) + b"the first bytes")
            time.sleep(600)
        return super().step_chunk(actions, render=render, final=final, record=record)


def make_stalling(task: str, options: SimulatorOptions) -> StallingSimulator:
    return StallingSimulator(options)
