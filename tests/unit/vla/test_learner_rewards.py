"""Promises of learning from rewards: plain steps, vetoes, states and versions that hold what RL added."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from joynexus.specs import CriticSpec, ExplorationSpec, OptimizerSpec, PolicySpec
from joynexus.vla.exported import export_policy
from joynexus.vla.learner import Learner, StepMetrics, learning_rate
from joynexus.vla.policy import Policy
from joynexus.vla.version_file import read_version, write_version
from joynexus.wire.back import RlBegin
from tests.unit.vla.samples import CHUNK, DIGEST, HIDDEN, batch, policy_spec

BEGIN = RlBegin(
    exploration=ExplorationSpec(),
    critic=CriticSpec(width=16, lr=1e-2),
    values=CHUNK,
    optimizer=OptimizerSpec(lr=1e-3, grad_clip=0.5, weight_decay=0.1, warmup_steps=2, decay_steps=50),
)
NOISE = msgspec.structs.replace(BEGIN, exploration=ExplorationSpec(flow="noise"))
GROOT = policy_spec(head="groot", head_config={"width": 32, "layers": 2, "heads": 4, "future_tokens": 2})
BOTH = [(policy_spec(), BEGIN), (policy_spec(adapter="bottleneck"), BEGIN), (GROOT, NOISE)]


def learner(spec: PolicySpec | None = None, begin: RlBegin | None = BEGIN) -> Learner:
    made = Learner(Policy(spec or policy_spec(), DIGEST, HIDDEN))
    if begin is not None:
        made.begin_rl(begin)
    return made


def objective(policy: Policy, seed: int) -> Tensor:
    """Something like a policy-gradient loss, from samples that depend on the seed alone."""
    data = batch(seed)
    shape = policy.explore(data.features, data.state, seeds=range(8)).sample.shape
    sample = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    log_prob, entropy, value = policy.evaluate(data.features, data.state, sample)
    return (
        (0.01 * log_prob * torch.from_numpy(data.action)).mean() + (value - 1).square().mean() - 0.01 * entropy.mean()
    )


def step(made: Learner, *losses: Tensor) -> StepMetrics:
    for loss in losses:
        made.add(loss)
    return made.apply()


def train(made: Learner, seeds: Sequence[int]) -> list[StepMetrics]:
    return [step(made, objective(made.policy, seed)) for seed in seeds]


def supervise(made: Learner, seeds: Sequence[int]) -> list[float]:
    losses = []
    for seed in seeds:
        losses.append(made.forward_backward(*batch(seed).arguments())["loss"])
        made.optim_step()
    return losses


def equal(one: Learner, two: Learner) -> bool:
    first, second = one.state()[0], two.state()[0]
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize(("spec", "begin"), BOTH)
def test_steps_on_rewards_equal_a_plain_torch_loop_bit_for_bit(spec: PolicySpec, begin: RlBegin) -> None:
    made, plain = learner(spec, begin), learner(spec, begin).policy
    assert plain.actor_critic is not None
    assert plain.actor_critic.critic is not None
    acting, drawing = list(plain.module.parameters()), list(plain.actor_critic.exploration.parameters())
    judging, o = list(plain.actor_critic.critic.parameters()), begin.optimizer
    groups = [{"params": acting}, {"params": drawing, "weight_decay": 0.0}, {"params": judging}]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, fused=True)
    for seed, step in enumerate(train(made, range(8))):
        for group, peak in zip(optimizer.param_groups, (o.lr, o.lr, 1e-2), strict=True):
            group["lr"] = learning_rate(msgspec.structs.replace(o, lr=peak), seed)
        optimizer.zero_grad()
        objective(plain, seed).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        norm = torch.nn.utils.clip_grad_norm_([*acting, *drawing, *judging], 0.5)
        optimizer.step()
        assert step["grad_norm"] == float(norm)
        assert step["step"] == seed + 1
    for name, tensor in plain.tensors().items():
        assert torch.equal(made.policy.tensors()[name], tensor), name


@pytest.mark.parametrize(("spec", "begin"), BOTH)
def test_a_learner_restored_in_the_middle_of_rl_goes_on_bit_for_bit(spec: PolicySpec, begin: RlBegin) -> None:
    straight, stopped = learner(spec, begin), learner(spec, begin)
    train(straight, range(6))
    train(stopped, range(3))
    tensors, meta = stopped.state()
    resumed = learner(msgspec.structs.replace(spec, seed=77), None)
    resumed.load(tensors, json.loads(json.dumps(meta)))
    train(resumed, range(3, 6))
    assert equal(straight, resumed)


def test_a_state_that_was_saved_before_rl_forgets_what_rl_added() -> None:
    made = learner(begin=None)
    supervise(made, range(2))
    tensors, meta = made.state()
    made.begin_rl(BEGIN)
    train(made, range(2))
    made.load(tensors, meta)
    assert made.policy.actor_critic is None
    untouched = learner(begin=None)
    supervise(untouched, range(2))
    assert supervise(made, range(2, 4)) == supervise(untouched, range(2, 4))
    assert equal(made, untouched)


def test_a_state_that_does_not_fit_changes_nothing_of_what_rl_added() -> None:
    made, other = learner(), learner(begin=msgspec.structs.replace(BEGIN, critic=CriticSpec(width=8)))
    train(made, range(2))
    before, _ = made.state()
    tensors, meta = other.state()
    for spoilt, said, says in (
        ({name: tensor for name, tensor in tensors.items() if "critic.gate" not in name}, meta, "missing tensors"),
        (tensors, meta | {"rl": {"what": "begin"}}, "not valid"),
        (tensors, meta | {"rl": None, "from_rewards": False}, "unknown tensors"),
    ):
        with pytest.raises(ValueError, match=says):
            made.load(spoilt, said)
    after, _ = made.state()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    train(made, [2])


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_whole(broken: str) -> None:
    made, untouched = learner(), learner()
    train(made, [0])
    train(untouched, [0])
    loss = objective(made.policy, 1)
    spoilt = loss * float("nan") if broken == "loss" else (loss - loss.detach()).abs().sqrt()
    assert bool(torch.isfinite(spoilt)) == (broken == "gradient")
    skipped = step(made, spoilt)
    assert skipped["skipped"]
    assert skipped["step"] == 1
    assert equal(made, untouched)
    assert train(made, [2]) == train(untouched, [2])
    assert equal(made, untouched)


def test_a_loss_may_come_in_parts_and_one_that_is_not_finite_vetoes_the_step_of_all() -> None:
    parts, whole = learner(), learner()
    found = step(parts, *(objective(parts.policy, seed) / 2 for seed in (0, 1)))
    expected = step(whole, (objective(whole.policy, 0) + objective(whole.policy, 1)) / 2)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    untouched, _ = parts.state()
    assert step(parts, objective(parts.policy, 2), torch.tensor(math.inf))["skipped"]
    after, _ = parts.state()
    assert all(torch.equal(tensor, after[name]) for name, tensor in untouched.items())


def test_samples_after_rewards_use_the_specs_optimizer_from_the_beginning() -> None:
    """The moments of the one say nothing of the other; the weights are those that RL left."""
    spec = policy_spec(optimizer=OptimizerSpec(lr=2e-3, warmup_steps=4))
    made = learner(spec)
    train(made, range(3))
    rewarded = dict(made.policy.module.state_dict())
    fresh = learner(spec, None)
    fresh.policy.module.load_state_dict(rewarded)
    assert supervise(made, range(3)) == supervise(fresh, range(3))
    assert made.step == 3
    assert made.policy.actor_critic is not None, "a later job goes on with it"
    with pytest.raises(ValueError, match="rl_begin comes first"):
        made.add(objective(made.policy, 0))
    made.begin_rl(BEGIN)
    assert made.step == 0
    assert made.optimizer == BEGIN.optimizer
    train(made, range(2))


@pytest.mark.parametrize("broken", ["samples", "loss", "gradient"])
def test_samples_that_lead_to_no_step_cost_rewards_neither_their_moments_nor_their_turn(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, untouched = learner(), learner()
    train(made, range(3))
    train(untouched, range(3))
    features, state, action, mask = batch(9).arguments()
    if broken == "samples":
        with pytest.raises(ValueError, match="False everywhere"):
            made.forward_backward(features, state, action, np.zeros_like(mask))
    else:
        if broken == "gradient":
            honest = made.policy.loss
            monkeypatch.setattr(
                made.policy, "loss", lambda *given, **also: (root := honest(*given, **also) * 0).sqrt() + root
            )
        else:
            action = np.full_like(action, np.nan)
        assert made.forward_backward(features, state, action, mask)["vetoed"] == (broken == "loss")
        assert made.optim_step()["skipped"]
    assert made.from_rewards
    assert equal(made, untouched)
    assert train(made, [3]) == train(untouched, [3])
    assert equal(made, untouched)


def test_gradients_that_wait_do_not_enter_a_step_on_rewards() -> None:
    made, untouched = learner(), learner()
    made.forward_backward(*batch(9).arguments())
    assert train(made, range(2)) == train(untouched, range(2))
    assert equal(made, untouched)
    assert made.pending == 0


def test_the_value_head_takes_the_policys_rate_unless_it_has_its_own() -> None:
    slow, fast = learner(begin=msgspec.structs.replace(BEGIN, critic=CriticSpec(width=16))), learner()
    for made in (slow, fast):
        before = {name: tensor.clone() for name, tensor in made.policy.tensors().items()}
        (step,) = train(made, [0])
        moved = {name: float((tensor - before[name]).abs().max()) for name, tensor in made.policy.tensors().items()}
        ratio = moved["rl.critic.out.bias"] / step["lr"]  # Adam's first step has the size of the rate
        assert ratio == pytest.approx(1.0 if made is slow else 10.0, rel=0.01)


def test_what_was_learned_to_draw_with_does_not_decay() -> None:
    made = learner()
    assert made.policy.actor_critic is not None
    before = made.policy.tensors()["rl.exploration.log_std"].clone()
    data = batch(0)
    _, entropy, value = made.policy.evaluate(data.features, data.state, data.action)
    step(made, value.mean() + 0 * entropy.sum())
    assert torch.equal(made.policy.tensors()["rl.exploration.log_std"], before)


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "begin"), BOTH)
def test_a_version_explores_and_judges_as_the_policy_that_was_published(
    tmp_path: Path, spec: PolicySpec, begin: RlBegin
) -> None:
    made, data = learner(spec, begin), batch(9)
    train(made, range(2))
    digest, _ = write_version(tmp_path / "v", made.policy, 3)
    assert write_version(tmp_path / "again", made.policy, 3)[0] == digest
    loaded = read_version(tmp_path / "v", digest)
    assert loaded.meta.rl == begin
    found = loaded.policy.explore(data.features, data.state, seeds=range(8))
    for one, two in zip(found, made.policy.explore(data.features, data.state, seeds=range(8)), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_version_that_lacks_what_its_rl_needs_is_refused(tmp_path: Path) -> None:
    made = learner()
    write_version(tmp_path / "v", made.policy, 3)
    with safe_open(tmp_path / "v", framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(tmp_path / "v")
    save_file({k: v for k, v in tensors.items() if k != "rl.critic.gate"}, tmp_path / "v", metadata)
    with pytest.raises(ValueError, match=r"missing tensors \['rl.critic.gate'\]"):
        read_version(tmp_path / "v")


def test_weights_of_a_version_with_rl_are_taken_without_it(tmp_path: Path) -> None:
    theirs, data = learner(), batch(9)
    train(theirs, range(2))
    write_version(tmp_path / "v", theirs.policy, 3)
    for mine in (learner(begin=None), learner()):
        mine.load_weights(tmp_path / "v")
        assert mine.policy.actor_critic is None
        assert mine.step == 0
        np.testing.assert_array_equal(
            mine.policy.act(data.features, data.state), theirs.policy.act(data.features, data.state)
        )
        supervise(mine, [0])


def test_an_export_leaves_out_what_only_rl_needs(tmp_path: Path) -> None:
    made, data = learner(), batch(9)
    train(made, range(2))
    write_version(tmp_path / "v", made.policy, 3)
    export_policy(tmp_path / "v", tmp_path / "exported")
    loaded = read_version(tmp_path / "exported" / "policy.safetensors")
    assert loaded.policy.actor_critic is None
    assert loaded.version == 3
    assert not any(name.startswith("rl.") for name in load_file(tmp_path / "exported" / "policy.safetensors"))
    np.testing.assert_array_equal(
        loaded.policy.act(data.features, data.state), made.policy.act(data.features, data.state)
    )


# --- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "begin"), [(policy_spec(), BEGIN), (GROOT, BEGIN), (GROOT, NOISE)])
def test_a_policy_learns_to_do_what_is_rewarded(spec: PolicySpec, begin: RlBegin) -> None:
    """Actions are rewarded for being near 1, which no policy does at first; clipped policy gradients on 25 updates."""
    spec = msgspec.structs.replace(spec, normalization="none", statistics=None)
    optimizer = OptimizerSpec(lr=1e-2 if spec.head == "oft" else 3e-3)
    made = learner(spec, msgspec.structs.replace(begin, critic=None, values=1, optimizer=optimizer))
    features, rng, rewards = batch(0).features[:1] * 32, np.random.default_rng(0), []
    for update in range(25):
        state = rng.standard_normal((32, 5)).astype(np.float32)
        explored = made.policy.explore(features, state, seeds=range(32 * update, 32 * update + 32))
        reward = -np.square(explored.actions - 1).sum((1, 2))
        rewards.append(reward.mean())
        advantage = torch.from_numpy((reward - reward.mean()) / reward.std())
        before = torch.from_numpy(explored.log_prob).sum((1, 2))
        for _ in range(2):
            log_prob, _, _ = made.policy.evaluate(features, state, explored.sample)
            ratio = (log_prob.sum((1, 2)) - before).exp()
            step(made, -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean())
    assert np.mean(rewards[-5:]) > 0.6 * np.mean(rewards[:5]), "rewards are negative: nearer to zero is better"
