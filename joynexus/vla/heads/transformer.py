"""The transformer of flow-matching heads: blocks that know the flow time and attend to themselves or the feature.

In: tokens of several noisy chunks a sample, their flow times, the feature's keys and values. Out: tokens. Never:
dropout, or a key that is masked.

Shapes: B samples, R noisy chunks of each, N tokens a chunk, W width, L tokens of the feature. The R chunks of a sample
see the same feature, so its keys and values are made once for all of them, and once for all steps of sampling.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from joynexus.vla.heads.base import linear

KeysValues = tuple[Tensor, Tensor]
"""Each [B, heads, L, W / heads]."""


def sinusoid(time: Tensor, width: int) -> Tensor:
    """Return sines and cosines of `1000 * time` at `width / 2` wavelengths from 2 pi to 20000 pi: [*time, width].

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.5.
    """
    half = width // 2
    rates = torch.exp(torch.arange(half, device=time.device) * (-math.log(10_000.0) / half))
    angles = 1000.0 * time[..., None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class TimeNorm(nn.Module):
    """Layer norm whose scale and shift follow from the time (adaptive layer norm; Peebles and Xie, "DiT", 2023)."""

    def __init__(self, width: int, random: torch.Generator) -> None:
        super().__init__()
        self.modulate = linear(width, 2 * width, random)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Normalise x [B, R, N, W] at times embedded as [B, R, W]."""
        scale, shift = self.modulate(functional.silu(time))[:, :, None].chunk(2, dim=-1)
        normed: Tensor = functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        return normed


class Block(nn.Module):
    """Attention, then a feed-forward part, each added to what came in.

    Args:
        context_size: width of the feature's tokens to attend to; None attends to the chunk's own tokens.
    """

    def __init__(self, width: int, heads: int, context_size: int | None, random: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.attends_feature = context_size is not None
        self.norm = TimeNorm(width, random)
        self.query = linear(width, width, random)
        self.key = linear(context_size or width, width, random)
        self.value = linear(context_size or width, width, random)
        self.merge = linear(width, width, random)
        self.middle_norm = nn.LayerNorm(width)
        self.widen = linear(width, 4 * width, random)
        self.narrow = linear(4 * width, width, random)

    def keys_values(self, tokens: Tensor) -> KeysValues:
        """Project tokens [B, L, H] for `forward`."""
        return self._split(self.key(tokens)), self._split(self.value(tokens))

    def forward(self, x: Tensor, time: Tensor, context: KeysValues | None, mask: Tensor | None) -> Tensor:
        """Do the block.

        Args:
            x: [B, R, N, W].
            time: embedded times [B, R, W].
            context: keys and values of the feature; None attends to the chunk's own tokens.
            mask: bool, True where there is a key: [B, L] for the feature, [B, N] for own tokens; None: everywhere.
        """
        batch, repeats, count, width = x.shape
        normed = self.norm(x, time)
        if context is None:  # each noisy chunk attends to itself alone
            normed = normed.flatten(0, 1)
            context = self.keys_values(normed)
            mask = mask.repeat_interleave(repeats, dim=0) if mask is not None else None
        else:  # queries are independent of each other: all chunks of a sample side by side
            normed = normed.flatten(1, 2)
        key, value = context
        gathered = functional.scaled_dot_product_attention(
            self._split(self.query(normed)), key, value, attn_mask=mask[:, None, None] if mask is not None else None
        )
        x = x + self.merge(gathered.transpose(1, 2).reshape(batch, repeats, count, width))
        wide = functional.gelu(self.widen(self.middle_norm(x)), approximate="tanh")
        out: Tensor = x + self.narrow(wide)
        return out

    def _split(self, x: Tensor) -> Tensor:
        """Split heads: [B, N, W] to [B, heads, N, W / heads]."""
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)
