"""Promises of what is collected: whole episodes, the same whoever ran beside them and whatever was lost on the way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joynexus.seeds import derived_seed
from joynexus.simulation.asking import Answer
from joynexus.simulation.collecting import Collector
from joynexus.simulation.episodes import EpisodeResult, Question, run_episodes
from joynexus.simulation.interface import SimulatorOptions
from joynexus.simulation.pool import Deadlines, SimulatorPool
from joynexus.simulation.trajectories import Trajectories, pack
from joynexus.wire import ErrorCode, JoyNexusError
from tests.unit.env.exploring import CHUNK, VERSION, explore
from tests.unit.env.fakes import DIES, HANGS, CountingSimulator, make_counting
from tests.unit.env.test_rollout import FakePool

LIMIT = 30
SEEDS = [3, 60, 3, 1, 60, 3, 2]
DRAWS = [7, 7, 8, 7, 9, 1, 0]


def collect(
    pool: FakePool | SimulatorPool,
    seeds: list[int] = SEEDS,
    draws: list[int] = DRAWS,
    *,
    ask: Callable[[list[Question]], Answer] = explore,
    by_success: bool = False,
    ask_last: bool = True,
    execute: int = 0,
) -> tuple[list[EpisodeResult], Trajectories | None]:
    collector = Collector(ask, VERSION, "success" if by_success else "dense")
    results = run_episodes(
        pool,
        collector.act,
        seeds,
        draws=draws,
        episode_limit=LIMIT,
        execute=execute,
        ask_last=ask_last,
        on_step=collector.on_step,
    )
    return results, collector.trajectories(results, "c" * 32, "count")


def whole(pool: FakePool, *, by_success: bool = False) -> Trajectories:
    collected = collect(pool, by_success=by_success)[1]
    assert collected is not None
    return collected


ALONE = pack(whole(FakePool(1)))


@given(
    rows=st.sampled_from([1, 2, 3, 8]),
    losses=st.dictionaries(st.sampled_from(SEEDS), st.integers(0, 2)),
    where=st.booleans(),
)
@settings(deadline=None, max_examples=50)
def test_trajectories_depend_on_neither_rows_nor_losses(rows: int, losses: dict[int, int], where: bool) -> None:
    assert pack(whole(FakePool(rows, losses, "step" if where else "reset"))) == ALONE


Decision = tuple[list[float], float, list[float], int, float]


def plain_loop(seed: int, draw: int) -> list[Decision]:
    """Return state, drawn number, rewards, executed actions and value of each decision, and the last value."""
    simulator, steps = CountingSimulator(SimulatorOptions(episode_limit=LIMIT)), 0
    decisions: list[Decision] = []
    observation = simulator.reset(seed)
    while True:
        question_draw = derived_seed("rollout", draw, steps)
        speed = np.float32((0.01 if seed >= 50 else 0.5) + question_draw % 97 / 9700)
        value = float(observation.state[1] + speed)
        if steps == LIMIT or simulator._sum >= 10:
            decisions.append(([], 0.0, [], 0, value if steps == LIMIT else 0.0))
            return decisions
        count = min(CHUNK, LIMIT - steps)
        result = simulator.step_chunk(np.full((count, 1), speed, np.float32))
        decisions.append((observation.state.tolist(), float(speed), result.rewards.tolist(), result.steps, value))
        observation, steps = result.observation, steps + result.steps


def test_collected_numbers_are_those_of_a_plain_loop() -> None:
    t, start = whole(FakePool(3)), 0
    assert (t.version, t.contract, t.instruction) == (VERSION, "c" * 32, "count")
    assert (t.seeds.tolist(), t.draws.tolist()) == (SEEDS, DRAWS)
    assert t.success.tolist() == t.terminated.tolist() == [seed < 50 for seed in SEEDS]
    for episode, (seed, draw) in enumerate(zip(SEEDS, DRAWS, strict=True)):
        *decisions, (_, _, _, _, last_value) = plain_loop(seed, draw)
        assert t.lengths[episode] == len(decisions)
        assert t.last_value[episode, 0] == np.float32(last_value)
        assert (last_value == 0) == t.terminated[episode]
        for row, (state, speed, rewards, executed, value) in enumerate(decisions, start):
            assert t.state[row].tolist() == state
            assert t.images[0][row].flat[0] == seed
            assert t.sample[row].tolist() == [[speed]] * CHUNK
            assert t.log_prob[row].tolist() == [[-speed]] * CHUNK
            assert t.rewards[row].tolist() == rewards + [0.0] * (CHUNK - executed)
            assert (t.executed[row], t.value[row, 0]) == (executed, np.float32(value))
        start += len(decisions)
    assert start == len(t.executed)


def test_episodes_from_the_same_start_draw_differently() -> None:
    t = whole(FakePool(2))
    first = np.cumsum([0, *t.lengths[:-1]])
    starts = {index: (t.state[first[index]].tolist(), float(t.sample[first[index], 0, 0])) for index in (0, 2, 5)}
    assert len({tuple(state) for state, _ in starts.values()}) == 1
    assert len({drawn for _, drawn in starts.values()}) == 3


def test_an_episode_asked_for_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="seeds repeat"):
        collect(FakePool(1), [3, 3], [7, 7])


def test_an_episode_that_cannot_be_run_is_left_out_and_its_siblings_are_not() -> None:
    results, t = collect(FakePool(3, {60: 99}))
    assert [result.lost for result in results] == [seed == 60 for seed in SEEDS]
    assert t is not None
    kept = [index for index, seed in enumerate(SEEDS) if seed != 60]
    others = collect(FakePool(1), [SEEDS[index] for index in kept], [DRAWS[index] for index in kept])[1]
    assert others is not None
    assert pack(t) == pack(others)
    assert collect(FakePool(2, dict.fromkeys(SEEDS, 99)))[1] is None


def test_processes_that_die_and_hang_cost_their_own_episodes_alone() -> None:
    seeds = [3, DIES, 60, HANGS, 1]
    options = SimulatorOptions(episode_limit=LIMIT)
    deadlines = Deadlines(step_s=0.5)
    with SimulatorPool("fake", 4, make=make_counting, processes=4, options=options, deadlines=deadlines) as pool:
        results, t = collect(pool, seeds, seeds)
    assert [result.lost for result in results] == [False, True, False, True, False]
    assert "died" in results[1].failure
    assert "took longer than 0.5 s" in results[3].failure
    others = collect(FakePool(1), [3, 60, 1], [3, 60, 1])[1]
    assert t is not None
    assert others is not None
    assert pack(t) == pack(others)


def test_paid_by_success_is_one_for_the_step_that_solves_the_task() -> None:
    t = whole(FakePool(2), by_success=True)
    ends = np.cumsum(t.lengths)
    for episode, end in enumerate(ends):
        rewards = t.rewards[end - t.lengths[episode] : end]
        assert rewards.sum() == t.success[episode]
        if t.success[episode]:
            assert rewards[-1, t.executed[end - 1] - 1] == 1


def test_what_the_last_moment_is_worth_is_asked_once_with_the_others_and_only_if_wanted() -> None:
    asked: list[list[Question]] = []

    def remember(questions: list[Question]) -> Answer:
        asked.append(questions)
        return explore(questions)

    collect(FakePool(2), ask=remember)
    last = [question for questions in asked for question in questions if question.last]
    assert sorted((question.seed, question.episode.draw) for question in last) == [(60, 7), (60, 9)]
    assert all(question.step == LIMIT and question.observation.images for question in last)
    assert all(len(questions) > 1 for questions in asked if any(question.last for question in questions))
    asked.clear()
    t = collect(FakePool(2), ask=remember, ask_last=False)[1]
    assert t is not None
    assert not t.last_value.any()
    assert not any(question.last for questions in asked for question in questions)


def test_only_executed_actions_count() -> None:
    t = collect(FakePool(2), execute=3)[1]
    assert t is not None
    assert t.executed.max() == 3
    assert t.log_prob.shape[1] == CHUNK
    assert not t.rewards[:, 3].any()


def test_values_for_each_action_and_none_at_all() -> None:
    for values in (0, CHUNK):
        t = collect(FakePool(2), ask=partial(explore, values=values))[1]
        assert t is not None
        assert t.value.shape == (len(t.executed), values)
        assert t.last_value.shape == (len(SEEDS), values)


def test_a_page_in_which_another_version_acts_is_done_again() -> None:
    def other(questions: list[Question]) -> Answer:
        return explore(questions)._replace(version=VERSION + any(question.step > 0 for question in questions))

    with pytest.raises(JoyNexusError, match="version 4 of the policy acted where version 3 was to") as caught:
        collect(FakePool(2), ask=other)
    assert caught.value.code is ErrorCode.UNAVAILABLE
