"""Promises of advantages, losses and experience: the published formulas, checked against other people's numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from joynexus.specs import GrpoSpec, PpoSpec
from services.trainer.rl.advantages import episode_weights, gae, group_advantages, normalised
from services.trainer.rl.experience import Experience, by_step, make_experience
from services.trainer.rl.losses import importance_weights, policy_loss, value_loss
from tests.unit.trainer.rollouts import made_up

TORCHRL = json.loads((Path(__file__).parent / "data" / "gae.json").read_text())


@pytest.mark.parametrize("case", TORCHRL["cases"], ids=lambda case: f"gamma {case['gamma']}, lam {case['lam']}")
def test_generalised_advantages_are_those_of_torchrl(case: dict[str, list[float]]) -> None:
    rewards, values, last = (np.array(case[name], np.float32) for name in ("rewards", "values", "last_values"))
    advantages = gae(rewards, values, np.array(TORCHRL["lengths"]), last, case["gamma"], case["lam"])
    np.testing.assert_allclose(advantages, case["advantages"], rtol=1e-6)  # it holds gamma and lam in float32


def test_an_episode_that_was_cut_off_counts_on_what_would_have_followed() -> None:
    rewards, values, once = np.ones(1), np.full(1, 2.0), np.array([1])
    assert gae(rewards, values, once, np.array([0.0]), 0.9, 0.5).tolist() == [1.0 - 2.0]
    assert gae(rewards, values, once, np.array([10.0]), 0.9, 0.5).tolist() == [1.0 + 0.9 * 10.0 - 2.0]


def test_advantages_of_an_episode_do_not_depend_on_the_episodes_beside_it() -> None:
    dice = np.random.default_rng(1)
    rewards, values, lengths, last = dice.random(9), dice.random(9), np.array([4, 5]), dice.random(2)
    both = gae(rewards, values, lengths, last, 0.99, 0.95)
    assert both[:4].tolist() == gae(rewards[:4], values[:4], lengths[:1], last[:1], 0.99, 0.95).tolist()
    assert both[4:].tolist() == gae(rewards[4:], values[4:], lengths[1:], last[1:], 0.99, 0.95).tolist()


def test_normalised_advantages_have_unit_scale_and_a_single_one_is_no_division_by_zero() -> None:
    found = normalised(np.array([1.0, 3.0, 8.0]))
    assert abs(found.mean()) < 1e-12
    assert found.std(ddof=1) == pytest.approx(1.0)
    assert normalised(np.array([5.0])).tolist() == [0.0]
    assert np.isfinite(normalised(np.full(4, 2.0))).all()


def test_group_advantages_are_measured_within_episodes_of_one_seed() -> None:
    returns, seeds = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]), np.array([5, 5, 5, 5, 9, 9, 9, 9])
    found = group_advantages(returns, seeds, 0.1, 0.9)
    for group in (slice(0, 4), slice(4, 8)):  # torch's own standard deviation is the unbiased one
        same = torch.tensor(returns[group])
        expected = (same - same.mean()) / (same.std() + 1e-6)
        np.testing.assert_allclose(found.advantages[group], expected, rtol=1e-12)
    assert (found.groups, found.groups_kept, found.kept.all()) == (2, 2, True)


def test_groups_that_all_win_all_lose_or_lost_their_siblings_are_left_out() -> None:
    returns, seeds = np.array([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0]), np.array([1, 1, 2, 2, 3, 3, 4])
    found = group_advantages(returns, seeds, 0.1, 0.9)
    assert found.kept.tolist() == [False] * 4 + [True] * 2 + [False]
    assert not found.advantages[~found.kept].any()
    assert (found.groups, found.groups_kept) == (4, 1)
    everybody = group_advantages(np.full(4, 0.3), np.zeros(4, np.int64), 0.1, 0.9)
    assert everybody.advantages.tolist() == [0.0] * 4  # nobody differs: no division by zero


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_weights_by_length_let_all_episodes_weigh_the_same_and_keep_the_losses_size(lengths: list[int]) -> None:
    weights = episode_weights(np.array(lengths))
    totals = weights * np.array(lengths)
    assert totals == pytest.approx(totals[0])
    assert totals.sum() == pytest.approx(sum(lengths))


def plain_policy_loss(now: float, old: float, a: float, low: float, high: float, dual: float) -> float:
    """Schulman et al. (2017), equation 7, as a loss; Ye et al. (2020), equation 5: in ordinary numbers."""
    ratio = math.exp(now - old)
    objective = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
    return -max(objective, dual * a) if dual and a < 0 else -objective


near = st.floats(-3, 3, width=32)


@given(now=near, old=near, advantage=near, low=st.sampled_from([0.1, 0.2]), dual=st.sampled_from([0.0, 1.5, 3.0]))
def test_the_policys_loss_is_the_published_one(
    now: float, old: float, advantage: float, low: float, dual: float
) -> None:
    numbers = [torch.tensor(x, dtype=torch.float64) for x in (now, old, advantage)]
    found = policy_loss(*numbers, clip_low=low, clip_high=0.28, dual_clip=dual)
    assert found.loss.item() == pytest.approx(plain_policy_loss(now, old, advantage, low, 0.28, dual), abs=1e-9)
    assert found.kl.item() >= -1e-12, "but for rounding"
    assert found.kl.item() == pytest.approx(math.exp(now - old) - 1 - (now - old), abs=1e-9)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "moves"),
    [
        (0.0, 1.0, True),
        (0.5, 1.0, False),  # already likelier than the clip allows
        (-0.5, 1.0, True),
        (-0.5, -1.0, False),
        (0.5, -1.0, True),
        (1.5, -1.0, False),  # exp(1.5) > 3: the dual clip
    ],
)
def test_clips_take_the_gradient_exactly_where_they_should(log_ratio: float, advantage: float, moves: bool) -> None:
    now = torch.tensor(log_ratio, requires_grad=True)
    found = policy_loss(now, torch.tensor(0.0), torch.tensor(advantage), clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    found.loss.backward()
    assert now.grad is not None
    assert bool(now.grad != 0) is moves
    assert bool(found.clipped | found.capped) is not moves


def test_a_policy_that_ran_away_gives_finite_gradients() -> None:
    now = torch.tensor([500.0, -500.0], requires_grad=True)
    found = policy_loss(now, torch.zeros(2), torch.tensor([-1.0, 1.0]), clip_low=0.2, clip_high=0.2, dual_clip=0.0)
    found.loss.sum().backward()
    assert torch.isfinite(found.loss).all()
    assert torch.isfinite(now.grad).all()


def test_the_values_clip_takes_the_worse_of_both_errors() -> None:
    value, old, returns = torch.tensor([2.0, 0.1, -1.0]), torch.zeros(3), torch.tensor([3.0, 3.0, 3.0])
    assert value_loss(value, old, returns, 0.0).tolist() == pytest.approx([0.5, 4.205, 8.0])
    clipped = value_loss(value, old, returns, 0.2)
    assert clipped.tolist() == pytest.approx([0.5 * 2.8**2, 4.205, 8.0])


def test_importance_weights_are_truncated_and_have_no_gradient() -> None:
    proximal = torch.tensor([0.0, 1.0, -1.0], requires_grad=True)
    weights, cut = importance_weights(proximal, torch.zeros(3), 2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-1.0)])
    assert cut.tolist() == [False, True, False]
    assert not weights.requires_grad


# Experience


def plain_returns(rewards: list[float], values: list[float], last: float, gamma: float, lam: float) -> list[float]:
    """Advantages from their definition: the sum over all later surprises, each discounted."""
    values = [*values, last]
    surprises = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return [
        sum((gamma * lam) ** (later - t) * surprises[later] for later in range(t, len(surprises)))
        for t in range(len(surprises))
    ]


@pytest.mark.parametrize("level", ["action", "chunk"])
def test_ppo_takes_what_counts_as_a_step_from_its_level(level: str) -> None:
    rollout = made_up(3, values=3 if level == "action" else 1)
    algorithm = PpoSpec(level=level, gamma=0.9, lam=0.8)
    made = make_experience(rollout, algorithm, reward_scale=0.5)
    expected, values, at = [], [], 0
    for episode, length in enumerate(rollout.lengths):
        rows = range(at, at + length)
        at += length
        counts = [range(rollout.executed[row]) for row in rows]
        if level == "action":
            rewards = [rollout.rewards[row, c] for row, ks in zip(rows, counts, strict=True) for c in ks]
            said = [rollout.value[row, c] for row, ks in zip(rows, counts, strict=True) for c in ks]
        else:
            rewards = [sum(rollout.rewards[row, c] for c in ks) for row, ks in zip(rows, counts, strict=True)]
            said = [rollout.value[row, 0] for row in rows]
        scaled = [0.5 * float(reward) for reward in rewards]
        last = float(rollout.last_value[episode, 0])
        expected += plain_returns(scaled, [float(v) for v in said], last, 0.9, 0.8)
        values += said
    counted = made.mask.bool()
    assert counted.sum() == len(expected) == (rollout.executed.sum() if level == "action" else len(rollout.executed))
    exact = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(made.advantage[counted], ((exact - exact.mean()) / exact.std()).float())
    said = torch.tensor(np.array(values))
    torch.testing.assert_close(made.returns[counted], (exact + said).float())
    assert torch.equal(made.value[counted], said)
    unexplained = exact.var(correction=0) / (exact + said).var(correction=0)
    assert made.explained_variance == pytest.approx(1 - unexplained.item(), rel=1e-5)


@pytest.mark.parametrize("level", ["action", "chunk"])
def test_actions_that_were_not_executed_enter_no_log_probability(level: str) -> None:
    rollout = made_up(4, values=3 if level == "action" else 1)
    log_prob = rollout.log_prob.copy()
    log_prob[np.arange(3) >= rollout.executed[:, None]] = 1e30
    spoilt = make_experience(
        made_up(4, values=3 if level == "action" else 1, log_prob=log_prob), PpoSpec(level=level), 1.0
    )
    clean = make_experience(rollout, PpoSpec(level=level), 1.0)
    assert torch.equal(spoilt.log_prob, clean.log_prob)
    first = 2  # the first episode's last decision, which executed two of three actions
    numbers = torch.from_numpy(rollout.log_prob[first]).sum(-1)
    expected = [numbers[0], numbers[1], 0.0] if level == "action" else [numbers[0] + numbers[1]]
    torch.testing.assert_close(clean.log_prob[first], torch.tensor(expected))


def test_chunks_of_which_a_part_is_executed_are_summed_over_that_part() -> None:
    numbers, executed = torch.arange(12.0).view(1, 3, 4), torch.tensor([[True, True, False]])
    assert by_step(numbers, executed, "action").tolist() == [[6.0, 22.0, 0.0]]
    assert by_step(numbers, executed, "chunk").tolist() == [[28.0]]


@pytest.mark.parametrize("level", ["action", "chunk"])
def test_grpo_trains_on_the_groups_that_are_kept_and_on_nothing_else(level: str) -> None:
    rewards = np.zeros((13, 3), np.float32)
    rewards[[2, 7], 1] = 1.0  # episodes 0 and 2 are solved, both of seed 7; those of seed 8 are not
    rollout = made_up(5, lengths=(3, 2, 3, 2, 3), seeds=(7, 8, 7, 8, 7), rewards=rewards)
    made = make_experience(rollout, GrpoSpec(level=level, group_size=3), reward_scale=3.0)
    assert (made.groups, made.groups_kept) == (2, 1)
    assert made.decisions.tolist() == [0, 1, 2, 5, 6, 7, 10, 11, 12]
    assert torch.equal(made.state, torch.from_numpy(rollout.state[made.decisions]))
    won, lost = torch.tensor([1.0, 1.0, 0.0]).sub(2 / 3).div(3**-0.5 + 1e-6)[[0, 2]].tolist()
    steps = made.advantage[made.mask.bool()]
    assert sorted({round(step, 5) for step in steps.tolist()}) == pytest.approx([lost, won], abs=1e-4)
    lengths = [8, 8, 8] if level == "action" else [3, 3, 3]
    assert made.weight.flatten().tolist() == pytest.approx([1.0] * 9)
    assert made.mask.sum() == sum(lengths)


def test_a_group_that_lost_siblings_is_measured_by_those_that_came_back_and_no_other_group_by_them() -> None:
    returns = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    seeds = np.repeat([7, 8], 4)

    def without(*lost: int) -> Experience:
        kept = np.setdiff1d(np.arange(8), lost)
        rewards = np.column_stack([returns[kept], np.zeros((len(kept), 2))]).astype(np.float32)
        rollout = made_up(
            1, lengths=[1] * len(kept), seeds=seeds[kept], rewards=rewards, executed=np.full(len(kept), 3)
        )
        return make_experience(rollout, GrpoSpec(group_size=4, filter_low=0.0, filter_high=1.0), 1.0)

    whole, torn, alone = without(), without(1), without(1, 2, 3)
    assert (whole.groups_kept, torn.groups_kept, alone.groups_kept) == (2, 2, 1)
    exact = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(torn.advantage[:3, 0], ((exact - exact.mean()) / (exact.std() + 1e-6)).float())
    assert torch.equal(torn.advantage[3:], whole.advantage[4:])
    assert torch.equal(torn.weight, torch.ones(7, 1)), "what is lost takes no weight from the others"
    assert torch.equal(alone.advantage, whole.advantage[4:])
    assert alone.decisions.tolist() == [1, 2, 3, 4], "an episode that lost all its siblings is not trained on"


def test_grpo_with_nothing_to_learn_from_has_no_decisions() -> None:
    made = make_experience(made_up(6, rewards=np.zeros((8, 3), np.float32)), GrpoSpec(), 1.0)
    assert (len(made.decisions), made.groups, made.groups_kept) == (0, 3, 0)
