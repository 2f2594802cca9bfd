"""Promises of a learner: steps, vetoes, and states from which it goes on bit for bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from joynexus.specs import OptimizerSpec, PolicySpec
from joynexus.vla.learner import Learner, learning_rate
from joynexus.vla.policy import Policy
from tests.unit.vla.samples import (
    ACTION,
    CHUNK,
    DIGEST,
    HIDDEN,
    STATE,
    batch,
    feature,
    policy_spec,
)


def policy(spec: PolicySpec | None = None) -> Policy:
    return Policy(spec or policy_spec(), DIGEST, HIDDEN)


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
