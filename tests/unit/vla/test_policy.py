from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joynexus.contract import NormalizationMode, Statistics
from joynexus.specs import OptimizerSpec, PolicySpec
from joynexus.vla.feature import PaddedFeature, VLAFeature, pad_features
from joynexus.vla.learner import Learner, learning_rate
from joynexus.vla.noise import Noise
from joynexus.vla.normalize import Normalizer
from joynexus.vla.policy import Policy
from joynexus.vla.version_file import read_version, write_version
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


# --- learning --------------------------------------------------------------------------------------------------------


def test_oft_learns_from_state_and_feature_together() -> None:
    """Half of the action is told by the state, half only by which token pattern the feature holds."""
    random = torch.Generator().manual_seed(0)
    kinds = [feature(random, 6) for _ in range(4)]
    rng = np.random.default_rng(0)
    spec = policy_spec(normalization="none", statistics=None, optimizer=OptimizerSpec(lr=3e-3))
    learner = Learner(policy(spec))
    losses = []
    for _ in range(400):
        which = rng.integers(0, 4, 32)
        state = rng.standard_normal((32, STATE)).astype(np.float32)
        action = np.stack([state[:, 0], which - 1.5, state[:, 1] * (which > 1)], axis=1).astype(np.float32)
        chunks = np.repeat(action[:, None], CHUNK, axis=1)
        losses.append(
            learner.forward_backward([kinds[k] for k in which], state, chunks, np.ones((32, CHUNK), bool))["loss"]
        )
        learner.optim_step()
    assert np.mean(losses[-20:]) < 0.12 * np.mean(losses[:5])


def test_features_that_say_nothing_do_not_drown_the_state() -> None:
    """With fresh noise in place of pictures the state is still learned."""
    random = torch.Generator().manual_seed(0)
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((STATE, ACTION)).astype(np.float32)
    spec = policy_spec(normalization="none", statistics=None, optimizer=OptimizerSpec(lr=3e-3))
    learner = Learner(policy(spec))
    losses = []
    for _ in range(400):
        state = rng.standard_normal((32, STATE)).astype(np.float32)
        chunks = np.repeat((state @ weights)[:, None], CHUNK, axis=1)
        noise = [feature(random, 6) for _ in range(32)]
        losses.append(learner.forward_backward(noise, state, chunks, np.ones((32, CHUNK), bool))["loss"])
        learner.optim_step()
    assert np.mean(losses[-20:]) < 0.12 * np.mean(losses[:5])


def test_a_learner_that_is_restored_goes_on_bit_for_bit() -> None:
    spec = policy_spec(optimizer=OptimizerSpec(warmup_steps=3, decay_steps=20))
    straight, stopped = Learner(policy(spec)), Learner(policy(spec))
    losses = []
    for seed in range(10):
        losses.append(straight.forward_backward(*batch(seed).arguments())["loss"])
        straight.optim_step()
    for seed in range(4):
        stopped.forward_backward(*batch(seed).arguments())
        stopped.optim_step()
    tensors, meta = stopped.state()
    meta = json.loads(json.dumps(meta))
    resumed = Learner(policy(policy_spec(seed=77, optimizer=spec.optimizer)))
    resumed.load(tensors, meta)
    for seed in range(4, 10):
        assert resumed.forward_backward(*batch(seed).arguments())["loss"] == losses[seed]
        resumed.optim_step()
    for name, tensor in straight.state()[0].items():
        assert torch.equal(tensor, resumed.state()[0][name]), name


def test_learning_equals_a_plain_torch_loop_bit_for_bit() -> None:
    spec = policy_spec(optimizer=OptimizerSpec(lr=1e-3, grad_clip=0.5))
    learner, plain = Learner(policy(spec)), policy(spec)
    o = spec.optimizer
    optimizer = torch.optim.AdamW(
        plain.module.parameters(), lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, fused=True
    )
    for seed in range(50):
        loss = plain.loss(*batch(seed).arguments())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(plain.module.parameters(), 0.5)
        optimizer.step()
        assert learner.forward_backward(*batch(seed).arguments())["loss"] == loss.item()
        learner.optim_step()


def test_a_parameter_that_no_loss_reaches_stays_and_is_saved_with_the_rest() -> None:
    """An installed module may have one, e.g. for a kind of sample that this batch lacks."""
    learner = Learner(policy())
    learner.policy.module.gate.requires_grad_(False)
    for seed in range(2):
        learner.forward_backward(*batch(seed).arguments())
        learner.optim_step()
    tensors, meta = learner.state()
    resumed = Learner(policy(policy_spec(seed=77)))
    resumed.load(tensors, meta)
    assert torch.equal(resumed.policy.module.gate, policy().module.gate)
    assert tensors["optimizer.step.gate"] == 0
    assert tensors["optimizer.step.query"] == 2


def test_a_head_that_returns_something_else_than_it_should_is_named_in_one_sentence() -> None:
    made, data = policy(), batch(0)
    module = made.module
    for loss, says in (
        (lambda *_: module.gate.expand(3), r"returned a loss of shape \[3\] with gradients"),
        (lambda *_: module.gate.detach(), r"returned a loss of shape \[\] without gradients"),
    ):
        module.loss = loss  # type: ignore[method-assign]  # as an installed head may have it
        with pytest.raises(ValueError, match=says):
            made.loss(*data.arguments())
    module.forward = lambda *_: torch.zeros(1, CHUNK, ACTION)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"the head 'oft' returned chunks of shape \[1, "):
        made.act(data.features, data.state)


def test_a_loss_that_is_not_finite_vetoes_the_whole_step() -> None:
    learner = Learner(policy())
    learner.forward_backward(*batch(0).arguments())
    learner.optim_step()
    before, _ = learner.state()
    learner.forward_backward(*batch(1).arguments())
    bad = batch(2)
    bad.action[3, 0, 0] = np.nan
    assert learner.forward_backward(*bad.arguments())["vetoed"]
    step = learner.optim_step()
    assert step["skipped"]
    assert step["step"] == 1
    after, _ = learner.state()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    learner.forward_backward(*batch(1).arguments())
    assert not learner.optim_step()["skipped"]


def test_a_gradient_that_is_not_finite_vetoes_the_step() -> None:
    learner = Learner(policy())
    learner.forward_backward(*batch(0).arguments())
    before = {name: tensor.clone() for name, tensor in learner.policy.module.state_dict().items()}
    next(learner.policy.module.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]  # there is one
    assert learner.optim_step()["skipped"]
    after = learner.policy.module.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_gradients_of_several_forward_backwards_add_up() -> None:
    both, one = Learner(policy()), Learner(policy())
    both.forward_backward(*batch(0).arguments())
    both.forward_backward(*batch(0).arguments())
    one.forward_backward(*batch(0).arguments())
    assert both.optim_step()["grad_norm"] == pytest.approx(2 * one.optim_step()["grad_norm"], rel=1e-5)


def test_a_step_or_checkpoint_at_the_wrong_moment_is_refused() -> None:
    learner = Learner(policy())
    with pytest.raises(ValueError, match="call forward_backward first"):
        learner.optim_step()
    learner.forward_backward(*batch(0).arguments())
    with pytest.raises(ValueError, match="gradients are pending"):
        learner.state()


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    learner = Learner(policy())
    learner.forward_backward(*batch(0).arguments())
    learner.optim_step()
    tensors, meta = learner.state()
    with pytest.raises(ValueError, match="missing tensors"):
        learner.load({k: v for k, v in tensors.items() if "exp_avg_sq" not in k}, meta)
    with pytest.raises(ValueError, match="expected"):
        learner.load(tensors | {"module.gate": torch.zeros(3)}, meta)
    assert all(torch.equal(tensor, learner.state()[0][name]) for name, tensor in tensors.items())


def test_the_learning_rate_warms_up_then_decays_to_its_floor() -> None:
    spec = OptimizerSpec(lr=1.0, warmup_steps=4, decay_steps=14, final_lr_fraction=0.1)
    rates = [learning_rate(spec, step) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[9] == pytest.approx(0.55)
    assert rates[14:] == [pytest.approx(0.1)] * 6
    assert {learning_rate(OptimizerSpec(lr=2.0), step) for step in range(50)} == {2.0}


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"betas": (1.0, 0.9)}, {"grad_clip": -1.0}, {"lr": float("nan")}])
def test_optimizer_settings_out_of_range_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Learner(policy(policy_spec(optimizer=OptimizerSpec(**wrong))))  # type: ignore[arg-type]  # the point of it


# --- version files ---------------------------------------------------------------------------------------------------


def test_a_version_acts_as_the_policy_that_was_written(tmp_path: Path) -> None:
    learner = Learner(policy())
    learner.forward_backward(*batch(0).arguments())
    learner.optim_step()
    digest, nbytes = write_version(tmp_path / "v", learner.policy, 7, numerics_class="n")
    loaded = read_version(tmp_path / "v", digest)
    assert (loaded.version, loaded.spec, loaded.digest, loaded.nbytes) == (7, learner.policy.spec, digest, nbytes)
    assert loaded.meta.numerics_class == "n"
    data = batch(5)
    np.testing.assert_array_equal(
        loaded.policy.act(data.features, data.state), learner.policy.act(data.features, data.state)
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "v"]


def test_the_same_version_has_the_same_bytes(tmp_path: Path) -> None:
    one, _ = write_version(tmp_path / "a", policy(), 1)
    two, _ = write_version(tmp_path / "b", policy(), 1)
    other, _ = write_version(tmp_path / "c", policy(), 2)
    assert one == two != other


def test_a_version_with_nan_is_not_written(tmp_path: Path) -> None:
    made = policy()
    with torch.no_grad():
        next(made.module.parameters()).fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN or infinity in 'query'"):
        write_version(tmp_path / "v", made, 1)
    assert not list(tmp_path.iterdir())


def _parts(content: bytes) -> tuple[dict[str, object], bytes]:
    (size,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def _whole(header: dict[str, object], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _with_meta(content: bytes, **changes: object) -> bytes:
    header, data = _parts(content)
    meta = json.loads(header["__metadata__"]["joynexus"]) | changes  # type: ignore[index]  # JSON
    header["__metadata__"] = {"joynexus": json.dumps(meta)}
    return _whole(header, data)


def _renamed(content: bytes) -> bytes:
    header, data = _parts(content)
    header["nonesuch"] = header.pop("gate")
    return _whole(header, data)


def _reshaped(content: bytes) -> bytes:
    header, data = _parts(content)
    header["middle.bias"]["shape"] = [4, 8]  # type: ignore[index]  # JSON
    return _whole(header, data)


def _poisoned(content: bytes) -> bytes:
    header, data = _parts(content)
    start = header["gate"]["data_offsets"][0]  # type: ignore[index]  # JSON
    return _whole(header, data[:start] + struct.pack("<f", float("inf")) + data[start + 4 :])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda c: c[:-10], "damaged"),
        (lambda c: c[:100], "truncated"),
        (lambda c: b"", "not a JoyNexus version file"),
        (lambda c: b"PK\x03\x04" + c, "truncated"),
        (lambda c: _whole({}, b""), "no readable metadata"),
        (lambda c: _whole({"__metadata__": {"joynexus": "\ud800"}}, b""), "no readable metadata"),
        (lambda c: struct.pack("<Q", 100_000) + b"[" * 100_000, "no readable metadata"),
        (lambda c: _with_meta(c, format=9), "format 9"),
        (lambda c: _with_meta(c, surprise=1), "surprise"),
        (lambda c: _with_meta(c, hidden_size=HIDDEN * 2), "does not fit its spec"),
        (_renamed, "missing tensors \\['gate'\\], unknown tensors \\['nonesuch'\\]"),
        (_reshaped, "'middle.bias'"),
        (_poisoned, "NaN or infinity in 'gate'"),
    ],
)
def test_a_version_file_that_is_not_right_is_refused(
    tmp_path: Path, spoil: Callable[[bytes], bytes], says: str
) -> None:
    write_version(tmp_path / "v", policy(), 1)
    with pytest.raises(ValueError, match=says):
        read_version(spoil((tmp_path / "v").read_bytes()))


def test_a_version_file_with_another_digest_or_none_at_all_is_refused(tmp_path: Path) -> None:
    digest, _ = write_version(tmp_path / "v", policy(), 1)
    write_version(tmp_path / "v", policy(policy_spec(seed=9)), 1)
    with pytest.raises(ValueError, match=f"expected {digest}"):
        read_version(tmp_path / "v", digest)
    with pytest.raises(ValueError, match="cannot be read"):
        read_version(tmp_path / "nonesuch")
