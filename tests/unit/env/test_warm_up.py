"""Promises of statistics from random actions: derived from the seed alone, and wide enough for what comes later."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from joynexus.contract import Statistics
from joynexus.simulation.interface import SimObservation, SimulatorError, SimulatorOptions, StepResult
from joynexus.simulation.warm_up import action_limits, measure_statistics
from joynexus.simulation.work import describe_simulator
from joynexus.wire.back import DescribeSimulator
from tests.unit.env.fakes import CountingSimulator
from tests.unit.env.test_rollout import FakePool
from tests.unit.env.test_rollout_work import SOFTWARE, Pool

CONTRACT = msgspec.structs.replace(CountingSimulator(SimulatorOptions()).contract, episode_limit=80)


class Recorder(FakePool):
    """Keeps the actions of each row; the state is (sum of the first action number, what it never leaves, a switch)."""

    def __init__(self, rows: int, losses: dict[int, int] | None = None) -> None:
        super().__init__(rows, losses)
        self._simulators = [Mover() for _ in range(rows)]


class Mover(CountingSimulator):
    """Never ends by itself."""

    def __init__(self) -> None:
        super().__init__(SimulatorOptions())
        self.actions: list[np.ndarray] = []

    def step_chunk(
        self, actions: np.ndarray, *, render: bool = True, final: bool = False, record: bool = False
    ) -> StepResult:
        assert not render
        assert not final
        self.actions += list(actions)
        self._sum += float(actions[0, 0])
        self._steps += 1
        return StepResult(self._observe(render), np.zeros(1, np.float32), False, False, False)

    def _observe(self, render: bool) -> SimObservation:
        switch = self._seed == 2 and self._steps == 7
        return SimObservation(np.array([self._sum, 3000.0, 1e-4 * self._sum, switch], np.float32), ())


def measure(pool: FakePool, seed: int = 0) -> Statistics:
    return measure_statistics(pool, CONTRACT, episodes=5, seed=seed)


def test_statistics_depend_on_the_seed_alone() -> None:
    alone = measure(Recorder(1))
    assert measure(Recorder(4)) == alone
    assert measure(Recorder(3, {2: 2, 4: 1})) == alone
    assert measure(Recorder(1), seed=1) != alone
    assert alone.count == 5 * 80
    without = measure(Recorder(2, {2: 99}))  # one that cannot be run leaves no half behind
    assert without.count == 4 * 80
    assert without.state.max[3] == pytest.approx(1.0)  # the switch was never seen: nothing but its middle is known


def test_random_actions_are_within_the_limits_and_held_for_a_while() -> None:
    pool = Recorder(1)
    measure(pool)
    actions = np.stack(pool._simulators[0].actions)  # type: ignore[attr-defined]
    assert actions.shape == (5 * 80, 4)
    assert (np.abs(actions) <= 1).all()
    assert np.abs(actions).max() > 0.9
    changes = (np.diff(actions, axis=0) != 0).any(1).mean()
    assert 1 / 10 < changes < 1 / 4  # held for 1 to 10 steps


def test_actions_are_scaled_by_their_limits() -> None:
    statistics = measure(Recorder(1)).action
    assert (statistics.mean, statistics.std) == ((0.0,) * 4, (1.0,) * 4)
    low, high = action_limits(msgspec.structs.replace(CONTRACT, action_low=(0.0, -np.inf), action_high=(5.0, np.inf)))
    assert (low.tolist(), high.tolist()) == ([0.0, -1.0], [5.0, 1.0])
    low, high = action_limits(msgspec.structs.replace(CONTRACT, action_low=(), action_high=()))
    assert (low.tolist(), high.tolist()) == ([-1.0] * 4, [1.0] * 4)


def test_no_scale_is_so_small_that_what_comes_later_is_thrown_far_out() -> None:
    state = measure(Recorder(1)).state
    moving, constant, trembling, rare = range(4)
    assert state.std[moving] > 0.5
    assert (state.mean[constant], state.std[constant]) == (3000.0, 1.0)
    assert state.std[trembling] == pytest.approx(0.07)
    assert state.std[rare] == pytest.approx(1 / 3, rel=0.01)  # seen once in 400: its standard deviation is 0.05
    for low, high in ((state.min, state.max), (state.q01, state.q99)):  # the other normalisations see these
        assert all((b - a) / 2 >= std * 0.999 for a, b, std in zip(low, high, state.std, strict=True))


def test_a_task_that_cannot_be_run_says_why() -> None:
    with pytest.raises(
        SimulatorError, match="no episode with random actions could be run: the simulator was lost 3 times"
    ):
        measure(Recorder(2, dict.fromkeys(range(5), 99)))


def test_a_description_has_the_contract_and_statistics_only_if_wanted() -> None:
    message = DescribeSimulator(task="t", attempt=2, tenant="a", env="metaworld/reach-v3")
    told = describe_simulator(message, Pool(2), software=SOFTWARE)
    assert (told.task, told.attempt, told.contract, told.instruction) == ("t", 2, Pool(1).contract, "count")
    assert (told.statistics, told.software, told.error) == (None, SOFTWARE, None)
    told = describe_simulator(msgspec.structs.replace(message, warmup_episodes=3, seed=4), Pool(2), software=SOFTWARE)
    assert told.statistics is not None
    assert len(told.statistics.state.mean) == 2
