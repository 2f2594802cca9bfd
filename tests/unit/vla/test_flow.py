"""Promises of exploring along a flow: the densities are right, and without noise nothing changes."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from joynexus.specs import ExplorationSpec, OptimizerSpec
from joynexus.vla.heads.flow import Field, FlowNoise, FlowSde
from joynexus.vla.noise import Noise
from joynexus.vla.policy import Policy
from joynexus.wire.back import RlBegin
from tests.unit.vla.samples import DIGEST, HIDDEN, batch, policy_spec

TINY = {"width": 32, "layers": 2, "heads": 4, "future_tokens": 2, "num_inference_timesteps": 4}
CHUNK, ACTION = 4, 3


def groot(exploration: ExplorationSpec) -> Policy:
    made = Policy(policy_spec(head="groot", head_config=TINY), DIGEST, HIDDEN)
    made.begin_rl(RlBegin(exploration=exploration, critic=None, values=1, optimizer=OptimizerSpec()))
    return made


def published_step(x: Tensor, v: Tensor, t: float, t_next: float, level: float) -> tuple[Tensor, float]:
    """One SDE step as it is published, with time from 1 (noise) to 0 (action) and velocity noise - action."""
    d = t - t_next
    s = level * math.sqrt(t / (1 - (t if t < 1 else t_next)))
    action, noise = x - v * t, x + v * (1 - t)
    return action * (1 - t_next) + noise * (t_next - s * s * d / (2 * t)), s * math.sqrt(d)


def curved(chunk: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """A field that is none of a network's."""
    return torch.sin(3 * chunk) - chunk * time[:, None, None], chunk


@pytest.mark.parametrize("steps", [1, 3, 4, 10])
def test_a_stochastic_step_is_the_published_one_with_time_reversed(steps: int) -> None:
    level, rows = 0.7, 64
    drawn = FlowSde(ExplorationSpec(noise_level=level), steps).explore(
        curved, torch.randn(rows, 2, 3, generator=torch.Generator().manual_seed(0)), Noise(range(rows))
    )
    indices = drawn.sample[:, -1].long()
    assert set(indices.tolist()) == set(range(steps)), "every step has its turn"
    for row, index in enumerate(indices.tolist()):
        before, behind = drawn.sample[row, :-1].view(2, 1, 2, 3)
        t, t_next = 1 - index / steps, 1 - (index + 1) / steps
        velocity, _ = curved(before, torch.tensor([index / steps]))
        mean, std = published_step(before, -velocity, t, t_next, level)
        expected = torch.distributions.Normal(mean, std).log_prob(behind)
        torch.testing.assert_close(drawn.log_prob[row : row + 1], expected, atol=2e-4, rtol=2e-4)


def test_the_other_steps_follow_the_field_as_they_do_without_exploring() -> None:
    steps, rows = 4, 16
    start = torch.randn(rows, 2, 3, generator=torch.Generator().manual_seed(1))
    drawn = FlowSde(ExplorationSpec(), steps).explore(curved, start, Noise(range(rows)))
    for row, index in enumerate(drawn.sample[:, -1].long().tolist()):
        before, behind = drawn.sample[row, :-1].view(2, 1, 2, 3)
        chunk = start[row : row + 1]
        for step in range(steps):
            if step == index:
                assert torch.equal(chunk, before)
                chunk = behind
            else:
                chunk = chunk + curved(chunk, torch.tensor([step / steps]))[0] / steps
        assert torch.equal(chunk[0], drawn.action[row])


def test_the_stochastic_step_keeps_the_distribution_of_actions() -> None:
    """The exact field of data N(2, 0.5^2): many fine steps, one of which is noisy, still give that distribution."""
    mean, std, rows, steps = 2.0, 0.5, 4096, 50

    def exact(chunk: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        t = time[:, None, None]
        variance = (t * std) ** 2 + (1 - t) ** 2
        gain = (t * std**2 - (1 - t)) / variance  # E[a - e | x] of jointly Gaussian a, e
        return mean + gain * (chunk - t * mean), chunk

    start = torch.randn(rows, 1, 1, generator=torch.Generator().manual_seed(2))
    drawn = FlowSde(ExplorationSpec(noise_level=0.5), steps).explore(exact, start, Noise(range(rows))).action
    assert float(drawn.mean()) == pytest.approx(mean, abs=0.03)
    assert float(drawn.std()) == pytest.approx(std, abs=0.03)


@pytest.mark.parametrize(
    "quiet",
    [ExplorationSpec(flow="sde", noise_level=1e-6), ExplorationSpec(flow="noise", noise_low=1e-7, noise_high=1e-7)],
)
def test_with_vanishing_noise_exploring_is_acting(quiet: ExplorationSpec) -> None:
    made, data, seeds = groot(quiet), batch(1), list(range(8))
    explored = made.explore(data.features, data.state, seeds=seeds).actions
    np.testing.assert_allclose(explored, made.act(data.features, data.state, seeds=seeds), atol=1e-4)


def test_learned_noise_stays_within_its_bounds_and_is_averaged_over_start_and_steps() -> None:
    spec, steps, rows = ExplorationSpec(flow="noise", noise_low=0.1, noise_high=0.2), 4, 8
    random = torch.Generator().manual_seed(0)
    flow = FlowNoise(spec, steps, ACTION, ACTION, random)
    start = torch.randn(rows, CHUNK, ACTION, generator=random)
    drawn = flow.explore(curved, start, Noise(range(rows)))
    chain = drawn.sample
    total = torch.distributions.Normal(0.0, 1.0).log_prob(chain[:, 0])
    for step in range(steps):
        velocity, tokens = curved(chain[:, step], torch.full((rows,), step / steps))
        log_std = math.log(0.1) + math.log(2.0) * (flow.out(flow.hidden(tokens).tanh()).tanh() + 1) / 2
        std = log_std.exp()
        assert std.min() > 0.1
        assert std.max() < 0.2
        total = total + torch.distributions.Normal(chain[:, step] + velocity / steps, std).log_prob(chain[:, step + 1])
    torch.testing.assert_close(drawn.log_prob, total / (steps + 1), atol=1e-5, rtol=1e-5)
    assert torch.equal(drawn.action, chain[:, -1])


@pytest.mark.parametrize("flow", ["sde", "noise"])
def test_gradients_of_the_log_probability_are_those_of_finite_differences(flow: Literal["sde", "noise"]) -> None:
    def field(by: Tensor) -> Field:
        return lambda chunk, time: (by * torch.sin(chunk) + time[:, None, None], chunk)

    spec, random = ExplorationSpec(flow=flow), torch.Generator().manual_seed(0)
    exploration = FlowSde(spec, 4) if flow == "sde" else FlowNoise(spec, 4, ACTION, ACTION, random)
    start = torch.randn(8, CHUNK, ACTION, generator=random)
    sample = exploration.explore(field(torch.tensor(0.3)), start, Noise(range(8))).sample.double()
    exploration.double()
    by = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    log_prob, _ = exploration.log_prob(field(by), sample, (CHUNK, ACTION))
    log_prob.mean().backward()
    with torch.no_grad():
        above, below = (
            exploration.log_prob(field(by + move), sample, (CHUNK, ACTION))[0].mean() for move in (1e-5, -1e-5)
        )
    assert by.grad is not None
    # Times are made in float32, which is exact for the four steps here.
    assert float(by.grad) == pytest.approx(float(above - below) / 2e-5, rel=1e-4)


def test_a_sample_that_cannot_be_of_this_policy_is_refused_in_one_sentence() -> None:
    made, data = groot(ExplorationSpec()), batch(1)
    sample = made.explore(data.features, data.state, seeds=range(8)).sample
    with pytest.raises(ValueError, match=r"has shape \[24\]; this policy's have \[25\]"):
        made.evaluate(data.features, data.state, sample[:, 1:])
    for wrong in (4.0, -1.0, 0.5):
        spoilt = sample.copy()
        spoilt[3, -1] = wrong
        with pytest.raises(ValueError, match="none of the 4 of this policy"):
            made.evaluate(data.features, data.state, spoilt)
    other = groot(msgspec.structs.replace(ExplorationSpec(), flow="noise"))
    with pytest.raises(ValueError, match="has shape"):
        other.evaluate(data.features, data.state, sample)
