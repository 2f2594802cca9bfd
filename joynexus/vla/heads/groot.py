"""`groot`: chunks sampled by flow matching, with a diffusion transformer that attends to the feature.

In: features, a state, noise. Out: a chunk that is one sample of what may be done here. Never: noise of its own; equal
seeds give equal chunks. How it explores is in `flow`.

Where demonstrations do the same thing in two ways, regression learns their mean, which is neither; sampling picks one.

After "GR00T N1" (NVIDIA, 2025) and "Flow Matching for Generative Modeling" (Lipman et al., 2023): a chunk `a` is mixed
with noise `e` at flow time t from 0 to 1, `x = (1 - t) e + t a`, and the transformer learns the velocity `a - e` from
`x`, `t`, the state and the feature. Sampling starts at noise and follows the velocity in a few Euler steps. Blocks
attend to the feature and to their own tokens (state, learned future tokens, chunk) in turn.
"""

from __future__ import annotations

from typing import Annotated, Literal, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from joynexus.specs import ExplorationSpec, PolicySpec
from joynexus.vla.feature import PaddedFeature
from joynexus.vla.heads.base import MILLION, ActionModule, Drawn, linear, normal, read_config
from joynexus.vla.heads.flow import Field, FlowExploration, FlowNoise, FlowSde
from joynexus.vla.heads.transformer import Block, KeysValues, TimeNorm, sinusoid
from joynexus.vla.noise import Noise

_TIME_SINUSOID = 256
_BETA = 1.5
_LATEST = 0.999
_EMBEDDING_STD = 0.02

_Few = Annotated[int, msgspec.Meta(ge=1, le=64)]
_Width = Annotated[int, msgspec.Meta(ge=8, le=4096)]


class GrootConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of a `groot` head.

    Attributes:
        size: `small` (4 layers, 4 heads, width 128, for CPUs), `base` (16, 12, 768: DiT-B) or `large` (16, 32, 1536:
            DiT-L); the three that follow change it in single points.
        layers: blocks.
        heads: attention heads of each.
        width: of all tokens; a multiple of twice the heads.
        future_tokens: learned tokens beside the chunk's, as room to think.
        num_inference_timesteps: Euler steps to a chunk.
        repeated_diffusion_steps: noisy chunks that are made of each sample for one loss.
    """

    size: Literal["small", "base", "large"] = "small"
    layers: _Few | None = None
    heads: _Few | None = None
    width: _Width | None = None
    future_tokens: Annotated[int, msgspec.Meta(ge=0, le=256)] | None = None
    num_inference_timesteps: _Few = 4
    repeated_diffusion_steps: _Few | None = None


class _Size(msgspec.Struct, frozen=True):
    layers: int
    heads: int
    width: int
    future_tokens: int
    repeated_diffusion_steps: int


_SIZES = {
    "small": _Size(4, 4, 128, 4, 4),
    "base": _Size(16, 12, 768, 32, 8),
    "large": _Size(16, 32, 1536, 32, 8),
}


class Groot(ActionModule):
    """A velocity field over chunks, and the way along it."""

    max_parameters = 800 * MILLION  # `large` on features of width 4096 has 611

    def __init__(self, spec: PolicySpec, hidden_size: int, config: GrootConfig) -> None:
        contract = spec.contract
        super().__init__(
            hidden_size=hidden_size, state_dim=contract.state_dim, action_dim=contract.action_dim, chunk=spec.chunk
        )
        size = _sizes(config)
        if size.width % (2 * size.heads):
            raise ValueError(
                f"head_config of 'groot': width {size.width} is no multiple of twice the heads ({size.heads})"
            )
        self.timesteps = config.num_inference_timesteps
        self.repeats = size.repeated_diffusion_steps
        self.width = width = size.width
        random = torch.Generator().manual_seed(spec.seed)
        self.feature_norm = nn.LayerNorm(hidden_size)
        self.time_in = linear(_TIME_SINUSOID, width, random)
        self.time_out = linear(width, width, random)
        self.state_in = linear(self.state_dim, width, random) if self.state_dim else None
        self.state_out = linear(width, width, random) if self.state_dim else None
        self.future = nn.Parameter(normal((size.future_tokens, width), _EMBEDDING_STD, random))
        self.position = nn.Parameter(normal((self.chunk, width), _EMBEDDING_STD, random))
        self.action_in = linear(self.action_dim, width, random)
        self.action_middle = linear(2 * width, width, random)
        self.action_out = linear(width, width, random)
        self.blocks = nn.ModuleList(
            Block(width, size.heads, hidden_size if index % 2 == 0 else None, random) for index in range(size.layers)
        )
        self.last_norm = TimeNorm(width, random)
        self.velocity_in = linear(width, width, random)
        self.velocity_out = linear(width, self.action_dim, random)

    @classmethod
    def from_spec(cls, spec: PolicySpec, hidden_size: int) -> Groot:
        """Build the head; see `ActionModule.from_spec`."""
        return cls(spec, hidden_size, read_config(spec, GrootConfig))

    def forward(self, feature: PaddedFeature, state: Tensor, noise: Noise) -> Tensor:
        """Sample a chunk; see `ActionModule.forward`."""
        field, chunk = self._field(feature, state), noise.normal(self.chunk, self.action_dim)
        for step in range(self.timesteps):
            velocity, _ = field(chunk, chunk.new_full(chunk.shape[:1], step / self.timesteps))
            chunk = chunk + velocity / self.timesteps
        return chunk

    def loss(self, feature: PaddedFeature, state: Tensor, action: Tensor, action_mask: Tensor, noise: Noise) -> Tensor:
        """Return the mean squared error of the velocity over valid steps, dimensions and noisy chunks.

        Steps that are not valid are seen by nobody: they are no keys of any attention.
        """
        clean = action.masked_fill(~action_mask[..., None], 0.0)[:, None]  # what is not valid may even be NaN
        time = flow_time(noise.uniform(self.repeats))  # [B, R]
        start = noise.normal(self.repeats, self.chunk, self.action_dim)
        mixed = torch.lerp(start, clean.expand_as(start), time[..., None, None])
        seen = None if bool(action_mask.all()) else action_mask
        tokens = self._tokens(mixed, time, self._leading(state), self._contexts(feature), feature.mask, seen)
        velocity = self._read_velocity(tokens)
        error = (velocity - (clean - start)).square()
        valid = action_mask.to(error.dtype)
        total: Tensor = (error * valid[:, None, :, None]).sum()
        return total / (valid.sum().clamp(min=1.0) * self.repeats * self.action_dim)

    def exploration(self, spec: ExplorationSpec, random: torch.Generator) -> FlowExploration:
        """Make what `spec.flow` names."""
        if spec.flow == "sde":
            return FlowSde(spec, self.timesteps)
        return FlowNoise(spec, self.timesteps, self.width, self.action_dim, random)

    def explore(self, feature: PaddedFeature, state: Tensor, noise: Noise, exploration: nn.Module) -> Drawn:
        """Draw chunks from the starts that `forward` would take."""
        start = noise.normal(self.chunk, self.action_dim)
        return cast(FlowExploration, exploration).explore(self._field(feature, state), start, noise)

    def log_prob(
        self, feature: PaddedFeature, state: Tensor, sample: Tensor, exploration: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """Judge chunks that were drawn; see `ActionModule.log_prob`."""
        shape = self.chunk, self.action_dim
        return cast(FlowExploration, exploration).log_prob(self._field(feature, state), sample, shape)

    def _field(self, feature: PaddedFeature, state: Tensor) -> Field:
        """Return the velocity field of these samples, one chunk of each."""
        contexts, leading = self._contexts(feature), self._leading(state)

        def field(chunk: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
            tokens = self._tokens(chunk[:, None], time[:, None], leading, contexts, feature.mask, None)
            return self._read_velocity(tokens)[:, 0], tokens[:, 0]

        return field

    def _read_velocity(self, tokens: Tensor) -> Tensor:
        """Turn tokens [..., W] into velocities [..., A]."""
        velocity: Tensor = self.velocity_out(functional.relu(self.velocity_in(tokens)))
        return velocity

    def _tokens(
        self,
        chunk: Tensor,
        time: Tensor,
        leading: Tensor,
        contexts: list[KeysValues | None],
        feature_mask: Tensor,
        action_mask: Tensor | None,
    ) -> Tensor:
        """Return tokens [B, R, chunk, W] that tell the velocity of noisy chunks [B, R, chunk, A] at times [B, R]."""
        embedded = self.time_out(functional.silu(self.time_in(sinusoid(time, _TIME_SINUSOID))))
        moment = sinusoid(time, self.width)[:, :, None].expand(-1, -1, self.chunk, -1)
        actions = functional.silu(self.action_middle(torch.cat([self.action_in(chunk), moment], dim=-1)))
        actions = self.action_out(actions) + self.position
        x = torch.cat([leading[:, None].expand(-1, chunk.shape[1], -1, -1), actions], dim=2)
        own_mask = None
        if action_mask is not None:
            own_mask = torch.cat([action_mask.new_ones(leading.shape[:2]), action_mask], dim=1)
        for block, context in zip(self.blocks, contexts, strict=True):
            x = block(x, embedded, context, own_mask if context is None else feature_mask)
        tokens: Tensor = self.last_norm(x[:, :, -self.chunk :], embedded)
        return tokens

    def _contexts(self, feature: PaddedFeature) -> list[KeysValues | None]:
        """Keys and values of the feature for each block that attends to it."""
        tokens = self.feature_norm(feature.last.float())
        return [block.keys_values(tokens) if block.attends_feature else None for block in self._blocks()]

    def _leading(self, state: Tensor) -> Tensor:
        """Tokens before the chunk's, [B, 0 or 1 + future tokens, W]."""
        future = self.future.expand(len(state), -1, -1)
        if self.state_in is None or self.state_out is None:
            return future
        token = self.state_out(functional.relu(self.state_in(state)))[:, None]
        return torch.cat([token, future], dim=1)

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]


def flow_time(uniform: Tensor) -> Tensor:
    """Turn uniform draws into flow times from 0 to 1, more of them early, where there is most to decide.

    With b ~ Beta(1.5, 1), t = (0.999 - b) / 0.999, at least 0. The distribution function of Beta(1.5, 1) is b^1.5, so
    b = u^(1 / 1.5) needs no rejection. Source: GR00T N1 (NVIDIA, 2025) and pi0 (Black et al., 2024).
    """
    return ((_LATEST - uniform.pow(1 / _BETA)) / _LATEST).clamp(min=0.0)


def _sizes(config: GrootConfig) -> _Size:
    given = {name: getattr(config, name) for name in _Size.__struct_fields__}
    return msgspec.structs.replace(_SIZES[config.size], **{k: v for k, v in given.items() if v is not None})
