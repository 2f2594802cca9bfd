"""Noise by row: what an action module draws, from seeds alone.

In: one seed a row. Out: draws in which each row depends on its own seed and on the shapes asked for before, on nothing
else. Never: the global generator, or a row that draws otherwise because of the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Noise:
    """Draws for B rows. Successive calls go on: what is drawn second differs from what was drawn first.

    Args:
        seeds: one a row, each from 0 to 2**63 - 1.
        device: where draws go; they are made on the CPU, so that every device gets the same.
    """

    def __init__(self, seeds: Sequence[int], *, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._rows = [torch.Generator().manual_seed(seed) for seed in seeds]

    def normal(self, *shape: int) -> Tensor:
        """Draw from the standard normal distribution: float32 [B, *shape]."""
        return torch.stack([torch.randn(shape, generator=row) for row in self._rows]).to(self._device)

    def uniform(self, *shape: int) -> Tensor:
        """Draw uniformly from [0, 1): float32 [B, *shape]."""
        return torch.stack([torch.rand(shape, generator=row) for row in self._rows]).to(self._device)
