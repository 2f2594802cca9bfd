"""Promises of the rollout: results by seed alone, whatever the rows, the losses and the order of endings."""

from collections.abc import Collection, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joynexus.simulation.episodes import Actions, EpisodeResult, Question, run_episodes
from joynexus.simulation.interface import SimObservation, SimulatorOptions, StepResult
from joynexus.simulation.pool import Lost
from tests.unit.env.fakes import CountingSimulator


class FakePool:
    """Rows in this process; loses what `losses` says: how many more times an episode of a seed is lost, and where."""

    def __init__(self, rows: int, losses: dict[int, int] | None = None, at: str = "step") -> None:
        self.rows = rows
        self._simulators = [CountingSimulator(SimulatorOptions()) for _ in range(rows)]
        self._seeds: dict[int, int] = {}
        self._losses, self._at = dict(losses or {}), at
        self.resets: list[dict[int, int]] = []

    def _loses(self, row: int, where: str) -> bool:
        seed = self._seeds[row]
        if where != self._at or self._losses.get(seed, 0) == 0:
            return False
        self._losses[seed] -= 1
        return True

    def reset(self, seeds: Mapping[int, int], *, render: bool = True) -> dict[int, SimObservation | Lost]:
        self.resets.append(dict(seeds))
        self._seeds.update(seeds)
        return {
            row: Lost("died") if self._loses(row, "reset") else self._simulators[row].reset(seed, render=render)
            for row, seed in seeds.items()
        }

    def step(
        self,
        actions: Mapping[int, Actions],
        *,
        render: bool = True,
        final: bool = False,
        record: Collection[int] = (),
    ) -> dict[int, StepResult | Lost]:
        return {
            row: Lost("died")
            if self._loses(row, "step")
            else self._simulators[row].step_chunk(chunk, render=render, final=final, record=row in record)
            for row, chunk in actions.items()
        }


def act(questions: list[Question]) -> Actions:
    """A policy whose speed depends on the seed; from seed 50 on it never gets there."""
    speed = [0.0 if q.seed >= 50 else 0.5 + q.seed % 7 / 4 for q in questions]
    return np.array(speed, np.float32)[:, None, None].repeat(4, 1)


SEEDS = [3, 60, 1, 12, 0, 61, 8]
EXPECTED = run_episodes(FakePool(1), act, SEEDS, episode_limit=30)


@given(rows=st.integers(1, 9), losses=st.dictionaries(st.sampled_from(SEEDS), st.integers(0, 2)), where=st.booleans())
def test_results_depend_on_neither_rows_nor_losses(rows: int, losses: dict[int, int], where: bool) -> None:
    pool = FakePool(rows, losses, "step" if where else "reset")
    assert run_episodes(pool, act, SEEDS, episode_limit=30) == EXPECTED


def test_draws_depend_on_episode_and_step_alone() -> None:
    def draws(pool: FakePool, seeds: list[int]) -> dict[tuple[int, int], int]:
        asked: dict[tuple[int, int], int] = {}

        def remember(questions: list[Question]) -> Actions:
            asked.update({(q.seed, q.step): q.draw for q in questions})
            return act(questions)

        run_episodes(pool, remember, seeds, episode_limit=30)
        return asked

    alone = draws(FakePool(1), SEEDS)
    assert draws(FakePool(4, {3: 2}), SEEDS[::-1]) == alone
    assert len(set(alone.values())) == len(alone)


def test_results_come_in_the_order_of_the_seeds_and_say_how_it_went() -> None:
    assert [r.seed for r in EXPECTED] == SEEDS
    fast, failed = EXPECTED[0], EXPECTED[1]
    assert (fast.success, fast.failure, fast.steps, fast.chunks) == (True, "", 8, 2)  # 8 x 1.25 reaches 10
    assert fast.reward == pytest.approx(1.25 * 36)
    assert (failed.success, failed.failure) == (False, "limit")
    assert (failed.steps, failed.chunks) == (30, 8)  # the last chunk is cut to the limit


def test_one_question_asks_for_all_live_rows() -> None:
    asked: list[list[int]] = []

    def remember(questions: list[Question]) -> Actions:
        asked.append([q.seed for q in questions])
        return act(questions)

    run_episodes(FakePool(3), remember, SEEDS, episode_limit=30)
    assert asked[0] == [3, 60, 1]
    assert all(len(seeds) == 3 for seeds in asked[:6])  # a row that finishes takes the next seed at once


def test_only_some_actions_of_a_chunk_are_executed() -> None:
    result = run_episodes(FakePool(1), act, [3], episode_limit=30, execute=1)[0]
    assert (result.steps, result.chunks, result.success) == (8, 8, True)


def test_an_episode_lost_again_and_again_has_failed_and_says_so() -> None:
    results = run_episodes(FakePool(2, {1: 99}), act, SEEDS, episode_limit=30)
    lost = results[SEEDS.index(1)]
    assert (lost.success, lost.failure) == (False, "the simulator was lost 3 times: it died")
    assert [r for r in results if r.seed != 1] == [r for r in EXPECTED if r.seed != 1]


def test_recorded_episodes_have_a_frame_a_step_and_others_none() -> None:
    results = run_episodes(FakePool(2), act, SEEDS, episode_limit=30, record=[12, 60])
    assert [len(r.frames) for r in results] == [r.steps if r.seed in (12, 60) else 0 for r in results]


def test_observers_hear_every_chunk_and_every_end() -> None:
    steps: dict[int, int] = {}
    ended: list[EpisodeResult] = []

    def on_step(question: Question, actions: Actions, result: StepResult) -> None:
        assert len(actions) == result.steps
        steps[question.seed] = 0 if question.step == 0 else steps[question.seed]
        assert steps[question.seed] == question.step
        steps[question.seed] += result.steps

    results = run_episodes(FakePool(3, {3: 1}), act, SEEDS, episode_limit=30, on_step=on_step, on_episode=ended.append)
    assert steps == {r.seed: r.steps for r in results}
    assert sorted(ended) == sorted(results)


def test_wrong_answers_and_repeated_seeds_are_refused() -> None:
    for answer in (np.zeros((1, 4), np.float32), np.zeros((2, 4, 1), np.float32), np.zeros((1, 2, 1), np.float32)):
        with pytest.raises(ValueError, match="the policy answered 1 observations"):
            run_episodes(FakePool(1), lambda _, answer=answer: answer, [0], episode_limit=9, execute=3)
    with pytest.raises(ValueError, match="seeds repeat"):
        run_episodes(FakePool(1), act, [1, 1], episode_limit=9)
