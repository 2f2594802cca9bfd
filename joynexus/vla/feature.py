"""What goes into a backbone and what comes out: `Observation` and `VLAFeature`.

In: pictures and an instruction, never state. Out: per sample, unpadded hidden states with the kind of each token.
Never: a padding side. Whoever needs a rectangle calls `pad_features`, which pads to the longest of the samples it is
given and returns the mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TEXT, IMAGE = 0, 1
LAST = -1


@dataclass(frozen=True)
class Observation:
    """What a frozen backbone sees of one moment.

    Attributes:
        images: one uint8 array [H, W, 3] a camera, in the order of the contract; may be empty.
        instruction: task text.
    """

    images: tuple[npt.NDArray[np.uint8], ...]
    instruction: str


@dataclass(frozen=True)
class VLAFeature:
    """Result of one frozen forward over one observation.

    Attributes:
        layers: hidden states by layer, each [L, H]; -1 is the last one.
        token_type: uint8 [L], `TEXT` or `IMAGE`.
        backbone: digest of the backbone that made it.
    """

    layers: dict[int, Tensor]
    token_type: Tensor
    backbone: str

    @property
    def length(self) -> int:
        """Number of tokens L."""
        return int(self.token_type.shape[0])

    @property
    def last(self) -> Tensor:
        """Last hidden state, [L, H]."""
        return self.layers[LAST]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in (*self.layers.values(), self.token_type))

    def to_tensors(self) -> dict[str, Tensor]:
        """Return named contiguous tensors on the CPU, for storage."""
        named = {f"layer.{index}": hidden for index, hidden in self.layers.items()}
        named["token_type"] = self.token_type
        return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], backbone: str) -> VLAFeature:
        """Rebuild a feature from `to_tensors`.

        Raises:
            ValueError: if the tensors are not those of a feature.
        """
        token_type = tensors.get("token_type")
        layers = {int(name[6:]): tensor for name, tensor in tensors.items() if name.startswith("layer.")}
        if token_type is None or any(t.ndim != 2 or t.shape[0] != token_type.shape[0] for t in layers.values()):
            raise ValueError("these tensors are not a feature: 'token_type' [L] and 'layer.<i>' [L, H] are needed")
        return cls(layers=layers, token_type=token_type, backbone=backbone)


@dataclass(frozen=True)
class PaddedFeature:
    """Features of several samples as rectangles, for an action module.

    Attributes:
        layers: hidden states by layer, each [B, L, H], zero where there is no token; -1 is the last one. If all rows
            are one and the same feature, these are views on it without memory of their own: stride 0 from row to row.
        mask: bool [B, L], True where there is a token.
    """

    layers: dict[int, Tensor]
    mask: Tensor

    @property
    def last(self) -> Tensor:
        """Last hidden state, [B, L, H]."""
        return self.layers[LAST]


def pad_features(
    features: Sequence[VLAFeature], layers: Sequence[int] = (LAST,), device: torch.device | str | None = None
) -> PaddedFeature:
    """Pad several samples to the longest of them.

    Args:
        features: at least one sample.
        layers: which hidden states; at least one.
        device: where the result goes; None: where the first feature is.

    Raises:
        ValueError: if there is no sample or a sample lacks a layer.
    """
    if not features:
        raise ValueError("there is no feature to pad: give at least one sample")
    for feature in features:
        missing = sorted(set(layers) - feature.layers.keys())
        if missing:
            raise ValueError(
                f"a feature has no layers {missing}, only {sorted(feature.layers)}: ask the backbone for them"
            )
    lengths = torch.tensor([f.length for f in features])
    place = torch.device(device or features[0].token_type.device)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return PaddedFeature({layer: _stack(features, layer, place) for layer in layers}, mask.to(place))


def _stack(features: Sequence[VLAFeature], layer: int, device: torch.device) -> Tensor:
    if all(feature is features[0] for feature in features):  # an instruction without pictures
        return features[0].layers[layer].to(device).expand(len(features), -1, -1)
    hidden = [f.layers[layer].to(device) for f in features]
    if len({len(h) for h in hidden}) == 1:  # the usual case: one copy in place of one a sample
        return torch.stack(hidden)
    return torch.nn.utils.rnn.pad_sequence(hidden, batch_first=True)
