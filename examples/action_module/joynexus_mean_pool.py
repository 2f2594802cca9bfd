"""`mean_pool`: a residual MLP over the mean of the feature's tokens and the state, trained with the L1 loss.

In: a feature and a state. Out: a chunk. Never: noise; the same input gives the same chunk.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from joynexus.specs import PolicySpec
from joynexus.vla.feature import PaddedFeature
from joynexus.vla.heads.base import ActionModule, linear, read_config
from joynexus.vla.noise import Noise


class MeanPoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a spec's `head_config` may say: the MLP's width and how many residual layers it has."""

    width: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 256
    layers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2


class MeanPool(ActionModule):
    """The mean of the tokens and the state, then residual layers, then all actions of a chunk at once."""

    def __init__(self, spec: PolicySpec, hidden_size: int, config: MeanPoolConfig) -> None:
        contract = spec.contract
        super().__init__(
            hidden_size=hidden_size, state_dim=contract.state_dim, action_dim=contract.action_dim, chunk=spec.chunk
        )
        random = torch.Generator().manual_seed(spec.seed)  # initial weights: from the spec's seed, and nothing else
        self.norm = nn.LayerNorm(hidden_size)
        self.enter = linear(hidden_size + self.state_dim, config.width, random)
        self.layers_between = nn.ModuleList(linear(config.width, config.width, random) for _ in range(config.layers))
        self.leave = linear(config.width, self.chunk * self.action_dim, random)

    @classmethod
    def from_spec(cls, spec: PolicySpec, hidden_size: int) -> MeanPool:
        """Build the module; a wrong `head_config` is answered with one sentence."""
        return cls(spec, hidden_size, read_config(spec, MeanPoolConfig))

    def forward(self, feature: PaddedFeature, state: Tensor, noise: Noise) -> Tensor:
        """Predict normalised actions [B, chunk, A]."""
        present = feature.mask[..., None].float()  # padding is no token
        mean = (feature.last.float() * present).sum(dim=1) / present.sum(dim=1)
        x = self.enter(torch.cat([self.norm(mean), state], dim=-1))
        for layer in self.layers_between:
            x = x + layer(functional.silu(x))
        chunk: Tensor = self.leave(x)
        return chunk.view(-1, self.chunk, self.action_dim)

    def loss(self, feature: PaddedFeature, state: Tensor, action: Tensor, action_mask: Tensor, noise: Noise) -> Tensor:
        """Return the mean absolute error over the steps that are valid."""
        error = (self(feature, state, noise) - action).abs().mean(dim=-1)
        return error[action_mask].mean()
