"""What writes demonstrations has of an expert, whatever the family of simulators.

In: seeds. Out: one recording a seed, failed ones too, in the order of the seeds. Never: a recording that depends on how
many are made at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from joynexus.contract import Contract
from joynexus.simulation.interface import Picture


class Recording(NamedTuple):
    """An episode that an expert acted in.

    Attributes:
        seed: of the episode.
        success: whether it solved the task; if not, the rest may be empty.
        states: [T, S] float32, before each action.
        actions: [T, A] float32.
        images: for each camera of the contract, in order, one picture before each action.
    """

    seed: int
    success: bool
    states: npt.NDArray[np.float32]
    actions: npt.NDArray[np.float32]
    images: tuple[Sequence[Picture], ...]


class Expert(Protocol):
    """Acts in one task; a context manager that ends its processes."""

    @property
    def contract(self) -> Contract:
        """The simulator's; SimulatorError if that cannot be made."""

    @property
    def instruction(self) -> str:
        """Task text."""

    def record(self, seeds: Sequence[int]) -> list[Recording]:
        """Act in the episodes of these seeds."""

    def __enter__(self) -> Self:
        """Start."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes."""
