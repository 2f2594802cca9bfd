"""Qwen3-VL in sizes that are not in any package: random weights, made in memory on the device.

In: a shape's name and how many tokens a picture shall become. Out: a backbone like any loaded one. Never: weights that
mean something: only times, memory and equality of bits are looked at.

`2b`, `4b` and `8b` have the shapes of the released Qwen3-VL checkpoints; `small` has 47 million parameters, about as
many as two CPU cores can measure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from joynexus.vla.backbones import tiny
from joynexus.vla.backbones.family import PackedBackbone
from joynexus.vla.backbones.packing import NAME, register
from joynexus.vla.backbones.qwen3_vl import Qwen3VL

PIXELS_A_TOKEN = 32  # along each side: patches of 16, merged 2 x 2


@dataclass(frozen=True)
class Shape:
    """Sizes of the two towers: `text` and `vision` go to the config as they are."""

    text: dict[str, Any]
    vision: dict[str, Any]


def _text(hidden: int, inner: int, layers: int, heads: int, kv: int, sections: list[int], vocabulary: int) -> Any:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "head_dim": 2 * sum(sections), "vocab_size": vocabulary, "pad_token_id": 0,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections},
    }  # fmt: skip


def _vision(hidden: int, inner: int, depth: int, heads: int, out: int, deepstack: list[int], places: int) -> Any:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "depth": depth, "num_heads": heads, "patch_size": 16,
        "out_hidden_size": out, "deepstack_visual_indexes": deepstack, "num_position_embeddings": places,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip


_RELEASED = [24, 20, 20]
SHAPES = {
    "small": Shape(
        _text(512, 1408, 12, 8, 4, [12, 10, 10], 4096),
        _vision(256, 768, 6, 8, 512, [1, 4], 256),
    ),
    "2b": Shape(
        _text(2048, 6144, 28, 16, 8, _RELEASED, 151936),
        _vision(1024, 4096, 24, 16, 2048, [5, 11, 17], 2304),
    ),
    "4b": Shape(
        _text(2560, 9728, 36, 32, 8, _RELEASED, 151936),
        _vision(1024, 4096, 24, 16, 2560, [5, 11, 17], 2304),
    ),
    "8b": Shape(
        _text(4096, 12288, 36, 32, 8, _RELEASED, 151936),
        _vision(1152, 4304, 27, 16, 4096, [8, 16, 24], 2304),
    ),
}


def make(name: str, visual_tokens: int, *, device: str, dtype: str, folder: Path) -> PackedBackbone:
    """Make a backbone of one of `SHAPES`; pictures of `side_of(visual_tokens)` pixels are not resized.

    Args:
        name: of the shape.
        visual_tokens: tokens a picture, a square number.
        device: `cpu` or `cuda`.
        dtype: by torch's name.
        folder: where the tokenizer is written; its weights are not.
    """
    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    ids = tiny.write_tokenizer(folder)
    tiny.write_image_processor(folder, patch=16, mean=[0.5] * 3, std=[0.5] * 3)

    class Made(Qwen3VL):
        """The family, with a model that is made in place of read."""

        @classmethod
        def load_model(cls, directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
            import transformers as untyped

            transformers: Any = untyped
            register()
            config = transformers.Qwen3VLConfig(
                text_config=shape.text, vision_config=shape.vision, **tiny.special_ids(ids)
            )
            torch.manual_seed(0)
            with device:
                model = transformers.Qwen3VLModel._from_config(config, dtype=dtype, attn_implementation=NAME)
            return model.eval().requires_grad_(False)

    place, kind = torch.device(device), getattr(torch, dtype)
    family = Made(folder, folder, device=place, dtype=kind, image_side=side_of(visual_tokens))
    digest = f"{name}-{visual_tokens}".ljust(32, "0")
    return PackedBackbone(family, name=f"{name}-qwen3vl", digest=digest, device=place, dtype=kind)


def side_of(visual_tokens: int) -> int:
    """Return the side in pixels of a picture that becomes so many tokens."""
    side = math.isqrt(visual_tokens)
    if side * side != visual_tokens:
        raise ValueError(f"{visual_tokens} visual tokens are no square")
    return side * PIXELS_A_TOKEN
