"""Devices that wait: never less than the table's time, one piece of work at a time, and honest about both."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from benchmarks import _times
from benchmarks._isolated import Devices
from benchmarks._waiting_device import (
    ACTION,
    CAMERA,
    Device,
    StandInBackbone,
    WaitingPool,
    WaitingPools,
    train_s,
    waiting_forward,
)
from benchmarks._waiting_jobs import TENANTS, make_jobs, spec_of
from benchmarks._waiting_roles import devices_progress
from joynexus.simulation import work
from joynexus.simulation.interface import SimulatorOptions
from joynexus.specs import GrpoSpec, RlSpec
from joynexus.vla.feature import Observation
from joynexus.vla.feature_memory import FeatureMemory
from joynexus.wire.back import DescribeSimulator

TIMES = _times.load()
PACE = 100.0
SEEN = SimulatorOptions(cameras=(CAMERA,), episode_limit=16)


def device(parallel: int = 1) -> Device:
    return Device(TIMES, PACE, parallel)


def pool(held: Device, *, rows: int = 2, limit: int = 16) -> WaitingPool:
    return WaitingPool(held, "libero", SimulatorOptions(cameras=(CAMERA,), episode_limit=limit), rows)


def test_work_takes_the_tables_time_at_the_pace_and_is_busy_from_its_start() -> None:
    held = device(parallel=2)
    elapsed, began = held.clock().start(), time.perf_counter()
    with held.hold(2.0):
        held.charge(0.0, 1.0)
        within = elapsed()
    assert time.perf_counter() - began >= 3.0 / PACE
    assert within == elapsed() == pytest.approx(2 * 2.0 / PACE)  # two devices; waiting for a disk is not busy
    assert held.planned_s == pytest.approx(3.0 / PACE)


def test_real_work_that_takes_longer_is_counted_as_late() -> None:
    held = device()
    with held.hold(0.0):
        time.sleep(0.002)
    assert held.late_s >= 0.002


def test_a_device_does_one_piece_of_work_at_a_time() -> None:
    held = device()

    def work() -> None:
        with held.hold(1.0):
            pass

    began = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.perf_counter() - began >= 3.0 / PACE


def test_a_sample_that_is_kept_is_not_forwarded_again() -> None:
    held = device()
    forward = waiting_forward(held)(StandInBackbone(held), FeatureMemory(1 << 20), held.clock())
    seen = [Observation((np.full((8, 8, 3), shade, np.uint8),), "go") for shade in range(3)]
    keys = [forward.key("tenant:a", observation) for observation in seen]
    charged, began = [], time.perf_counter()
    for _ in range(2):
        need = forward.look_up(keys, seen.__getitem__)
        with held.hold():
            forward.complete([need])
        assert len(need.features()) == 3
        charged.append(need.busy_s)
    assert time.perf_counter() - began >= TIMES.forward(3) / PACE
    assert charged == [pytest.approx(TIMES.forward(3) / PACE), 0.0]
    assert held.busy_s == pytest.approx(TIMES.forward(3) / PACE)


def test_devices_that_work_as_one_divide_a_batch_and_its_micro_batches() -> None:
    assert train_s(device(2), "groot", 32, 32, 1) == TIMES.train("groot", 16) + TIMES.optim_step_s
    assert train_s(device(2), "oft", 640, 40, 1) == 8 * TIMES.train("oft", 40) + TIMES.optim_step_s


def test_episodes_end_at_their_limit_and_no_two_moments_look_alike() -> None:
    held = device()
    rows = pool(held)
    seen = [each.images[0].tobytes() for each in rows.reset({0: 1, 1: 2}).values()]
    for chunk in range(2):
        chunks = {row: np.full((8, ACTION), 0.1 * (row + chunk), np.float32) for row in range(2)}
        results = rows.step(chunks)
        seen += [result.observation.images[0].tobytes() for result in results.values()]
        assert [result.done for result in results.values()] == [chunk == 1] * 2
    assert len(set(seen)) == len(seen)
    assert rows.cpu_s() == pytest.approx(held.busy_s) == pytest.approx(2 * TIMES.simulate("libero", 2, 8) / PACE)


def test_an_env_service_is_charged_for_its_devices_time_and_not_for_its_own() -> None:
    held, progress = device(), devices_progress()
    described = DescribeSimulator(task="t", attempt=1, tenant="a", env="libero/task", warmup_episodes=4)
    with progress.phase("working", deadline_s=60) as busy_s:
        with WaitingPools(held).lend("libero/task", SEEN, rows=2, busy=progress.add_busy) as rows:
            answer = work.describe_simulator(described, rows, software={})
            assert answer.statistics is not None
        assert busy_s() == held.busy_s == 0.0  # a warm-up draws nothing, which takes no device's time
        with WaitingPools(held).lend("libero/task", SEEN, rows=2, busy=progress.add_busy) as rows:
            rows.reset({0: 1, 1: 2})
            rows.step({row: np.full((8, ACTION), 0.1, np.float32) for row in range(2)})
        assert busy_s() == pytest.approx(held.busy_s) == pytest.approx(TIMES.simulate("libero", 2, 8) / PACE)


def test_the_same_seeds_and_actions_give_the_same_episode() -> None:
    ends = []
    for _ in range(2):
        rows = pool(device(), rows=1)
        rows.reset({0: 7})
        ends.append(rows.step({0: np.full((8, ACTION), 0.3, np.float32)})[0].observation)
    assert ends[0].state.tobytes() == ends[1].state.tobytes()
    assert ends[0].images[0].tobytes() == ends[1].images[0].tobytes()


def test_jobs_take_about_equally_long_alone_and_are_those_of_the_recipes() -> None:
    whole = Devices(2, 2, 4)
    jobs = make_jobs(TIMES, whole, updates=4, rollout_epochs=4)
    seconds = [jobs.alone(TIMES, tenant, whole).seconds for tenant in TENANTS]
    assert max(seconds) < 1.05 * min(seconds)
    libero, maniskill = (spec_of(jobs, tenant) for tenant in TENANTS[:2])
    assert isinstance(libero, RlSpec)
    assert isinstance(maniskill, RlSpec)
    assert isinstance(libero.algorithm, GrpoSpec)
    assert libero.episodes * libero.episode_limit == 64 * 4 * 240
    assert maniskill.episodes * maniskill.episode_limit == 128 * 160
    assert {libero.algorithm.minibatch, maniskill.algorithm.minibatch} == set(jobs.micro)
