"""Attention over samples packed end to end, without padding.

In: queries, keys and values of a whole group in one row of tokens, and where each sample starts. Out: attention within
each sample only. Never: a mask over the group, or a kernel that sees two samples at once, so that a sample's bits
cannot depend on its neighbours.

The attention is registered with transformers under `NAME`; the offsets reach it through a context variable because
models do not pass unknown arguments down in a uniform way.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

NAME = "joynexus_packed"

_offsets: contextvars.ContextVar[Sequence[int] | None] = contextvars.ContextVar("sample_offsets", default=None)


@contextmanager
def samples_at(offsets: Sequence[int]) -> Iterator[None]:
    """Within the block, causal attention runs over each [offsets[i], offsets[i + 1]) alone."""
    token = _offsets.set(offsets)
    try:
        yield
    finally:
        _offsets.reset(token)


def register() -> None:
    """Make the attention known to transformers; may be called any number of times."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within samples; query [1, heads, T, D] to [1, T, heads, D].

    Vision towers call with one picture at a time, not causal: nothing to split there.
    """
    groups = getattr(module, "num_key_value_groups", 1)
    if groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    causal = bool(getattr(module, "is_causal", False))
    offsets = _offsets.get()
    if not causal or offsets is None:
        mixed = functional.scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=causal)
    else:
        mixed = torch.cat(
            [
                functional.scaled_dot_product_attention(
                    query[:, :, start:end], key[:, :, start:end], value[:, :, start:end], scale=scaling, is_causal=True
                )
                for start, end in pairwise(offsets)
            ],
            dim=2,
        )
    return mixed.transpose(1, 2).contiguous(), None
