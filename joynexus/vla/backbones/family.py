"""The boundary to a model family of transformers, and the backbone that drives one.

In: a checkpoint directory. Out: packed forwards over many samples. Never: anything about one family outside its own
module: a family says how to build its inputs, positions and forward, and nothing else changes when one is added.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from joynexus.vla.backbones import packing
from joynexus.vla.backbones.base import Backbone
from joynexus.vla.backbones.timing import time_forwards
from joynexus.vla.feature import Observation, VLAFeature
from joynexus.vla.grouping import Grouping


@dataclass(frozen=True)
class Prepared:
    """One sample's model input.

    Attributes:
        ids: token ids, int64 [L], with one image token for each token a picture becomes.
        token_type: uint8 [L], see `joynexus.vla.feature`.
        positions: the family's position ids, [P, L].
        pixels: patches of all pictures, float32 [N, D].
        grids: (frames, rows, columns) of patches of each picture.
    """

    ids: Tensor
    token_type: Tensor
    positions: Tensor
    pixels: Tensor
    grids: tuple[tuple[int, int, int], ...]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing progress bars and remarks on processors that are not used here."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


class Family(ABC):
    """What one model family needs.

    Attributes:
        model_types: values of `model_type` in `config.json` that this family loads.
        hidden_size: width of its hidden states.
        depth: number of blocks; hidden states 0 … depth exist.
    """

    model_types: ClassVar[tuple[str, ...]]
    hidden_size: int
    depth: int

    @abstractmethod
    def __init__(
        self, directory: Path, weights: Path, *, device: torch.device, dtype: torch.dtype, image_side: int | None
    ) -> None:
        """Load tokenizer and image processing from `directory`, weights in compute type from `weights`.

        Raises:
            ValueError: if the checkpoint is incomplete or `image_side` does not suit it.
        """

    @classmethod
    @abstractmethod
    def convert(cls, directory: Path, target: Path, dtype: torch.dtype) -> None:
        """Write the checkpoint's weights in `dtype` to the directory `target`."""

    @abstractmethod
    def check(self, observation: Observation) -> None:
        """Refuse, with a ValueError, an observation that this family cannot take."""

    @abstractmethod
    def tokens(self, observation: Observation) -> int:
        """Count the tokens of an observation."""

    @abstractmethod
    def prepare(self, observation: Observation) -> Prepared:
        """Build the input of one checked observation."""

    @abstractmethod
    def run(self, samples: Sequence[Prepared], layers: Sequence[int]) -> dict[int, Tensor]:
        """Run samples packed end to end, inside `packing.samples_at`; return each layer as [T, H]."""


class PackedBackbone(Backbone):
    """A checkpoint of any known family, its samples packed end to end."""

    kernel = packing.NAME

    def __init__(self, family: Family, *, name: str, digest: str, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(name=name, digest=digest, hidden_size=family.hidden_size, device=device, dtype=dtype)
        self._family = family

    def check(self, observation: Observation) -> None:
        """Refuse what `Backbone.check` and the family refuse."""
        super().check(observation)
        self._family.check(observation)

    def tokens(self, observation: Observation) -> int:
        """Count the tokens of an observation; see `Backbone.tokens`."""
        return self._family.tokens(observation)

    def check_layers(self, layers: Collection[int]) -> None:
        """Refuse hidden states beyond the model's depth; see `Backbone.check_layers`."""
        depth = self._family.depth
        unknown = sorted(layer for layer in set(layers) if not -depth - 1 <= layer <= depth)
        if unknown or not layers:
            raise ValueError(f"{self.name} has hidden states {-depth - 1} to {depth}, not {unknown or 'none'}")

    def calibrate(self) -> str:
        """Time forwards of 1 to 16 samples; see `Backbone.calibrate`."""
        if self.exact and not self.group_exactly:
            return "samples go through the model one by one, because groups change bits on this host"
        self.grouping, counted = None, self.samples_forwarded
        self.grouping = Grouping(time_forwards(self))
        self.samples_forwarded = counted
        return self.grouping.describe()

    def _forward(self, observations: Sequence[Observation], layers: tuple[int, ...]) -> list[VLAFeature]:
        samples = [self._family.prepare(observation) for observation in observations]
        offsets = [0, *accumulate(len(sample.ids) for sample in samples)]
        with packing.samples_at(offsets):
            packed = self._family.run(samples, layers)
        return [
            VLAFeature(
                # Cloned, so that keeping one sample does not keep its whole group in memory.
                layers={layer: hidden[start:end].clone() for layer, hidden in packed.items()},
                token_type=sample.token_type.to(self.device),
                backbone=self.digest,
            )
            for sample, (start, end) in zip(samples, pairwise(offsets), strict=True)
        ]
