"""Environments of tenants, good and bad ones; worker processes import them by name."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
import numpy as np

from examples.own_environment.point_mass import PointMass
from joynexus.contract import Camera
from joynexus.simulation.interface import SimObservation, SimulatorOptions, StepResult


def make_point() -> PointMass:
    return PointMass()


class Seeing(PointMass):
    """With two cameras whose pixels tell which they are."""

    contract = msgspec.structs.replace(
        PointMass.contract,
        cameras=(Camera(name="left", height=4, width=6), Camera(name="right", height=2, width=2)),
    )

    def reset(self, seed: int, *, render: bool = True) -> SimObservation:
        return self._see(super().reset(seed), render)

    def step_chunk(self, actions: Any, *, render: bool = True, final: bool = False, record: bool = False) -> StepResult:
        result = super().step_chunk(actions)
        return result._replace(observation=self._see(result.observation, final if result.done else render))

    def _see(self, seen: SimObservation, render: bool) -> SimObservation:
        images = (np.full((4, 6, 3), 1, np.uint8), np.full((2, 2, 3), 2, np.uint8)) if render else ()
        return seen._replace(images=images)


def make_seeing() -> Seeing:
    return Seeing()


class Broken(PointMass):
    """Fails in the way that it is told."""

    def __init__(self, how: str) -> None:
        self._how = how

    def step_chunk(self, actions: Any, *, render: bool = True, final: bool = False, record: bool = False) -> StepResult:
        result = super().step_chunk(actions)
        match self._how:
            case "raises":
                raise ZeroDivisionError("unstable physics")
            case "hangs":
                time.sleep(600)
            case "dies":
                os._exit(1)
            case "reward":
                return result._replace(rewards=np.array([np.nan], np.float32))
            case "rewards":
                return result._replace(rewards=np.zeros(3, np.float32))
            case "state":
                return result._replace(observation=SimObservation(np.zeros(9, np.float32), ()))
            case "nan":
                return result._replace(observation=SimObservation(np.full(4, np.nan, np.float32), ()))
        return result


class Telling(PointMass):
    """Pays the id of its process for each step."""

    def step_chunk(self, actions: Any, *, render: bool = True, final: bool = False, record: bool = False) -> StepResult:
        return super().step_chunk(actions)._replace(rewards=np.array([os.getpid()], np.float32))


def make_telling() -> Telling:
    return Telling()


def make_raising() -> Broken:
    return Broken("raises")


def make_hanging() -> Broken:
    return Broken("hangs")


def make_dying() -> Broken:
    return Broken("dies")


def make_nan() -> Broken:
    return Broken("nan")


def make_limited(options: SimulatorOptions) -> PointMass:
    """Takes the options, and shows it."""
    made = PointMass()
    made.contract = msgspec.structs.replace(PointMass.contract, robot=f"limit {options.episode_limit}")
    return made


def make_nothing() -> int:
    return 3


def make_failing() -> PointMass:
    raise RuntimeError("no licence for this physics")


not_a_function = 3
