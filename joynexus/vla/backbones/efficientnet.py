"""EfficientNet-Lite0, feature part only, with batch normalisation folded into the convolutions.

In: float pictures [1, 3, S, S] scaled to about -1..1. Out: the last feature map [1, 1280, S/32, S/32]. Never: training,
or the classifier. Folding is exact algebra for a frozen network and saves half of the elementwise passes.

Architecture and weights: Tan & Le, "EfficientNet" (2019), and TensorFlow's EfficientNet-Lite release: no squeeze and
excitation, ReLU6, stem and head of fixed width, TensorFlow's "same" padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

FEATURES = 1280
STRIDE = 32
_EPS = 1e-3  # of batch normalisation, as in the release
# (repeats, kernel, stride, expansion, output channels) of each stage
_STAGES = ((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112), (4, 5, 2, 6, 192))
_LAST_STAGE = (1, 3, 1, 6, 320)


@dataclass(frozen=True)
class _Conv:
    """One convolution with its folded normalisation: names in the release, stride, groups, activation."""

    name: str
    norm: str
    stride: int = 1
    depthwise: bool = False
    activated: bool = True


def _blocks() -> list[tuple[tuple[_Conv, ...], bool]]:
    """List the inverted-residual blocks as (convolutions, has a residual connection)."""
    blocks: list[tuple[tuple[_Conv, ...], bool]] = []
    channels = 32
    for repeats, _kernel, stride, expansion, out in (*_STAGES, _LAST_STAGE):
        for repeat in range(repeats):
            prefix = f"_blocks.{len(blocks)}."
            step = stride if repeat == 0 else 1
            convs = [
                _Conv(f"{prefix}_depthwise_conv", f"{prefix}_bn1", stride=step, depthwise=True),
                _Conv(f"{prefix}_project_conv", f"{prefix}_bn2", activated=False),
            ]
            if expansion != 1:
                convs.insert(0, _Conv(f"{prefix}_expand_conv", f"{prefix}_bn0"))
            blocks.append((tuple(convs), step == 1 and channels == out))
            channels = out
    return blocks


_STEM = _Conv("_conv_stem", "_bn0", stride=2)
_HEAD = _Conv("_conv_head", "_bn1")
_BLOCKS = _blocks()


def fold(released: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fold the released weights: `<conv>.weight` and `<conv>.bias` of each convolution.

    Raises:
        ValueError: if a tensor of the release is missing.
    """
    folded: dict[str, Tensor] = {}
    convs = [_STEM, *(conv for block, _ in _BLOCKS for conv in block), _HEAD]
    for conv in convs:
        try:
            weight, gamma, beta, mean, variance = (
                released[key].double()
                for key in (
                    f"{conv.name}.weight",
                    *(f"{conv.norm}.{part}" for part in ("weight", "bias", "running_mean", "running_var")),
                )
            )
        except KeyError as error:
            raise ValueError(f"the EfficientNet-Lite0 weights have no tensor {error}") from error
        scale = gamma / torch.sqrt(variance + _EPS)
        folded[f"{conv.name}.weight"] = (weight * scale[:, None, None, None]).float()
        folded[f"{conv.name}.bias"] = (beta - mean * scale).float()
    return folded


def feature_map(weights: Mapping[str, Tensor], picture: Tensor) -> Tensor:
    """Run the network: [1, 3, S, S], S a multiple of 32, to [1, 1280, S/32, S/32]."""
    hidden = _apply(weights, _STEM, picture)
    for convs, residual in _BLOCKS:
        entering = hidden
        for conv in convs:
            hidden = _apply(weights, conv, hidden)
        if residual:
            hidden = hidden + entering
    return _apply(weights, _HEAD, hidden)


def _apply(weights: Mapping[str, Tensor], conv: _Conv, x: Tensor) -> Tensor:
    weight, bias = weights[f"{conv.name}.weight"], weights[f"{conv.name}.bias"]
    kernel, side = weight.shape[-1], x.shape[-1]
    total = max((-(-side // conv.stride) - 1) * conv.stride + kernel - side, 0)
    padding = total // 2
    if total % 2:  # TensorFlow pads the odd pixel at the end
        x, padding = functional.pad(x, (padding, total - padding, padding, total - padding)), 0
    groups = x.shape[1] if conv.depthwise else 1
    y = functional.conv2d(x, weight, bias, stride=conv.stride, padding=padding, groups=groups)
    return functional.relu6(y, inplace=True) if conv.activated else y
