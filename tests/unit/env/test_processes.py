"""Promises of worker processes and of who forks them, where the machine is at its limits."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from joynexus.simulation import process
from joynexus.simulation.interface import SimObservation, SimulatorError, StepResult
from joynexus.simulation.pool import Deadlines, Lost, SimulatorPool
from tests.unit.env import fakes, stalling
from tests.unit.env.test_pool import wait_until_gone

ONES = np.ones((4, 4), np.float32)


def test_a_process_that_stops_in_the_middle_of_its_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_STALL_S", 0.5)
    deadlines = Deadlines(step_s=2.0)
    with SimulatorPool(fakes.TASK, 2, processes=2, make=stalling.make_stalling, deadlines=deadlines) as pool:
        pool.reset({0: stalling.STALLS, 1: 1})
        results = pool.step({0: ONES, 1: ONES})
        assert results[0] == Lost("took longer than 2 s to step")
        assert isinstance(results[1], StepResult)
        assert isinstance(pool.reset({0: 1})[0], SimObservation)


def test_where_no_process_can_be_forked_it_is_said_and_those_that_run_go_on() -> None:
    preload = ("tests.unit.env.no_more_processes",)
    with SimulatorPool(fakes.TASK, 1, make=fakes.make_counting, preload=preload) as pool:
        pool.reset({0: 1})
        with pytest.raises(SimulatorError, match="no process can be started for a simulator: Resource temporarily"):
            SimulatorPool(fakes.TASK, 1, make=fakes.make_counting, preload=preload)
        assert isinstance(pool.step({0: ONES})[0], StepResult)


def test_cpu_time_of_processes_that_died_together_is_counted_for_each() -> None:
    """The first is replaced before anybody looks at the second."""
    with SimulatorPool(fakes.TASK, 2, processes=2, make=fakes.make_counting) as pool:
        pool.reset({0: fakes.WORKS, 1: fakes.WORKS})
        pool.step({0: ONES, 1: ONES})
        died = pool.pids
        used = sum(map(process.cpu_s_of, died))
        for pid in died:
            os.kill(pid, signal.SIGKILL)
        wait_until_gone(died)
        assert all(isinstance(result, Lost) for result in pool.step({0: ONES, 1: ONES}).values())
        assert not set(pool.pids) & set(died)
        assert pool.cpu_s() >= used >= 0.4  # of 0.5, less what the kernel's clock ticks cut off
