"""Roles that ship, on devices that wait: the services as they are, with their computing replaced where it happens.

In: which role, at which pace, on how many devices. Out: a process that serves until it is told to end, and then one
file that says how long its devices were held, and by how much too long. Never: another protocol, scheduler, engine or
store of features than those that ship. What is replaced: the backbone (a stand-in; the shared forward waits), private
parts (they wait beside the real ones, which work on small modules), simulators (they wait), and the clock of busy time.

A process has one role and one device, so names of the services' modules are set once, before the service starts.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks import _times
from benchmarks._times import Head
from benchmarks._waiting_device import (
    Device,
    StandInBackbone,
    WaitingFamily,
    WaitingPools,
    sleep_until,
    train_s,
    waiting_forward,
)
from common import telemetry
from common.progress import Progress
from common.runtime import WorkerRuntime
from common.settings import EnvSettings, InferenceSettings, TrainerSettings, load_settings
from joynexus.vla import numerics, startup
from joynexus.wire.back import RlEpoch
from services.env import service as env
from services.env.simulators.registry import FAMILIES
from services.inference import core as inference_core
from services.inference import service as inference
from services.trainer import core as trainer_core
from services.trainer import service as trainer
from services.trainer import slots
from services.trainer.ops import Ops

Kind = Literal["trainer", "inference", "env"]


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process.

    Attributes:
        pace: seconds of the table in a real one.
        parallel: devices that work as one (a trainer of a framework that divides batches).
        micro: rows of a micro-batch, by rows of a minibatch.
        settings: of the service, by name.
        report: file that it leaves behind.
    """

    kind: Kind
    pace: float
    parallel: int
    micro: dict[int, int]
    settings: dict[str, str]
    report: Path


def serve(role: Role) -> None:
    """Be a role until SIGTERM."""
    numerics.configure(1)
    os.environ.update({f"JOYNEXUS_{name.upper()}": value for name, value in role.settings.items()})
    telemetry.configure(role.kind, level="warning")
    device = Device(_times.load(), role.pace, role.parallel)
    _replace(startup, load_backbone=lambda *args, **kwargs: StandInBackbone(device))
    match role.kind:
        case "trainer":
            _let_trainer_wait(device, role.micro)
            trainer.run(load_settings(TrainerSettings))
        case "inference":
            _let_inference_wait(device)
            inference.run(load_settings(InferenceSettings))
        case "env":
            FAMILIES.clear()
            FAMILIES.update(libero=WaitingFamily("libero"), maniskill=WaitingFamily("maniskill"))
            _replace(env, WarmPools=lambda limit, deadlines: WaitingPools(device))
            _replace(env, WorkerRuntime=partial(WorkerRuntime, progress=devices_progress()))
            env.run(load_settings(EnvSettings))
    role.report.write_text(json.dumps({"planned_s": device.planned_s, "late_s": device.late_s}))


def devices_progress() -> Progress:
    """Return the progress of an env service that leaves out the CPU time of its process, which is no device's."""
    return Progress(cpu=lambda: 0.0)


def _let_trainer_wait(device: Device, micro: dict[int, int]) -> None:
    times, real_open = device.times, slots.open_slot
    waits = {"publish": times.publish_s, "checkpoint": times.checkpoint_s}

    class WaitingOps(Ops):
        def do(self, slot: Any, item: Any) -> Any:
            device.charge(times.optim_step_s if item.kind == "optim_step" else 0.0, waits.get(item.kind, 0.0))
            return super().do(slot, item)

        def train(self, slot: Any, item: Any, batch: Any, features: Any) -> Any:
            rows = each = len(features)
            steps = int(item.kind == "train_step")
            if isinstance(item.rl, RlEpoch):
                minibatch = item.rl.algorithm.minibatch
                steps, each = math.ceil(rows / minibatch), micro[minibatch]
            device.charge(train_s(device, _head(slot.spec.head), rows, each, steps))
            return super().train(slot, item, batch, features)

    class WaitingEngine(trainer_core.TrainerEngine):
        def run(self, group: Any, buffers: Any = ()) -> Iterator[Any]:
            with device.hold():
                for answer in super().run(group, buffers):
                    device.settle()  # each answer leaves as soon as its own part is done
                    yield answer

    def open_slot(*args: Any) -> Any:
        device.charge(0.0, times.page_in_s)
        return real_open(*args)

    forward = waiting_forward(device)
    _replace(trainer_core, BusyClock=device.clock, Ops=WaitingOps, SharedForward=forward, open_slot=open_slot)
    _replace(trainer, TrainerEngine=WaitingEngine)


def _let_inference_wait(device: Device) -> None:
    times, real_actions = device.times, inference_core._actions

    def actions(request: Any, packer: Any) -> Any:
        device.charge(times.act(_head(request.served.policy.spec.head)))
        return real_actions(request, packer)

    class WaitingEngine(inference_core.PredictEngine):
        def predict(self, *args: Any) -> Any:
            with device.hold():
                return super().predict(*args)

        def load(self, offer: Any) -> Any:
            until = time.perf_counter() + times.apply_s / device.pace
            answer = super().load(offer)
            sleep_until(until)  # on its own thread: this does not hold the device
            return answer

    _replace(inference_core, BusyClock=device.clock, SharedForward=waiting_forward(device), _actions=actions)
    _replace(inference, PredictEngine=WaitingEngine)


def _replace(module: object, **names: object) -> None:
    """Let a module use something else under names that it has."""
    for name, value in names.items():
        assert hasattr(module, name)
        setattr(module, name, value)


def _head(name: str) -> Head:
    return "groot" if name == "groot" else "oft"
