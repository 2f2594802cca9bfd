"""Qwen3-VL: the dense checkpoints.

In, out, never: as `qwen_vl`. Its deepstack, which adds pictures' features after the first blocks too, is done by
transformers' model for the packed group as for one sample: it works token by token.
"""

from __future__ import annotations

from typing import ClassVar

from joynexus.vla.backbones.qwen_vl import QwenVL


class Qwen3VL(QwenVL):
    """Qwen3-VL dense checkpoints."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_vl",)
    model_class: ClassVar[str] = "Qwen3VLModel"
