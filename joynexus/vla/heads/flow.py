"""How a flow explores: what makes its integration stochastic, and how likely the way was that it took.

In: a velocity field, a start, noise by row. Out: drawn chunks with their log-probabilities, and later, from the sample
alone, the log-probabilities under other weights. Never: a step whose density would be needed but is not kept.

The flow runs from noise at time 0 to the action at time 1 in K Euler steps of d = 1 / K: x' = x + v d, which has no
density. Two ways give it one.

`sde`: one step k, drawn anew for each chunk, adds noise; the others stay as they are, so that one velocity is enough to
judge a chunk. With velocity v = a - e the field says that x is made of the action x + v (1 - t) and the noise
e = x - v t, so the score of the marginal at t is -e / (1 - t) (Lipman et al., "Flow Matching", 2023). An SDE with drift
v + s^2/2 score and diffusion s has the same marginals for every s(t) (Song et al., "Score-Based Generative Modeling
through SDEs", 2021; for flows Liu et al., "Flow-GRPO", 2025). Flow-GRPO's s = a sqrt(t' / (1 - t')), whose t' = 1 - t
runs from the action to the noise, is s^2 = a^2 (1 - t) / t here, and a step becomes

    x' ~ N(x + v d - e a^2 d / (2 t),  a^2 d (1 - t) / t)

with the next time, d, in place of t in the denominators at t = 0, where s has no bound.

`noise`: every step adds noise, x' ~ N(x + v d, std^2), and the std of each number is learned, within two bounds, by a
small net on the tokens from which the head reads the velocity (Zhang et al., "ReinFlow", 2025). The log-probability is
the mean over the start, N(0, 1), and the K steps, so that its size does not grow with K.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from joynexus.specs import ExplorationSpec
from joynexus.vla.heads.base import Drawn, check_sample, linear
from joynexus.vla.heads.exploration import gaussian_entropy, gaussian_log_prob
from joynexus.vla.noise import Noise

Field = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Gives velocity [B, chunk, A] and tokens [B, chunk, W] of chunks [B, chunk, A] at times [B]."""


class FlowExploration(nn.Module, ABC):
    """What a flow of K Euler steps draws with."""

    @abstractmethod
    def explore(self, field: Field, start: Tensor, noise: Noise) -> Drawn:
        """Draw chunks from starts [B, chunk, A]."""

    @abstractmethod
    def log_prob(self, field: Field, sample: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Judge samples of chunks of this shape, (chunk, A); see `ActionModule.log_prob`."""


class FlowSde(FlowExploration):
    """One stochastic step; the sample [B, 2 chunk A + 1] is the chunk before it, the chunk behind it, and its index."""

    def __init__(self, spec: ExplorationSpec, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.level = spec.noise_level

    def explore(self, field: Field, start: Tensor, noise: Noise) -> Drawn:
        """Integrate, with one step of each row stochastic."""
        index = (noise.uniform() * self.steps).long()
        kick = noise.normal(*start.shape[1:])
        chunk = before = mean = behind = start
        for step in range(self.steps):
            now = torch.full_like(index, step)
            velocity, _ = field(chunk, now / self.steps)
            here = (index == step)[:, None, None]
            centre, log_std = self._step(chunk, velocity, now)
            drawn = centre + log_std.exp() * kick
            before, mean, behind = (
                torch.where(here, new, old) for new, old in ((chunk, before), (centre, mean), (drawn, behind))
            )
            chunk = torch.where(here, drawn, chunk + velocity / self.steps)
        sample = torch.cat([before.flatten(1), behind.flatten(1), index[:, None].float()], dim=1)
        return Drawn(chunk, sample, gaussian_log_prob(behind, mean, self._log_std(index)))

    def log_prob(self, field: Field, sample: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Judge the stochastic step; its entropy is the same whatever was learned."""
        numbers = math.prod(shape)
        check_sample(sample, 2 * numbers + 1)
        index = sample[:, -1].long()
        if not ((index == sample[:, -1]) & (index >= 0) & (index < self.steps)).all():
            raise ValueError(
                f"a sample of the exploration names a step that is none of the {self.steps} of this policy"
            )
        before, behind = sample[:, :-1].reshape(-1, 2, *shape).unbind(1)
        velocity, _ = field(before, index / self.steps)
        mean, log_std = self._step(before, velocity, index)
        return gaussian_log_prob(behind, mean, log_std), gaussian_entropy(log_std).expand_as(behind)

    def _step(self, chunk: Tensor, velocity: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean [B, chunk, A] and log std [B, 1, 1] of steps with these indices [B]."""
        time = (index / self.steps)[:, None, None]
        pull = self.level**2 / (2 * self.steps) / self._reference(index)
        return chunk + velocity / self.steps - (chunk - velocity * time) * pull, self._log_std(index)

    def _log_std(self, index: Tensor) -> Tensor:
        left = 1 - (index / self.steps)[:, None, None]
        return (self.level**2 / self.steps * left / self._reference(index)).log() / 2

    def _reference(self, index: Tensor) -> Tensor:
        """The time in the denominators, [B, 1, 1]."""
        return (index.clamp(min=1) / self.steps)[:, None, None]


class FlowNoise(FlowExploration):
    """Learned noise in every step; the sample is all that was passed, [B, K + 1, chunk, A]."""

    def __init__(self, spec: ExplorationSpec, steps: int, width: int, action_dim: int, random: torch.Generator) -> None:
        super().__init__()
        self.steps = steps
        self.low, self.high = math.log(spec.noise_low), math.log(spec.noise_high)
        self.hidden = linear(width, width, random)
        self.out = linear(width, action_dim, random)

    def explore(self, field: Field, start: Tensor, noise: Noise) -> Drawn:
        """Integrate, every step stochastic."""
        chain, judged = [start], [_start_log_prob(start)]
        for step in range(self.steps):
            mean, log_std = self._step(field, chain[-1], step)
            chain.append(mean + log_std.exp() * noise.normal(*start.shape[1:]))
            judged.append(gaussian_log_prob(chain[-1], mean, log_std))
        return Drawn(chain[-1], torch.stack(chain, dim=1), _mean(judged))

    def log_prob(self, field: Field, sample: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Judge the start and all steps, one after another as they were drawn: other sizes would change bits."""
        check_sample(sample, self.steps + 1, *shape)
        chain = sample.unbind(1)
        judged, entropies = [_start_log_prob(chain[0])], [gaussian_entropy(torch.zeros_like(chain[0]))]
        for step in range(self.steps):
            mean, log_std = self._step(field, chain[step], step)
            judged.append(gaussian_log_prob(chain[step + 1], mean, log_std))
            entropies.append(gaussian_entropy(log_std))
        return _mean(judged), _mean(entropies)

    def _step(self, field: Field, chunk: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return mean and log std, both [B, chunk, A]."""
        velocity, tokens = field(chunk, chunk.new_full(chunk.shape[:1], step / self.steps))
        share = (self.out(self.hidden(tokens).tanh()).tanh() + 1) / 2
        return chunk + velocity / self.steps, self.low + (self.high - self.low) * share


def _start_log_prob(start: Tensor) -> Tensor:
    zero = torch.zeros_like(start)
    return gaussian_log_prob(start, zero, zero)


def _mean(terms: Sequence[Tensor]) -> Tensor:
    """Average in order: a reduction by torch adds up in another order at the end of a tensor than in its middle."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total / len(terms)
