from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joynexus.contract import NormalizationMode, Statistics
from joynexus.specs import PolicySpec
from joynexus.vla.feature import PaddedFeature, VLAFeature, pad_features
from joynexus.vla.noise import Noise
from joynexus.vla.normalize import Normalizer
from joynexus.vla.policy import Policy
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
    vector_statistics,
)


def policy(spec: PolicySpec | None = None) -> Policy:
    return Policy(spec or policy_spec(), DIGEST, HIDDEN)


# --- normalisation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["mean_std", "min_max", "quantile", "none"])
@settings(deadline=None)  # the first example loads torch's kernels
@given(values=st.lists(st.floats(-1.9, 1.9), min_size=ACTION, max_size=ACTION))
def test_an_action_comes_back_from_normalisation_as_it_was(mode: NormalizationMode, values: list[float]) -> None:
    normalizer = Normalizer.from_spec(policy_spec(normalization=mode))
    action = torch.tensor([values])
    torch.testing.assert_close(
        normalizer.unnormalize_action(normalizer.normalize_action(action)), action, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("mode", ["mean_std", "min_max", "quantile"])
def test_a_dimension_without_spread_becomes_zero_and_comes_back_as_its_constant(mode: NormalizationMode) -> None:
    flat = dict.fromkeys(("mean", "min", "max", "q01", "q99"), (7.0,) * ACTION) | {"std": (0.0,) * ACTION}
    known = Statistics(count=9, state=vector_statistics(STATE), action=vector_statistics(ACTION, **flat))
    normalizer = Normalizer.from_spec(policy_spec(normalization=mode, statistics=known))
    assert torch.equal(normalizer.normalize_action(torch.tensor([[7.0, 8.0, -100.0]])), torch.zeros(1, 3))
    assert torch.equal(normalizer.unnormalize_action(torch.tensor([[0.0, 3.0, -2.0]])), torch.full((1, 3), 7.0))


def test_modes_map_their_own_statistics_to_unit_size() -> None:
    known = statistics().action
    for mode, low, high in (("min_max", known.min, known.max), ("quantile", known.q01, known.q99)):
        normalizer = Normalizer.from_spec(policy_spec(normalization=mode))
        torch.testing.assert_close(normalizer.normalize_action(torch.tensor([low])), -torch.ones(1, ACTION))
        torch.testing.assert_close(normalizer.normalize_action(torch.tensor([high])), torch.ones(1, ACTION))
    far = Normalizer.from_spec(policy_spec(normalization="quantile")).normalize_action(torch.full((1, ACTION), 1e6))
    assert torch.equal(far, torch.full((1, ACTION), 2.2))


def test_actions_stay_within_the_contracts_limits() -> None:
    limited = contract(action_low=(-1.0,) * ACTION, action_high=(0.5,) * ACTION)
    normalizer = Normalizer.from_spec(policy_spec(contract=limited))
    raw = normalizer.unnormalize_action(torch.tensor([[100.0, -100.0, 0.0]]))
    assert raw[0, 0] == 0.5
    assert raw[0, 1] == -1.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"statistics": None}, "needs statistics"),
        ({"statistics": statistics(action=ACTION + 1)}, "statistics of the action have 4 dimensions"),
        ({"contract": contract(action_low=(0.0,))}, "action_low"),
        ({"head": "nonesuch"}, "there is no head 'nonesuch'; known heads are: groot, oft"),
        ({"head_config": {"widht": 3}}, "widht"),
        ({"head_config": {"width": 0}}, "width"),
        ({"head_config": {"width": 30, "heads": 4}}, "multiple"),
        ({"chunk": 0}, "chunk"),
        ({"contract": contract(action_dim=0)}, "action_dim"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused_in_one_sentence(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        policy(policy_spec(**changes))
    assert "\n" not in str(refused.value)


# --- policy ----------------------------------------------------------------------------------------------------------


def test_initial_weights_come_from_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    first = policy()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    again, other = policy(), policy(policy_spec(seed=4))
    for name, tensor in first.module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name])
    assert not torch.equal(first.module.state_dict()["out.weight"], other.module.state_dict()["out.weight"])


def test_an_untrained_policy_of_relative_actions_nearly_stands_still() -> None:
    data = batch(1)
    still = policy(policy_spec(contract=contract(control_mode="delta_ee_position"))).act(data.features, data.state)
    drifting = policy().act(data.features, data.state)
    mean = np.array(statistics().action.mean)
    assert np.abs(still).mean() < 0.25 * np.abs(mean).mean(), "zero of a relative action is no motion"
    np.testing.assert_allclose(drifting.mean(axis=(0, 1)), mean, atol=0.25 * np.abs(mean).mean())


def test_a_relative_target_counts_from_the_current_state() -> None:
    data = batch(2)
    square = contract(state_dim=STATE, action_dim=STATE)
    fitting = Statistics(count=9, state=statistics().state, action=statistics().state)
    spec = policy_spec(contract=square, statistics=fitting, action_target="relative_to_state")
    made = policy(spec)
    with torch.no_grad():
        made.module.out.weight.zero_()
    repeated = made.act(data.features, data.state)
    expected = np.repeat(np.asarray(data.state)[:, None], spec.chunk, axis=1)
    np.testing.assert_allclose(repeated, expected, rtol=1e-5, atol=1e-5)
    mask = np.ones((len(data.features), spec.chunk), dtype=bool)
    assert made.loss(data.features, data.state, expected, mask).item() == pytest.approx(0.0, abs=1e-5)


def test_a_relative_target_needs_states_and_actions_of_one_length() -> None:
    with pytest.raises(ValueError, match="of one length"):
        policy(policy_spec(action_target="relative_to_state"))


def test_a_head_too_large_for_a_shared_trainer_is_refused() -> None:
    with pytest.raises(ValueError, match="million parameters"):
        policy(policy_spec(head_config={"queries": 64, "width": 4096, "hidden": 4096}))


def test_padding_changes_nothing_but_rounding() -> None:
    made, data = policy(), batch(1)
    state = torch.zeros(1, STATE)
    short = pad_features(data.features[:1])
    tokens = torch.cat([short.last, torch.full((1, 4, HIDDEN), 1e6)], dim=1)
    longer = PaddedFeature({-1: tokens}, torch.cat([short.mask, torch.zeros(1, 4, dtype=torch.bool)], dim=1))
    with torch.no_grad():
        torch.testing.assert_close(made.module(longer, state, Noise([0])), made.module(short, state, Noise([0])))


def test_the_feature_matters_to_the_action() -> None:
    made = policy()
    random = torch.Generator().manual_seed(0)
    one, two = feature(random, 6), feature(random, 6)
    state = np.zeros((1, STATE), np.float32)
    assert np.abs(made.act([one], state) - made.act([two], state)).max() > 1e-4


def test_a_policy_without_state_acts_on_the_feature_alone() -> None:
    blind = policy(policy_spec(contract=contract(state_dim=0), statistics=statistics(state=0)))
    chunk = blind.act(batch(1).features[:2], np.zeros((2, 0), np.float32))
    assert chunk.shape == (2, CHUNK, ACTION)
    assert np.abs(chunk[0] - chunk[1]).max() > 1e-4


def test_steps_behind_an_episodes_end_do_not_count() -> None:
    made, data = policy(), batch(1)
    before = made.loss(*data.arguments())
    data.action[0, 2:] = 1e9
    assert torch.equal(made.loss(*data.arguments()), before)


def test_read_only_arrays_off_the_wire_are_fine() -> None:
    made, data = policy(), batch(1)
    expected = made.act(data.features, data.state)
    data.state.flags.writeable = False
    np.testing.assert_array_equal(made.act(data.features, data.state), expected)


def _state_nan(arguments: list[object]) -> None:
    arguments[1] = np.full((8, STATE), np.nan, np.float32)


def _foreign(arguments: list[object]) -> None:
    arguments[0] = [VLAFeature(f.layers, f.token_type, "c" * 32) for f in batch(1).features]


def _short_state(arguments: list[object]) -> None:
    arguments[1] = np.zeros((8, STATE - 1), np.float32)


def _long_chunk(arguments: list[object]) -> None:
    arguments[2] = np.zeros((8, CHUNK + 1, ACTION), np.float32)


def _nothing_valid(arguments: list[object]) -> None:
    arguments[3] = np.zeros((8, CHUNK), bool)


def _wrong_mask(arguments: list[object]) -> None:
    arguments[3] = np.ones((8,), bool)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_state_nan, "NaN"),
        (_foreign, "backbone c+"),
        (_short_state, "state has shape \\[8, 4\\]; it must be \\[8, 5\\]"),
        (_long_chunk, "action has shape"),
        (_nothing_valid, "no action to learn from"),
        (_wrong_mask, "action_mask has shape"),
    ],
)
def test_input_that_does_not_fit_is_refused_in_one_sentence(spoil: Callable[[list[object]], None], says: str) -> None:
    arguments = list(batch(1).arguments())
    spoil(arguments)
    with pytest.raises(ValueError, match=says):
        policy().loss(*arguments)
