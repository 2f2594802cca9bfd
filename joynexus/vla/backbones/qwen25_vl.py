"""Qwen2.5-VL.

In, out, never: as `qwen_vl`. Its vision tower attends within windows in most blocks; transformers cuts them picture by
picture and calls the attention once a window, so neither a picture nor a sample sees another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from joynexus.vla.backbones.qwen_vl import QwenVL


class Qwen25VL(QwenVL):
    """Qwen2.5-VL checkpoints."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2_5_vl",)
    model_class: ClassVar[str] = "Qwen2_5_VLModel"

    @classmethod
    def load_model(cls, directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
        """Load the model; see `QwenVL.load_model`.

        Raises:
            ValueError: also if its text blocks attend within a sliding window, which the packed attention has not.
        """
        model = super().load_model(directory, dtype, device)
        if "sliding_attention" in model.config.text_config.layer_types:
            raise ValueError(f"the checkpoint in {directory} uses sliding-window attention, which is not supported")
        return model
