"""How a role brings its backbone up: loaded, tried, described.

In: the names that settings hold. Out: a backbone that is ready, and what to say of it. Never: a claim about grouping
that was not tried on this host.
"""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from joynexus.vla.backbones import load_backbone
from joynexus.vla.backbones.base import Backbone
from joynexus.vla.heads import known_heads
from joynexus.vla.numerics import probe


def bring_up(
    name: str, *, device: str, dtype: str, cache_dir: Path, image_side: int | None
) -> tuple[Backbone, dict[str, str]]:
    """Load a backbone and find out whether groups keep every sample's bits here.

    Returns:
        the backbone, and for status: `backbone`, `device`, `dtype`, `numerics` (one sentence), `numerics_class`,
        `heads` (action modules it knows), `torch`.

    Raises:
        ValueError: one sentence on why it cannot be loaded.
    """
    backbone = load_backbone(name, device=device, dtype=dtype, cache_dir=cache_dir, image_side=image_side)
    verdict = probe(backbone)
    gc.collect()
    gc.freeze()  # what was imported and loaded stays: searching it again costs 200 ms in the middle of a step
    return backbone, {
        "backbone": backbone.name,
        "device": str(backbone.device),
        "dtype": dtype,
        "numerics": ("exact: " if verdict.exact else "not exact: ") + verdict.detail,
        "numerics_class": verdict.numerics_class,
        "heads": ", ".join(known_heads()),
        "torch": str(torch.__version__),  # a subclass of str, which the wire would not take
    }
