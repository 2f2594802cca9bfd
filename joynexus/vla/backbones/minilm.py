"""MiniLM's text encoder (a six-layer BERT), on plain torch functions.

In: token ids of one instruction. Out: its last hidden states [L, 384]. Never: a batch, so nothing is padded or masked.
The `transformers` class computes the same, but importing it costs every process of the demo some four seconds.

Architecture: Devlin et al., "BERT" (2018); weights: all-MiniLM-L6-v2, Wang et al., "MiniLM" (2020).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

LAYERS, HEADS, WIDTH = 6, 12, 384
_EPS = 1e-12


def encode(weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Return the last hidden states [L, 384] of token ids [L]."""
    embedded = (
        weights["embeddings.word_embeddings.weight"][ids]
        + weights["embeddings.token_type_embeddings.weight"][0]
        + weights["embeddings.position_embeddings.weight"][: ids.shape[0]]
    )
    hidden = _norm(weights, "embeddings.LayerNorm", embedded)
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}."
        query, key, value = (
            _linear(weights, f"{layer}attention.self.{part}", hidden).view(-1, HEADS, WIDTH // HEADS).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        mixed = functional.scaled_dot_product_attention(query[None], key[None], value[None])[0]
        attended = _linear(weights, f"{layer}attention.output.dense", mixed.transpose(0, 1).flatten(1))
        hidden = _norm(weights, f"{layer}attention.output.LayerNorm", attended + hidden)
        inner = functional.gelu(_linear(weights, f"{layer}intermediate.dense", hidden))
        hidden = _norm(weights, f"{layer}output.LayerNorm", _linear(weights, f"{layer}output.dense", inner) + hidden)
    return hidden


def needed(available: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep the tensors that `encode` reads (no pooler)."""
    kept = {name: t for name, t in available.items() if name.startswith(("embeddings.", "encoder."))}
    return {name: tensor for name, tensor in kept.items() if torch.is_floating_point(tensor)}


def _linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _norm(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return functional.layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], _EPS)
