"""The table of model families: the one place to name a new one.

In: the `model_type` of a checkpoint. Out: the family that loads it. Never: imported before a checkpoint is loaded, for
`lite` does without.
"""

from __future__ import annotations

from joynexus.vla.backbones.family import Family
from joynexus.vla.backbones.qwen3_vl import Qwen3VL
from joynexus.vla.backbones.qwen25_vl import Qwen25VL

FAMILIES: tuple[type[Family], ...] = (Qwen3VL, Qwen25VL)


def family_of(model_type: object) -> type[Family]:
    """Find the family of a checkpoint.

    Raises:
        ValueError: naming the families that are supported.
    """
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(kind for family in FAMILIES for kind in family.model_types)
    raise ValueError(f"it is of the family '{model_type}'; supported are: {known}")
