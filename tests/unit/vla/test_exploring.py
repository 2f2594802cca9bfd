"""Promises of a policy that learns from rewards: what it draws, what it judges, and where gradients go."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from joynexus.contract import Statistics
from joynexus.specs import CriticSpec, ExplorationSpec, OptimizerSpec
from joynexus.vla.actor_critic import ActorCritic
from joynexus.vla.feature import VLAFeature
from joynexus.vla.policy import Policy
from joynexus.wire.back import RlBegin
from tests.unit.vla.samples import (
    ACTION,
    CHUNK,
    DIGEST,
    HIDDEN,
    STATE,
    batch,
    contract,
    feature,
    policy_spec,
    statistics,
)

BEGIN = RlBegin(
    exploration=ExplorationSpec(), critic=CriticSpec(width=16), values=CHUNK, optimizer=OptimizerSpec(lr=1e-3)
)
GROOT = {"head": "groot", "head_config": {"width": 32, "layers": 2, "heads": 4, "future_tokens": 2}}
NOISE = msgspec.structs.replace(BEGIN, exploration=ExplorationSpec(flow="noise"))
JUDGED = ("sample", "log_prob", "value")
WAYS = {"oft": ({}, BEGIN), "groot-sde": (GROOT, BEGIN), "groot-noise": (GROOT, NOISE)}


def ready(begin: RlBegin = BEGIN, **changes: Any) -> Policy:
    made = Policy(policy_spec(**changes), DIGEST, HIDDEN)
    made.begin_rl(begin)
    return made


def parts(made: Policy) -> ActorCritic:
    assert made.actor_critic is not None
    return made.actor_critic


def rows_are_independent(least: int = 4) -> bool:
    """Tell whether products on this host give a row the same bits in a few rows as in many (docs/adr/0007)."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 32, generator=random)
    layers = [torch.randn(32, size, generator=random) for size in (3, 12, 16, 32, 128)]
    return all(torch.equal((rows @ layer)[:least], rows[:least] @ layer) for layer in layers)


# --- the same numbers while acting and while training ----------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_training_finds_the_log_probabilities_of_the_rollout_again(way: str) -> None:
    """Requests of 8 rows, judged in a minibatch of other rows in another order."""
    changes, begin = WAYS[way]
    made = ready(begin, **changes)
    random = torch.Generator().manual_seed(0)
    features = [feature(random, 6) for _ in range(24)]
    state = np.random.default_rng(0).standard_normal((24, STATE)).astype(np.float32)
    asked = [made.explore(features[i : i + 8], state[i : i + 8], seeds=range(i, i + 8)) for i in (0, 8, 16)]
    sample, log_prob, value = (np.concatenate([getattr(e, name) for e in asked]) for name in JUDGED)
    order = np.random.default_rng(1).permutation(24)[:13]
    found, _, judged = made.evaluate([features[i] for i in order], state[order], sample[order])
    np.testing.assert_allclose(found.detach().numpy(), log_prob[order], atol=1e-4)
    np.testing.assert_allclose(judged.detach().numpy(), value[order], atol=1e-5)
    if rows_are_independent():
        np.testing.assert_array_equal(found.detach().numpy(), log_prob[order])
        np.testing.assert_array_equal(judged.detach().numpy(), value[order])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [4, 16, 17, 50])
def test_rows_of_one_feature_get_the_numbers_of_rows_of_equal_features(way: str, rows: int) -> None:
    """An instruction without pictures is one feature for all rows; it may be read once for all."""
    changes, begin = WAYS[way]
    made, one = ready(begin, **changes), feature(torch.Generator().manual_seed(0), 6)
    state = np.random.default_rng(0).standard_normal((rows, STATE)).astype(np.float32)
    equal = [VLAFeature({-1: one.last.clone()}, one.token_type, one.backbone) for _ in range(rows)]
    shared, apart = (made.explore(each, state, seeds=range(rows)) for each in ([one] * rows, equal))
    for found, expected in zip(shared, apart, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)
        if rows_are_independent():
            np.testing.assert_array_equal(found, expected)
    gradients = []
    for each in ([one] * rows, equal):
        made.module.zero_grad()
        parts(made).zero_grad()
        log_prob, _, value = made.evaluate(each, state, shared.sample)
        (log_prob.mean() + value.square().mean()).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        gradients.append([p.grad for p in (*made.module.parameters(), *parts(made).parameters())])
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_features_in_bfloat16_are_explored_and_judged_alike(way: str) -> None:
    """As a backbone on a GPU makes them; the policy's own numbers stay float32."""
    changes, begin = WAYS[way]
    made, data = ready(begin, **changes), batch(1)
    half = [VLAFeature({-1: f.last.bfloat16()}, f.token_type, f.backbone) for f in data.features]
    explored = made.explore(half, data.state, seeds=range(8))
    log_prob, _, value = made.evaluate(half, data.state, explored.sample)
    np.testing.assert_array_equal(log_prob.detach().numpy(), explored.log_prob)
    np.testing.assert_array_equal(value.detach().numpy(), explored.value)
    exact = made.explore(data.features, data.state, seeds=range(8))
    np.testing.assert_allclose(explored.value, exact.value, atol=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_few_rows_and_other_padding_change_nothing_but_rounding(way: str) -> None:
    changes, begin = WAYS[way]
    made, data = ready(begin, **changes), batch(1)
    together = made.explore(data.features, data.state, seeds=range(8))
    for row in range(8):
        one = slice(row, row + 1)
        found, _, judged = made.evaluate(data.features[one], data.state[one], together.sample[one])
        np.testing.assert_allclose(found.detach().numpy(), together.log_prob[one], atol=1e-3, rtol=1e-4)
        np.testing.assert_allclose(judged.detach().numpy(), together.value[one], atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_a_rows_draws_follow_from_its_seed_and_not_from_its_place(way: str) -> None:
    changes, begin = WAYS[way]
    made = ready(begin, **changes)
    features = [feature(torch.Generator().manual_seed(0), 6)] * 8
    state = np.zeros((8, STATE), np.float32)
    before = torch.random.get_rng_state()
    explored = made.explore(features, state, seeds=[5, 6, 7, 8, 5, 6, 7, 9])
    assert torch.equal(torch.random.get_rng_state(), before)
    np.testing.assert_array_equal(explored.actions[:3], explored.actions[4:7])
    np.testing.assert_array_equal(explored.sample[:3], explored.sample[4:7])
    assert np.abs(explored.actions[3] - explored.actions[7]).max() > 1e-3


# --- oft -------------------------------------------------------------------------------------------------------------


def test_oft_draws_from_a_gaussian_around_what_it_would_do() -> None:
    made = ready(normalization="none", statistics=None)
    features = [feature(torch.Generator().manual_seed(0), 6)] * 2000
    state = np.zeros((2000, STATE), np.float32)
    explored = made.explore(features, state, seeds=range(2000))
    mean = torch.from_numpy(made.act(features[:4], state[:4])[0])
    deviation = torch.from_numpy(explored.actions) - mean
    assert float(deviation.std()) == pytest.approx(0.3, rel=0.02)
    assert float(deviation.mean()) == pytest.approx(0.0, abs=0.01)
    expected = torch.distributions.Normal(mean, 0.3).log_prob(torch.from_numpy(explored.sample))
    torch.testing.assert_close(torch.from_numpy(explored.log_prob), expected, atol=1e-4, rtol=1e-4)
    _, entropy, _ = made.evaluate(features[:4], state[:4], explored.sample[:4])
    torch.testing.assert_close(entropy, torch.distributions.Normal(mean, 0.3).entropy().expand(4, -1, -1))


def test_what_is_done_keeps_to_the_limits_and_what_is_judged_was_drawn() -> None:
    narrow = contract(action_low=(-0.01,) * ACTION, action_high=(0.01,) * ACTION)
    wide = contract(action_low=(-100.0,) * ACTION, action_high=(100.0,) * ACTION)
    data = batch(1)
    kept, free = (ready(contract=each).explore(data.features, data.state, seeds=range(8)) for each in (narrow, wide))
    assert np.abs(kept.actions).max() <= np.float32(0.01)
    assert np.abs(free.actions).max() > 0.1
    np.testing.assert_array_equal(kept.sample, free.sample)
    np.testing.assert_array_equal(kept.log_prob, free.log_prob)


def test_relative_targets_are_explored_around_the_current_state() -> None:
    square = contract(state_dim=STATE, action_dim=STATE)
    fitting = Statistics(count=9, state=statistics().state, action=statistics().state)
    quiet = msgspec.structs.replace(BEGIN, exploration=ExplorationSpec(std=1e-6))
    made = ready(quiet, contract=square, statistics=fitting, action_target="relative_to_state")
    data = batch(2)
    explored = made.explore(data.features, data.state, seeds=range(8))
    np.testing.assert_allclose(explored.actions, made.act(data.features, data.state), atol=1e-4)


@pytest.mark.parametrize("learned", [True, False])
def test_the_spread_is_learned_or_stays(learned: bool) -> None:
    made = ready(msgspec.structs.replace(BEGIN, exploration=ExplorationSpec(std=0.5, learn_std=learned)))
    named = dict(parts(made).named_parameters())
    assert ("exploration.log_std" in named) == learned
    assert "rl.exploration.log_std" in made.tensors()
    data = batch(1)
    explored = made.explore(data.features, data.state, seeds=range(8))
    _, entropy, _ = made.evaluate(data.features, data.state, explored.sample)
    assert entropy.requires_grad == learned


# --- the value head --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", ["none", "bottleneck"])
def test_values_teach_the_value_head_alone_and_actions_the_rest(adapter: str) -> None:
    made, data = ready(adapter=adapter), batch(1)
    explored = made.explore(data.features, data.state, seeds=range(8))
    log_prob, _, value = made.evaluate(data.features, data.state, explored.sample)
    critic = parts(made).critic
    assert critic is not None
    (value - 1).square().mean().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert all(p.grad is None for p in made.module.parameters())
    assert all(p.grad is not None for p in critic.parameters())
    critic.zero_grad()
    log_prob.mean().backward()  # type: ignore[no-untyped-call]  # as above
    assert all(p.grad is None for p in critic.parameters())
    assert all(p.grad is not None for p in made.module.parameters())


def test_a_values_bits_do_not_depend_on_padding() -> None:
    made, random = ready(), torch.Generator().manual_seed(0)
    features = [feature(random, 5) for _ in range(8)]
    state = np.random.default_rng(0).standard_normal((8, STATE)).astype(np.float32)
    alone = made.explore(features, state, seeds=range(8)).value
    padded = made.explore([*features[:7], feature(random, 50)], state, seeds=range(8)).value
    np.testing.assert_array_equal(alone[:7], padded[:7])


def test_values_start_near_zero_and_depend_on_state_and_feature() -> None:
    made, random = ready(), torch.Generator().manual_seed(0)
    one, two = feature(random, 6), feature(random, 6)
    state = np.ones((4, STATE), np.float32)
    base, moved, seen = (
        made.explore([f] * 4, s, seeds=range(4)).value for f, s in ((one, state), (one, -state), (two, state))
    )
    assert base.shape == (4, CHUNK)
    assert 0 < np.abs(base).max() < 0.05
    assert np.abs(base - moved).max() > 1e-5
    assert np.abs(base - seen).max() > 1e-6


def test_a_policy_without_state_is_judged_on_the_feature_alone() -> None:
    blind = ready(contract=contract(state_dim=0), statistics=statistics(state=0))
    explored = blind.explore(batch(1).features[:4], np.zeros((4, 0), np.float32), seeds=range(4))
    assert np.abs(explored.value[0] - explored.value[1]).max() > 1e-6


def test_without_a_value_head_there_are_no_values_and_less_memory() -> None:
    plain, judging = Policy(policy_spec(), DIGEST, HIDDEN), ready()
    lean = ready(msgspec.structs.replace(BEGIN, critic=None, values=1))
    data = batch(1)
    assert lean.explore(data.features, data.state, seeds=range(8)).value.shape == (8, 0)
    assert plain.memory_bytes < lean.memory_bytes < judging.memory_bytes


# --- beginning -------------------------------------------------------------------------------------------------------


def test_what_rl_adds_comes_from_the_policys_seed_alone() -> None:
    before = torch.random.get_rng_state()
    first = ready().tensors()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    again, other = ready().tensors(), ready(seed=4).tensors()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["rl.critic.out.weight"], other["rl.critic.out.weight"])


def test_a_second_job_goes_on_with_what_fits_it_and_draws_the_rest_anew() -> None:
    made = ready()
    with torch.no_grad():
        for parameter in parts(made).parameters():
            parameter.add_(1.0)
    learned = {name: tensor.clone() for name, tensor in made.tensors().items()}
    fresh = ready().tensors()

    made.begin_rl(msgspec.structs.replace(BEGIN, critic=CriticSpec(width=16, lr=3e-3)))
    assert all(torch.equal(tensor, learned[name]) for name, tensor in made.tensors().items())

    made.begin_rl(msgspec.structs.replace(BEGIN, exploration=ExplorationSpec(std=0.1), critic=CriticSpec(width=8)))
    found = made.tensors()
    assert float(found["rl.exploration.log_std"].exp().mean()) == pytest.approx(0.1)
    assert found["rl.critic.out.weight"].shape == (CHUNK, 8)

    made.begin_rl(BEGIN)
    found = made.tensors()
    assert all(torch.equal(tensor, found[name]) for name, tensor in fresh.items())


@pytest.mark.parametrize(
    ("begin", "says"),
    [
        (msgspec.structs.replace(BEGIN, exploration=ExplorationSpec(std=0.0)), "std=0.0"),
        (msgspec.structs.replace(BEGIN, exploration=ExplorationSpec(noise_low=0.3)), "noise_low=0.3"),
        (msgspec.structs.replace(BEGIN, critic=CriticSpec(width=0)), "width=0"),
        (msgspec.structs.replace(BEGIN, critic=CriticSpec(lr=-1.0)), "lr=-1.0"),
        (msgspec.structs.replace(BEGIN, values=CHUNK + 1), "values=5"),
    ],
)
def test_settings_out_of_range_are_named_and_change_nothing(begin: RlBegin, says: str) -> None:
    made = Policy(policy_spec(), DIGEST, HIDDEN)
    with pytest.raises(ValueError, match=says):
        made.begin_rl(begin)
    assert made.actor_critic is None
    assert made.rl is None


def test_a_policy_that_was_not_made_ready_says_so() -> None:
    made, data = Policy(policy_spec(), DIGEST, HIDDEN), batch(1)
    with pytest.raises(ValueError, match="nothing to explore with"):
        made.explore(data.features, data.state, seeds=range(8))
    with pytest.raises(ValueError, match="nothing to explore with"):
        made.evaluate(data.features, data.state, data.action)


def test_a_head_that_judges_whole_chunks_is_named_in_one_sentence() -> None:
    made, data = ready(), batch(1)
    explored = made.explore(data.features, data.state, seeds=range(8))
    made.module.log_prob = lambda *_: (torch.zeros(8), torch.zeros(8))  # type: ignore[method-assign]  # an installed one
    with pytest.raises(ValueError, match=r"'oft' returned log-probabilities of shape \[8\]; they must be \[8, 4, 3\]"):
        made.evaluate(data.features, data.state, explored.sample)


def test_samples_that_do_not_fit_are_refused_in_one_sentence() -> None:
    made, data = ready(), batch(1)
    sample = made.explore(data.features, data.state, seeds=range(8)).sample
    with pytest.raises(ValueError, match="7 samples of the exploration came for 8 rows"):
        made.evaluate(data.features, data.state, sample[:7])
    with pytest.raises(ValueError, match=r"has shape \[3, 3\]; this policy's have \[4, 3\]"):
        made.evaluate(data.features, data.state, sample[:, :3])
    with pytest.raises(ValueError, match="7 seeds came for 8 rows"):
        made.explore(data.features, data.state, seeds=range(7))
