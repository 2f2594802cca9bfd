"""Promises of the `groot` head: it samples what was shown, from given seeds alone, row by row."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from joynexus.specs import OptimizerSpec, PolicySpec
from joynexus.vla.feature import PaddedFeature, pad_features
from joynexus.vla.heads.groot import flow_time
from joynexus.vla.learner import Learner
from joynexus.vla.modules import build_module, check_modules
from joynexus.vla.noise import Noise
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
)

TINY = {"width": 32, "layers": 2, "heads": 4, "future_tokens": 2, "repeated_diffusion_steps": 2}


def groot_spec(**changes: object) -> PolicySpec:
    return policy_spec(**({"head": "groot", "head_config": TINY} | changes))


def groot(**changes: object) -> Policy:
    return Policy(groot_spec(**changes), DIGEST, HIDDEN)


def two_ways(spec: PolicySpec, steps: int) -> np.ndarray:
    """Train on demonstrations that do +1 or -1, doubled where the feature says so; return 64 chunks' means, [2, 32]."""
    random = torch.Generator().manual_seed(0)
    kinds = [feature(random, 6) for _ in range(2)]
    rng = np.random.default_rng(0)
    learner = Learner(Policy(spec, DIGEST, HIDDEN))
    for step in range(steps):
        which, way = rng.integers(0, 2, 32), rng.choice([-1.0, 1.0], 32)
        action = np.broadcast_to((way * (1 + which))[:, None, None], (32, CHUNK, ACTION)).astype(np.float32)
        state = rng.standard_normal((32, STATE)).astype(np.float32)
        learner.forward_backward([kinds[k] for k in which], state, action, np.ones((32, CHUNK), bool), draw=step)
        learner.optim_step()
    rows = [kinds[0]] * 32 + [kinds[1]] * 32
    chunks = learner.policy.act(rows, np.zeros((64, STATE), np.float32), seeds=range(64))
    assert np.median(chunks.std(axis=(1, 2))) < 0.3, "the steps of a chunk agree on the way"
    means: np.ndarray = chunks.mean(axis=(1, 2)).reshape(2, 32)
    return means


def test_sampled_chunks_hit_both_ways_where_regression_gives_the_mean() -> None:
    plain = groot_spec(
        normalization="none", statistics=None, optimizer=OptimizerSpec(lr=5e-3), head_config=TINY | {"width": 64}
    )
    for scale, sampled in zip((1.0, 2.0), two_ways(plain, 150), strict=True):
        assert np.median(np.abs(np.abs(sampled) - scale)) < 0.25 * scale
        assert 5 <= (sampled > 0).sum() <= 27, "both ways are taken"
    regressed = two_ways(msgspec.structs.replace(plain, head="oft", head_config={}), 150)
    assert np.abs(regressed[0]).max() < 0.6, "neither way"


def test_a_rows_chunk_follows_from_its_seed_and_not_from_its_place() -> None:
    made, data = groot(), batch(1)
    features, state = [data.features[0]] * 8, np.repeat(data.state[:1], 8, axis=0)
    chunks = made.act(features, state, seeds=[5, 6, 7, 8, 5, 6, 7, 9])
    np.testing.assert_array_equal(chunks[:3], chunks[4:7])
    assert np.abs(chunks[3] - chunks[7]).max() > 1e-2
    np.testing.assert_array_equal(made.act(features, state), made.act(features, state, seeds=[0] * 8))


def test_a_draw_again_gives_the_same_loss_and_another_draw_another() -> None:
    made, data = groot(), batch(1)
    first, other, again = (made.loss(*data.arguments(), draw=draw).item() for draw in (1, 2, 1))
    assert first == again != other


def test_policies_of_different_seeds_draw_differently() -> None:
    """The noise is the policy's own, even where the weights are the same."""
    data = batch(1)
    one, two = groot(), groot(seed=4)
    two.module.load_state_dict(one.module.state_dict())
    assert one.loss(*data.arguments()).item() != two.loss(*data.arguments()).item()


def test_padding_changes_nothing_but_rounding() -> None:
    made, state = groot(), torch.zeros(1, STATE)
    short = pad_features(batch(1).features[:1])
    tokens = torch.cat([short.last, torch.full((1, 4, HIDDEN), 1e6)], dim=1)
    longer = PaddedFeature({-1: tokens}, torch.cat([short.mask, torch.zeros(1, 4, dtype=torch.bool)], dim=1))
    with torch.no_grad():
        torch.testing.assert_close(made.module(longer, state, Noise([0])), made.module(short, state, Noise([0])))


def test_steps_behind_an_episodes_end_are_seen_by_nobody() -> None:
    made, data = groot(), batch(1)
    before = made.loss(*data.arguments())
    data.action[0, 2:] = np.nan
    assert torch.equal(made.loss(*data.arguments()), before)


def test_noisy_chunks_of_one_sample_do_not_see_each_other() -> None:
    """The mean loss over more noisy chunks is that over each, made one at a time."""
    spec = groot_spec(head_config=TINY | {"repeated_diffusion_steps": 3})
    module = build_module(spec, HIDDEN)
    data = batch(1)
    padded, state = pad_features(data.features), torch.from_numpy(data.state)
    action, valid = torch.from_numpy(data.action), torch.from_numpy(data.mask)

    class Replayed(Noise):
        """Gives one of the three draws of each row."""

        def __init__(self, which: int) -> None:
            super().__init__(range(len(state)))
            self.which = which

        def normal(self, *shape: int) -> torch.Tensor:
            return super().normal(3, *shape[1:])[:, self.which : self.which + 1]

        def uniform(self, *shape: int) -> torch.Tensor:
            return super().uniform(3)[:, self.which : self.which + 1]

    together = module.loss(padded, state, action, valid, Noise(range(len(state))))
    single = build_module(msgspec.structs.replace(spec, head_config=TINY | {"repeated_diffusion_steps": 1}), HIDDEN)
    apart = torch.stack([single.loss(padded, state, action, valid, Replayed(which)) for which in range(3)])
    torch.testing.assert_close(together, apart.mean())


def test_feature_and_state_matter_to_the_action() -> None:
    made, random = groot(), torch.Generator().manual_seed(0)
    one, two = feature(random, 6), feature(random, 6)
    state = np.zeros((1, STATE), np.float32)
    base = made.act([one], state)
    assert np.abs(base - made.act([two], state)).max() > 1e-4
    assert np.abs(base - made.act([one], state + 1)).max() > 1e-4


def test_a_policy_without_state_acts_on_the_feature_alone() -> None:
    blind = groot(contract=contract(state_dim=0), statistics=statistics(state=0))
    chunk = blind.act(batch(1).features[:2], np.zeros((2, 0), np.float32))
    assert chunk.shape == (2, CHUNK, ACTION)
    assert np.isfinite(chunk).all()


def test_flow_times_are_one_minus_a_beta_variable() -> None:
    """Beta(1.5, 1) has mean 0.6 and variance 0.0686."""
    times = flow_time(torch.rand(100_000, generator=torch.Generator().manual_seed(0)))
    assert times.min() >= 0
    assert times.max() <= 1
    assert times.mean().item() == pytest.approx(0.4, abs=0.005)
    assert times.var().item() == pytest.approx(12 / 175, abs=0.003)


def test_learning_equals_a_plain_torch_loop_bit_for_bit() -> None:
    spec = groot_spec(optimizer=OptimizerSpec(lr=1e-3, grad_clip=0.5))
    learner, plain = Learner(Policy(spec, DIGEST, HIDDEN)), Policy(spec, DIGEST, HIDDEN)
    o = spec.optimizer
    optimizer = torch.optim.AdamW(
        plain.module.parameters(), lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, fused=True
    )
    for seed in range(50):
        loss = plain.loss(*batch(seed).arguments(), draw=seed)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(plain.module.parameters(), 0.5)
        optimizer.step()
        assert learner.forward_backward(*batch(seed).arguments(), draw=seed)["loss"] == loss.item()
        learner.optim_step()


def test_the_named_sizes_are_those_of_dit_b_and_dit_l() -> None:
    """16 layers of width 768 or 1536, half of them with keys and values from the feature's width."""
    for size, width in (("base", 768), ("large", 1536)):
        spec = groot_spec(head_config={"size": size}, chunk=16)
        blocks = 16 * 14 * width**2 + 8 * 2 * width * (2048 - width)
        others = check_modules(spec, 2048) / 16 - blocks
        assert 0 < others < 14 * width**2
    (deeper, flat) = (check_modules(groot_spec(head_config={"layers": n}), HIDDEN) for n in (6, 4))
    assert deeper > 1.4 * flat


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"size": "huge"}, "huge"),
        ({"widht": 64}, "widht.*known keys: size, layers"),
        ({"width": 36, "heads": 4}, "no multiple of twice the heads"),
        ({"num_inference_timesteps": 0}, "num_inference_timesteps"),
        ({"size": "large", "layers": 64}, "million parameters, and at most 800 are allowed"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_one_sentence(config: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        check_modules(groot_spec(head_config=config), 2048)
    assert "\n" not in str(refused.value)
