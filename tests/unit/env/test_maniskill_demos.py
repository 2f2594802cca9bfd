"""Promises of ManiSkill's expert that need no ManiSkill: what it records of what its planner does."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from joynexus.contract import Camera, Contract
from joynexus.simulation.episodes import Actions
from joynexus.simulation.interface import SimObservation, SimulatorOptions, StepResult
from joynexus.simulation.pool import Lost
from services.env.producers import maniskill_demos
from services.env.producers.maniskill_demos import ManiSkillExpert, Planned

CONTRACT = Contract(
    robot="panda",
    cameras=(Camera(name="front", height=2, width=2),),
    state_dim=3,
    action_dim=2,
    rate_hz=10.0,
    episode_limit=9,
)


class Planner:
    """Solves the episodes of even seeds, in as many steps as the seed says."""

    def __init__(self, task: str, simulator: object) -> None:
        pass

    def record(self, seed: int) -> list[tuple[SimObservation, npt.NDArray[np.float32]]]:
        return [] if seed % 2 else [(seen(step), np.full(2, -step, np.float32)) for step in range(seed)]


class Pool:
    """Planned simulators in this process."""

    contract, instruction = CONTRACT, "go"

    def __init__(self, task: str, rows: int, **more: object) -> None:
        self.rows = rows
        simulator: Any = SimpleNamespace(contract=CONTRACT, instruction="go")
        self._planned = [Planned(task, simulator) for _ in range(rows)]

    def reset(self, seeds: Mapping[int, int], *, render: bool = True) -> dict[int, SimObservation | Lost]:
        return {row: self._begin(row, seed) for row, seed in seeds.items()}

    def step(self, actions: Mapping[int, Actions], **more: object) -> dict[int, StepResult]:
        return {row: self._planned[row].step_chunk(chunk) for row, chunk in actions.items()}

    def _begin(self, row: int, seed: int) -> SimObservation | Lost:
        try:
            return self._planned[row].reset(seed)
        except ValueError as error:
            return Lost(str(error))


def seen(step: int) -> SimObservation:
    return SimObservation(np.full(3, step, np.float32), (np.full((2, 2, 3), step, np.uint8),))


def test_a_recording_is_what_the_planner_saw_and_did_and_empty_where_it_solved_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = SimpleNamespace(prepare=lambda: None, preload=(), recycling=None)
    monkeypatch.setattr(maniskill_demos, "family_of", lambda task: family)
    monkeypatch.setattr(maniskill_demos, "SimulatorPool", Pool)
    monkeypatch.setattr(maniskill_demos, "_Follower", Planner)
    recordings = ManiSkillExpert("maniskill/PickCube-v1", SimulatorOptions(), 2).record(range(2, 7))
    assert [(each.seed, each.success) for each in recordings] == [(seed, seed % 2 == 0) for seed in range(2, 7)]
    for each in recordings:
        steps = list(range(each.seed)) if each.success else []
        assert each.states.tolist() == [[float(step)] * 3 for step in steps]
        assert each.actions.tolist() == [[-float(step)] * 2 for step in steps]
        assert (each.states.shape[1], each.actions.shape[1]) == (3, 2)
        assert [[int(picture[0, 0, 0]) for picture in view] for view in each.images] == ([steps] if steps else [])
