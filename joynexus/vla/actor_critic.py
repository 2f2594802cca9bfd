"""What a policy needs beside its head to learn from rewards: what it draws with, and a value head.

In: features, normalised states. Out: values. Never: a gradient into the head or its adapter: the value head reads the
backbone's own feature, so that learning to judge does not change what the policy does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from joynexus.seeds import derived_seed
from joynexus.specs import MAX_CRITIC_WIDTH, PolicySpec
from joynexus.vla.feature import VLAFeature
from joynexus.vla.heads import exploring_heads
from joynexus.vla.heads.base import ActionModule, linear, once
from joynexus.wire.back import RlBegin

PREFIX = "rl."
"""Begins the names of these tensors in versions and checkpoints."""

_GATE = 0.1
_START = 0.01
_EPS = 1e-6


class Critic(nn.Module):
    """A multilayer perceptron on the mean of the feature's tokens and the state, with V values.

    The mean is scaled to unit root mean square and enters through a gate that starts nearly shut, as in `oft`: a
    feature that says little does not drown a state that says much. The last layer starts small: values near zero.
    """

    def __init__(self, hidden_size: int, state_dim: int, width: int, values: int, random: torch.Generator) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(_GATE if state_dim else 1.0))
        self.from_feature = linear(hidden_size, width, random)
        self.from_state = linear(state_dim, width, random)
        self.middle = linear(width, width, random)
        self.out = linear(width, values, random)
        with torch.no_grad():
            self.out.weight.mul_(_START)
            self.out.bias.zero_()

    def forward(self, pooled: Tensor, state: Tensor) -> Tensor:
        """Judge B samples: pooled [B, H] float32 and normalised state [B, S] to values [B, V]."""
        hidden = self.from_state(state) + self.gate * once(self._read, pooled)
        # Bounded units would be driven to their bounds by returns of some tens before they learn to tell samples apart.
        values: Tensor = self.out(functional.relu(self.middle(functional.relu(hidden))))
        return values

    def _read(self, pooled: Tensor) -> Tensor:
        rms = pooled.square().mean(dim=-1, keepdim=True).sqrt()
        read: Tensor = self.from_feature(pooled / rms.clamp(min=_EPS))
        return read


class ActorCritic(nn.Module):
    """What RL adds to a policy; initial values come from the policy's seed.

    Attributes:
        exploration: what the head draws with, see `ActionModule.exploration`.
        critic: None for an algorithm without a value head.
    """

    def __init__(self, spec: PolicySpec, module: ActionModule, begin: RlBegin) -> None:
        """Build it on the CPU.

        Raises:
            ValueError: one sentence, if the head cannot explore or a number in `begin` is out of range.
        """
        super().__init__()
        _check(spec, module, begin)
        self.exploration = module.exploration(begin.exploration, _generator(spec, "exploration"))
        self.critic: Critic | None = None
        if begin.critic is not None:
            self.critic = Critic(
                module.hidden_size, module.state_dim, begin.critic.width, begin.values, _generator(spec, "critic")
            )

    def values(self, features: Sequence[VLAFeature], state: Tensor) -> Tensor:
        """Return values [B, V] of features and normalised states [B, S]; V is 0 without a value head."""
        if self.critic is None:
            return state.new_zeros(len(state), 0)
        values: Tensor = self.critic(_pool(features, state.device), state)
        return values


def _pool(features: Sequence[VLAFeature], device: torch.device) -> Tensor:
    """Return the mean over tokens of the last hidden state, [B, H]; each feature by itself, so nothing is padded."""
    distinct = {id(feature): feature for feature in features}  # an instruction alone is one feature for all rows
    if len(distinct) == 1:
        return features[0].last.to(device).float().mean(dim=0).expand(len(features), -1)
    places = {name: place for place, name in enumerate(distinct)}
    pooled = torch.stack([feature.last.to(device).float().mean(dim=0) for feature in distinct.values()])
    return pooled[torch.tensor([places[id(feature)] for feature in features], device=device)]


def _generator(spec: PolicySpec, part: str) -> torch.Generator:
    return torch.Generator().manual_seed(derived_seed(spec.seed, "rl", part))


def _check(spec: PolicySpec, module: ActionModule, begin: RlBegin) -> None:
    if spec.head not in exploring_heads():
        raise ValueError(
            f"the head '{spec.head}' cannot explore, so it cannot learn from rewards; heads that can: "
            f"{', '.join(exploring_heads())}"
        )
    if any(name.startswith(PREFIX) for name in module.state_dict()):
        raise ValueError(f"the head '{spec.head}' has a part named 'rl': have whoever installed it rename that")
    drawing, critic = begin.exploration, begin.critic
    wrong = [
        f"{name}={value!r}"
        for name, value, fine in (
            ("std", drawing.std, 0 < drawing.std < math.inf),
            ("noise_level", drawing.noise_level, 0 < drawing.noise_level < math.inf),
            ("noise_low", drawing.noise_low, 0 < drawing.noise_low <= drawing.noise_high),
            ("noise_high", drawing.noise_high, drawing.noise_high < math.inf),
            ("values", begin.values, critic is None or begin.values in (1, spec.chunk)),
            *(
                (
                    ("width", critic.width, 1 <= critic.width <= MAX_CRITIC_WIDTH),
                    ("lr", critic.lr, 0 <= critic.lr < math.inf),
                )
                if critic is not None
                else ()
            ),
        )
        if not fine
    ]
    if wrong:
        raise ValueError(f"settings of exploration or critic out of range: {', '.join(wrong)}")
