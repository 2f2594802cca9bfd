"""The backbone: one frozen forward that all tenants share.

In: observations of any tenants. Out: one unpadded `VLAFeature` each. Never: state, gradients, training mode, or a
result that depends on the samples beside it while `exact` is set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np
import torch

from joynexus.vla.feature import LAST, Observation, VLAFeature
from joynexus.vla.grouping import Grouping
from joynexus.wire.limits import MAX_INSTRUCTION_CHARS

MAX_IMAGES = 8
MAX_IMAGE_SIDE = 4096


class Backbone(ABC):
    """A frozen model from observations to features.

    Attributes:
        name: what a policy spec calls it: `lite`, `tiny-qwen3vl`, a hub name or a directory, with `@<side>` if the
            image side is not the backbone's own.
        digest: 32 hex digits over weights, tokenizer, image processing and configuration.
        hidden_size: width H of its features.
        device, dtype: where and in which type it computes.
        exact: results must not depend on the group. True by default on CPU in float32.
        group_exactly: groups keep every sample's bits on this host; `numerics.probe` finds out. If False and `exact` is
            set, samples run one by one.
        grouping: how a group is cut into forwards; None: all its samples in one. `calibrate` measures it.
        samples_forwarded: samples that went through the model since it was loaded.
    """

    kernel: ClassVar[str]
    """Names what computes its attention."""

    def __init__(self, *, name: str, digest: str, hidden_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.name = name
        self.digest = digest
        self.hidden_size = hidden_size
        self.device = device
        self.dtype = dtype
        self.exact = device.type == "cpu" and dtype == torch.float32
        self.group_exactly = True
        self.grouping: Grouping | None = None
        self.samples_forwarded = 0

    def forward(self, observations: Sequence[Observation], layers: Collection[int] = (LAST,)) -> list[VLAFeature]:
        """Run the model over a group of samples.

        Args:
            observations: any number of samples; views, picture sizes and text lengths may differ.
            layers: hidden states to keep: -1 is the last, 0 what enters the first block. What else is asked for changes
                no bit of any of them.

        Returns:
            one feature a sample, in order, on `device` in `dtype`.

        Raises:
            ValueError: if an observation is not usable (see `check`) or a layer does not exist (see `check_layers`).
        """
        self.check_layers(layers)
        for observation in observations:
            self.check(observation)
        wanted = tuple(sorted(set(layers)))
        with torch.no_grad():
            features = [made for group in self._groups(observations) for made in self._forward(group, wanted)]
        self.samples_forwarded += len(features)
        return features

    def _groups(self, observations: Sequence[Observation]) -> list[Sequence[Observation]]:
        """Cut a group into forwards."""
        if self.exact and not self.group_exactly:
            return [[observation] for observation in observations]
        if self.grouping is None:
            return [observations] if observations else []
        ends = accumulate(self.grouping.cut([self.tokens(observation) for observation in observations]))
        return [observations[start:end] for start, end in pairwise((0, *ends))]

    def check(self, observation: Observation) -> None:
        """Refuse an observation that would make a whole group fail; call it before a sample joins one.

        What can be known without running the model is known here: pictures' types and sizes, text that no tokenizer
        takes, and how many tokens it all becomes.

        Raises:
            ValueError: one sentence that says what is wrong with it.
        """
        if len(observation.images) > MAX_IMAGES:
            raise ValueError(f"an observation has {len(observation.images)} images; at most {MAX_IMAGES} are allowed")
        for index, image in enumerate(observation.images):
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
                raise ValueError(
                    f"image {index} is {image.dtype} {list(image.shape)}; it must be uint8 [height, width, 3]"
                )
            if not 1 <= min(image.shape[:2]) <= max(image.shape[:2]) <= MAX_IMAGE_SIDE:
                raise ValueError(f"image {index} has sides {image.shape[:2]}; allowed are 1 to {MAX_IMAGE_SIDE} pixels")
        if len(observation.instruction) > MAX_INSTRUCTION_CHARS:
            raise ValueError(
                f"the instruction has {len(observation.instruction)} characters; at most {MAX_INSTRUCTION_CHARS} fit"
            )
        if any("\ud800" <= char <= "\udfff" for char in observation.instruction):
            raise ValueError("the instruction is not valid text: it holds half of a surrogate pair; decode it as UTF-8")

    def batch_key(self) -> str:
        """Return what two samples must share to go through one forward (the hard part of the batch key).

        The digest holds weights, tokenizer, image processing with its side, and configuration.
        """
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.digest}:{dtype}:{self.device.type}:{self.kernel}"

    def calibrate(self) -> str:
        """Measure how many tokens are best run at once, set `grouping`, and say in one sentence what was found."""
        return "samples go through the encoders one by one"

    def take_far_busy(self) -> float:
        """Return busy seconds of other processes, for this one's forwards, since this was last asked."""
        return 0.0

    @abstractmethod
    def check_layers(self, layers: Collection[int]) -> None:
        """Refuse hidden states that this backbone has not.

        Raises:
            ValueError: one sentence that says which it has.
        """

    @abstractmethod
    def tokens(self, observation: Observation) -> int:
        """Count the tokens that an observation of usable pictures becomes, without running the model."""

    @abstractmethod
    def _forward(self, observations: Sequence[Observation], layers: tuple[int, ...]) -> list[VLAFeature]:
        """Run checked observations; called without gradients."""
