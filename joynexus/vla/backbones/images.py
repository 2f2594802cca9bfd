"""Pictures into model input: resizing with PIL, patches with numpy.

In: uint8 pictures [H, W, 3]. Out: resized pictures, or flat patches in the order that Qwen-VL vision towers read.
Never: torch or torchvision; the picture that a backbone sees is the same wherever it is prepared.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def resize(image: Pixels, height: int, width: int, *, bicubic: bool = False) -> Pixels:
    """Resize a uint8 picture [H, W, 3] to [height, width, 3]; a picture of that size is returned as it is."""
    if image.shape[:2] == (height, width):
        return image
    method = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    return np.asarray(Image.fromarray(np.ascontiguousarray(image)).resize((width, height), method))


def smart_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Choose the size to which Qwen-VL image processors resize a picture.

    Both sides are multiples of `factor`, the area lies within the limits, the aspect ratio is kept as far as possible.
    Source: `smart_resize` of the Qwen2-VL image processor in transformers.
    """
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def patchify(
    image: Pixels,
    *,
    patch: int,
    merge: int,
    frames: int,
    mean: Floats,
    std: Floats,
) -> tuple[Floats, tuple[int, int, int]]:
    """Cut a picture into normalised patches, in blocks of merge x merge neighbours.

    Args:
        image: uint8 [H, W, 3]; both sides are multiples of `patch * merge`.
        patch: side of a patch in pixels.
        merge: patches along each side that become one token.
        frames: temporal patch size; a picture is repeated that often.
        mean, std: float32 [3], applied to pixels scaled to 0..1.

    Returns:
        float32 [h * w, 3 * frames * patch * patch] and the grid (1, h, w), where h and w count patches.
    """
    height, width = image.shape[0] // patch, image.shape[1] // patch
    pixels = (image.astype(np.float32) * np.float32(1 / 255) - mean) / std
    blocks = pixels.transpose(2, 0, 1).reshape(3, height // merge, merge, patch, width // merge, merge, patch)
    blocks = blocks.transpose(1, 4, 2, 5, 0, 3, 6)  # block row, block column, row, column, channel, y, x
    repeated = np.broadcast_to(blocks[:, :, :, :, :, None], (*blocks.shape[:5], frames, patch, patch))
    return repeated.reshape(height * width, 3 * frames * patch * patch), (1, height, width)
