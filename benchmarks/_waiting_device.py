"""Devices that wait: what a role computes takes as long as the committed table says, at a pace.

In: seconds of the table, real work (small models, a few numbers) done meanwhile. Out: real time passed, busy seconds.
Never: less time than the table says, two pieces of work at once on one device, or lateness that is not counted.

Real work hides behind the wait as long as it is shorter; by how much it was longer is `late_s`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from benchmarks._times import Head, Simulator, Times
from joynexus.contract import Camera, Contract
from joynexus.simulation.episodes import Actions
from joynexus.simulation.interface import Picture, SimObservation, SimulatorOptions, StepResult
from joynexus.vla.backbones.base import Backbone
from joynexus.vla.busy import BusyClock, Elapsed, Overhead
from joynexus.vla.feature import IMAGE, LAST, Observation, VLAFeature
from joynexus.vla.feature_store import FeatureStore
from joynexus.vla.shared_forward import Need, SharedForward
from services.env.simulators.family import Family

BACKBONE = "vla-4b"
SIDE, STATE, ACTION, HIDDEN = 8, 8, 7, 8
"""Pictures and vectors are small: what they stand for takes its time from the table."""
CAMERA = Camera(name="front", height=SIDE, width=SIDE)
INSTRUCTION = "go"


class Device:
    """One or several devices that work as one, each on its part.

    A piece of work is done within `hold`: what it is made of is charged, the real work is done meanwhile, and what is
    left of the time charged then passes.

    Args:
        times: the table.
        pace: seconds of the table that pass in a real one.
        parallel: devices.

    Attributes:
        busy_s: device seconds in which they computed, at the pace.
        planned_s, late_s: real seconds that all pieces of work were to take, and took longer.
    """

    def __init__(self, times: Times, pace: float, parallel: int = 1) -> None:
        self.times = times
        self.pace = pace
        self.parallel = parallel
        self.busy_s = self.planned_s = self.late_s = 0.0
        self._began = self._owed_s = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def hold(self, computes_s: float = 0.0) -> Iterator[None]:
        """Hold the devices while the block does the real work of a piece, and until the time charged has passed."""
        with self._lock:
            self._began, self._owed_s = time.perf_counter(), 0.0
            self.charge(computes_s)
            try:
                yield
            finally:
                self.settle()
                self.planned_s += self._owed_s
                self.late_s += time.perf_counter() - self._began - self._owed_s

    def charge(self, computes_s: float, waits_s: float = 0.0) -> None:
        """Count a part of the piece in hand, in seconds of the table; waiting for a disk is not busy."""
        self._owed_s += (computes_s + waits_s) / self.pace
        self.busy_s += computes_s / self.pace * self.parallel

    def settle(self) -> None:
        """Sleep until the time charged so far for this piece has passed."""
        sleep_until(self._began + self._owed_s)

    def share(self, rows: int) -> int:
        """Return the rows of one device, if they are divided."""
        return math.ceil(rows / self.parallel)

    def clock(self, device: torch.device | str = "cpu") -> DeviceClock:
        """Make what an engine measures busy time by; which device torch uses does not matter."""
        return DeviceClock(self)


def sleep_until(at: float) -> None:
    """Sleep until a time of `time.perf_counter`."""
    time.sleep(max(0.0, at - time.perf_counter()))


class DeviceClock(BusyClock):
    """Measures what a device computed, not what this process did."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._held = device

    def start(self) -> Elapsed:
        """Begin a measurement."""
        began = self._held.busy_s
        return lambda: self._held.busy_s - began

    def overhead(self) -> Overhead:
        """Count nothing between measurements."""
        return Overhead(counts=False)


class StandInBackbone(Backbone):
    """A forward is charged as the table's; a feature is one token, made of the picture's numbers."""

    kernel = "waits"

    def __init__(self, device: Device) -> None:
        super().__init__(
            name=BACKBONE, digest="d" * 32, hidden_size=HIDDEN, device=torch.device("cpu"), dtype=torch.float32
        )

        self._held = device

    def check_layers(self, layers: Collection[int]) -> None:
        """Refuse all but the last layer; see `Backbone.check_layers`."""
        if set(layers) != {LAST}:
            raise ValueError("this backbone has only its last layer")

    def tokens(self, observation: Observation) -> int:
        """Count tokens: one."""
        return 1

    def _forward(self, observations: Sequence[Observation], layers: tuple[int, ...]) -> list[VLAFeature]:
        self._held.charge(self._held.times.forward(self._held.share(len(observations))))
        return [self._one(observation) for observation in observations]

    def _one(self, observation: Observation) -> VLAFeature:
        seen = blake2b(b"".join(image.tobytes() for image in observation.images), digest_size=HIDDEN).digest()
        hidden = torch.from_numpy(np.frombuffer(seen, np.uint8).astype(np.float32)[None] / 128 - 1)
        return VLAFeature({LAST: hidden}, torch.full((1,), IMAGE, dtype=torch.uint8), self.digest)


def waiting_forward(device: Device) -> type[SharedForward]:
    """Return the shared forward on a device: what is read from disk and written to it is charged."""
    times = device.times

    class WaitingForward(SharedForward):
        def look_up(self, *args: Any, **kwargs: Any) -> Need:
            need = super().look_up(*args, **kwargs)
            read = len(need.found) if isinstance(need.store, FeatureStore) else 0
            device.charge(0.0, device.share(read) * times.feature_read_row_s)
            return need

        def _forward(self, keys: Sequence[str], wanting: Any, *, again: bool = False) -> Sequence[str]:
            kept = sum(any(isinstance(need.store, FeatureStore) for need in wanting[key]) for key in keys)
            # Nobody published what writing takes; reading is limited by the same disk.
            device.charge(0.0, device.share(kept) * times.feature_read_row_s)
            return super()._forward(keys, wanting, again=again)

    return WaitingForward


def train_s(device: Device, head: Head, rows: int, micro: int, steps: int) -> float:
    """Return what the private part of training on some rows takes: micro-batches divided over devices, then steps."""
    times = device.times
    if rows <= micro:
        return times.train(head, device.share(rows)) + steps * times.optim_step_s
    micros = device.share(math.ceil(rows / micro))
    return micros * times.train(head, micro) + steps * times.optim_step_s


class WaitingFamily(Family):
    """Tasks of a simulator of the table."""

    rows = 64
    example = "task"

    def __init__(self, name: Simulator) -> None:
        self.name = name  # type: ignore[misc]  # one class for both families

    def tasks(self) -> tuple[str, ...]:
        """Name its one task."""
        return ("task",)

    def missing(self) -> str:
        """Nothing is missing."""
        return ""

    def make(self, task: str, options: SimulatorOptions) -> Any:
        """Never called: `WaitingPools` has the environments in this process."""
        raise NotImplementedError


class WaitingPools:
    """Stands for `WarmPools`: environments of one device, which steps the rows of one rollout at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device

    @contextmanager
    def lend(
        self,
        task: str,
        options: SimulatorOptions,
        *,
        rows: int = 1,
        alive: Callable[[], None] = lambda: None,
        busy: Callable[[float], None] = lambda seconds: None,
    ) -> Iterator[WaitingPool]:
        """Lend as many environments as are of use; `busy` is told the device's seconds for them."""
        pool = WaitingPool(self._device, task.partition("/")[0], options, rows)
        try:
            yield pool
        finally:
            busy(pool.cpu_s())

    def close(self) -> None:
        """Nothing is open."""


class WaitingPool:
    """Environments whose states are sums of actions, and whose pictures no other moment has."""

    instruction = INSTRUCTION

    def __init__(self, device: Device, simulator: str, options: SimulatorOptions, rows: int) -> None:
        assert simulator in ("libero", "maniskill")
        self.rows = rows
        self.contract = Contract(
            robot=simulator,
            cameras=(CAMERA,) if options.cameras is None else options.cameras,
            state_dim=STATE,
            action_dim=ACTION,
            action_low=(-1.0,) * ACTION,
            action_high=(1.0,) * ACTION,
            rate_hz=10.0,
            episode_limit=options.episode_limit,
        )
        self._device = device
        self._simulator: Simulator = simulator  # type: ignore[assignment]  # as asserted
        self._busy_s = 0.0
        self._seeds: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._states: dict[int, np.ndarray[Any, np.dtype[np.float32]]] = {}

    def reset(self, seeds: Mapping[int, int], *, render: bool = True) -> dict[int, SimObservation]:
        """Begin episodes; the table counts that with their steps."""
        for row, seed in seeds.items():
            self._seeds[row], self._steps[row] = seed, 0
            self._states[row] = np.random.default_rng(seed).standard_normal(STATE, np.float32)
        return {row: self._observe(row, render=render) for row in seeds}

    def step(
        self,
        actions: Mapping[int, Actions],
        *,
        render: bool = True,
        final: bool = False,
        record: Collection[int] = (),
    ) -> dict[int, StepResult]:
        """Execute a chunk in each row, in the device's time; a warm-up, which draws nothing, is left out of it."""
        chunk = max(len(given) for given in actions.values())
        seconds = self._device.times.simulate(self._simulator, len(actions), chunk) if render else 0.0
        with self._device.hold(seconds):
            results = {row: self._step(row, given, render=render) for row, given in actions.items()}
        self._busy_s += seconds / self._device.pace
        return results

    def cpu_s(self) -> float:
        """Return the device's busy seconds for these environments."""
        return self._busy_s

    def _step(self, row: int, given: Actions, *, render: bool) -> StepResult:
        steps = min(len(given), self.contract.episode_limit - self._steps[row])
        self._steps[row] += steps
        self._states[row] = self._states[row] * np.float32(0.9) + np.resize(given[:steps].mean(0), STATE)
        rewards = np.tanh(given[:steps, 0]).astype(np.float32)
        done = self._steps[row] >= self.contract.episode_limit
        return StepResult(self._observe(row, render=render), rewards, success=False, done=done, terminated=False)

    def _observe(self, row: int, *, render: bool) -> SimObservation:
        state = self._states[row].astype(np.float32)
        images: tuple[Picture, ...] = ()
        if render and self.contract.cameras:
            images = (picture(self._seeds[row], self._steps[row], state.tobytes()),)
        return SimObservation(state, images)


def picture(*moment: object) -> Picture:
    """Return a picture that stands for this moment alone."""
    name = blake2b(repr(moment).encode(), digest_size=48).digest()
    return np.frombuffer(name * (SIDE * SIDE * 3 // 48), np.uint8).reshape(SIDE, SIDE, 3)
