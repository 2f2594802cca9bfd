"""Named tensors that came from outside, against those that are expected.

In: tensors of a version, a checkpoint or a tenant's own file. Out: nothing, if they fit. Never: a tensor of another
name, shape or type taken for the right one; or a sentence as long as a file's author likes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

Layout = dict[str, tuple[torch.Size, torch.dtype]]
"""Shape and type of each tensor by name."""


def layout(module: nn.Module) -> Layout:
    """Return the layout of a module's own tensors."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in module.state_dict().items()}


def check_names(what: str, found: Iterable[str], expected: Iterable[str]) -> None:
    """Compare names.

    Raises:
        ValueError: naming the first tensors that are missing or unknown.
    """
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or extra:
        unknown = [brief(name, 80) for name in extra[:3]]
        raise ValueError(f"{what} does not fit its spec: missing tensors {missing[:3]}, unknown tensors {unknown}")


def brief(text: object, limit: int = 200) -> str:
    """Return foreign text as part of a sentence: on one line, and cut."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[:limit] + "…"


def check_tensors(
    what: str, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> None:
    """Compare names, shapes, types and finiteness.

    Raises:
        ValueError: naming the first tensor that is missing, unknown, wrong or not finite.
    """
    check_layout(what, tensors, expected)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{what} holds NaN or infinity in '{name}'")


def check_layout(
    what: str, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> None:
    """Compare names, shapes and types.

    Raises:
        ValueError: naming the first tensor that is missing, unknown or wrong.
    """
    check_names(what, tensors, expected)
    for name, (shape, dtype) in expected.items():
        tensor = tensors[name]
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{what} does not fit its spec: '{name}' is {tensor.dtype} {list(tensor.shape)}, "
                f"expected {dtype} {list(shape)}"
            )
