"""`oft`: a whole chunk of actions at once by regression, trained with the L1 loss.

In: features and a state. Out: a chunk. Never: noise, unless it explores; the same input gives the same chunk.

A few learned queries attend to the feature; what they gather joins the state before a small MLP. The gathered part
enters through a gate that starts nearly shut: the state is learned first and pictures come in as far as they help, so a
feature that says little cannot drown a state that says much.

After "OpenVLA-OFT" (Kim et al., 2025: parallel decoding of a chunk, L1 regression) with queries of the head's own in
place of the backbone's action tokens, so that one feature serves every head.
"""

from __future__ import annotations

from typing import Annotated, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from joynexus.specs import ExplorationSpec, PolicySpec
from joynexus.vla.feature import PaddedFeature
from joynexus.vla.heads.base import ActionModule, Drawn, check_sample, linear, normal, once, read_config
from joynexus.vla.heads.exploration import Gaussian, gaussian_entropy, gaussian_log_prob
from joynexus.vla.noise import Noise

_Size = Annotated[int, msgspec.Meta(ge=1, le=4096)]
_Few = Annotated[int, msgspec.Meta(ge=1, le=64)]
_GATE = 0.1
_START = 0.1
_EPS = 1e-6


class OftConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of an `oft` head.

    Attributes:
        queries: learned queries.
        heads: attention heads.
        width: what each query gathers, over all heads.
        hidden: width of the MLP.
    """

    queries: _Few = 1
    heads: _Few = 8
    width: _Size = 128
    hidden: _Size = 256


class Oft(ActionModule):
    """Learned queries over the feature, then an MLP with the state."""

    def __init__(self, spec: PolicySpec, hidden_size: int, config: OftConfig) -> None:
        contract = spec.contract
        super().__init__(
            hidden_size=hidden_size,
            state_dim=contract.state_dim,
            action_dim=contract.action_dim,
            chunk=spec.chunk,
        )
        if config.width % config.heads:
            raise ValueError(f"head_config of 'oft': width {config.width} is no multiple of heads {config.heads}")
        random = torch.Generator().manual_seed(spec.seed)
        each = config.width // config.heads
        # Keys' projection is folded into the queries: they do not depend on the sample, so the product is one vector
        # for each query and head, and the L tokens need no projection at all.
        scale = hidden_size**-0.5
        self.query = nn.Parameter(normal((config.queries, config.heads, hidden_size), scale, random))
        self.value = nn.Parameter(normal((config.heads, hidden_size, each), scale, random))
        self.gate = nn.Parameter(torch.tensor(_GATE if self.state_dim else 1.0))
        self.from_feature = linear(config.queries * config.width, config.hidden, random)
        self.from_state = linear(self.state_dim, config.hidden, random)
        self.middle = linear(config.hidden, config.hidden, random)
        self.out = linear(config.hidden, self.chunk * self.action_dim, random)
        with torch.no_grad():  # start near the centre of the normalisation: no motion, where actions are relative
            self.out.weight.mul_(_START)
            self.out.bias.zero_()

    @classmethod
    def from_spec(cls, spec: PolicySpec, hidden_size: int) -> Oft:
        """Build the head; see `ActionModule.from_spec`."""
        return cls(spec, hidden_size, read_config(spec, OftConfig))

    def forward(self, feature: PaddedFeature, state: Tensor, noise: Noise) -> Tensor:
        """Predict a chunk; see `ActionModule.forward`."""
        return self._predict(feature, state)

    def loss(self, feature: PaddedFeature, state: Tensor, action: Tensor, action_mask: Tensor, noise: Noise) -> Tensor:
        """Return the mean absolute error over valid steps and dimensions."""
        error = (self(feature, state, noise) - action).abs()
        valid = action_mask.to(error.dtype)
        total: Tensor = (error * valid[..., None]).sum()
        return total / (valid.sum().clamp(min=1.0) * self.action_dim)

    def exploration(self, spec: ExplorationSpec, random: torch.Generator) -> Gaussian:
        """Make a Gaussian around the chunk, with one standard deviation for each action dimension."""
        return Gaussian(spec, self.action_dim)

    def explore(self, feature: PaddedFeature, state: Tensor, noise: Noise, exploration: nn.Module) -> Drawn:
        """Draw a chunk; the sample is the chunk itself, [B, chunk, A]."""
        mean, log_std = self._predict(feature, state), cast(Gaussian, exploration).log_std
        action = mean + log_std.exp() * noise.normal(self.chunk, self.action_dim)
        return Drawn(action, action, gaussian_log_prob(action, mean, log_std))

    def log_prob(
        self, feature: PaddedFeature, state: Tensor, sample: Tensor, exploration: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """Judge chunks that were drawn; see `ActionModule.log_prob`."""
        check_sample(sample, self.chunk, self.action_dim)
        mean, log_std = self._predict(feature, state), cast(Gaussian, exploration).log_std
        return gaussian_log_prob(sample, mean, log_std), gaussian_entropy(log_std).expand_as(sample)

    def _predict(self, feature: PaddedFeature, state: Tensor) -> Tensor:
        hidden = self.from_state(state) + self.gate * once(self._read, feature.last, feature.mask)
        hidden = functional.relu(self.middle(functional.relu(hidden)))
        chunk: Tensor = self.out(hidden)
        return chunk.view(-1, self.chunk, self.action_dim)

    def _read(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Read tokens [B, L, H] into [B, hidden]."""
        read: Tensor = self.from_feature(self._gather(tokens.float(), mask))
        return read

    def _gather(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Attend: tokens [B, L, H] to [B, queries * width]."""
        # Each token is scaled to unit root mean square. The scale goes into scores and weights, which are small, so
        # that the tokens themselves are read but never copied.
        rms = torch.linalg.vector_norm(tokens, dim=-1, keepdim=True) * tokens.shape[-1] ** -0.5  # [B, L, 1]
        scale = 1 / rms.clamp(min=_EPS)
        patterns = self.query.flatten(0, 1)  # [queries * heads, H]
        scores = (tokens @ patterns.T * scale).masked_fill(~mask[..., None], float("-inf"))
        weights = scores.softmax(dim=1) * scale
        mixed = weights.transpose(1, 2) @ tokens  # [B, queries * heads, H]
        mixed = mixed.view(-1, *self.query.shape)
        return torch.einsum("bqhd,hdk->bqhk", mixed, self.value).flatten(1)
