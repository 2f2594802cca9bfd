"""Private adapters: what a policy may put between the shared feature and its own head.

In: a padded feature. Out: one of the same shape. Never: a change to the feature that others share, or to the actions of
a policy that has not been trained yet: an adapter starts as the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from joynexus.seeds import derived_seed
from joynexus.specs import ExplorationSpec, PolicySpec
from joynexus.vla.feature import PaddedFeature
from joynexus.vla.heads import build_head
from joynexus.vla.heads.base import ActionModule, Drawn, convert_config, linear
from joynexus.vla.noise import Noise


class BottleneckConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size of a `bottleneck` adapter; `width` is that of its narrow part."""

    width: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64


class Bottleneck(nn.Module):
    """Layer norm, down, GELU, up, added to what came in (Houlsby et al., "Parameter-Efficient Transfer", 2019)."""

    def __init__(self, hidden_size: int, config: BottleneckConfig, random: torch.Generator) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.down = linear(hidden_size, config.width, random)
        self.up = linear(config.width, hidden_size, random)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    @classmethod
    def from_spec(cls, spec: PolicySpec, hidden_size: int, random: torch.Generator) -> Bottleneck:
        """Build the adapter of one layer.

        Raises:
            ValueError: if `spec.adapter_config` has an unknown key or a value out of range.
        """
        what = f"adapter_config of '{spec.adapter}'"
        return cls(hidden_size, convert_config(what, spec.adapter_config, BottleneckConfig), random)

    def forward(self, tokens: Tensor) -> Tensor:
        """Adapt tokens [B, L, H]."""
        tokens = tokens.float()
        adapted: Tensor = tokens + self.up(functional.gelu(self.down(self.norm(tokens))))
        return adapted


class Adapted(ActionModule):
    """A head behind one adapter for each layer that it reads; trained, saved and published as one module."""

    def __init__(self, head: ActionModule, adapters: Sequence[nn.Module]) -> None:
        super().__init__(
            hidden_size=head.hidden_size, state_dim=head.state_dim, action_dim=head.action_dim, chunk=head.chunk
        )
        self.layers = head.layers
        self.head = head
        self.adapter = nn.ModuleList(adapters)

    @classmethod
    def from_spec(cls, spec: PolicySpec, hidden_size: int) -> ActionModule:
        """Build the spec's head and an adapter for each layer that it reads; see `ActionModule.from_spec`."""
        kind = _ADAPTERS.get(spec.adapter)
        if kind is None:
            raise ValueError(f"there is no adapter '{spec.adapter}'; known adapters are: {', '.join(known_adapters())}")
        head = build_head(spec, hidden_size)
        seeds = [derived_seed(spec.seed, "adapter", layer) for layer in head.layers]
        adapters = [kind.from_spec(spec, hidden_size, torch.Generator().manual_seed(seed)) for seed in seeds]
        return cls(head, adapters)

    def forward(self, feature: PaddedFeature, state: Tensor, noise: Noise) -> Tensor:
        """Predict a chunk; see `ActionModule.forward`."""
        chunk: Tensor = self.head(self._adapt(feature), state, noise)
        return chunk

    def loss(self, feature: PaddedFeature, state: Tensor, action: Tensor, action_mask: Tensor, noise: Noise) -> Tensor:
        """Return the head's loss on the adapted feature."""
        return self.head.loss(self._adapt(feature), state, action, action_mask, noise)

    def exploration(self, spec: ExplorationSpec, random: torch.Generator) -> nn.Module:
        """Build what the head draws with."""
        return self.head.exploration(spec, random)

    def explore(self, feature: PaddedFeature, state: Tensor, noise: Noise, exploration: nn.Module) -> Drawn:
        """Let the head draw on the adapted feature."""
        return self.head.explore(self._adapt(feature), state, noise, exploration)

    def log_prob(
        self, feature: PaddedFeature, state: Tensor, sample: Tensor, exploration: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """Let the head judge what it drew on the adapted feature."""
        return self.head.log_prob(self._adapt(feature), state, sample, exploration)

    def _adapt(self, feature: PaddedFeature) -> PaddedFeature:
        padding = ~feature.mask[..., None]
        adapted = (adapter(feature.layers[layer]) for layer, adapter in zip(self.layers, self.adapter, strict=True))
        filled = (tokens.masked_fill(padding, 0.0) for tokens in adapted)
        return PaddedFeature(dict(zip(self.layers, filled, strict=True)), feature.mask)


_ADAPTERS = {"bottleneck": Bottleneck}


def known_adapters() -> tuple[str, ...]:
    """Return the names that a spec's `adapter` may have; `none` is a head that reads the feature itself."""
    return ("none", *sorted(_ADAPTERS))
