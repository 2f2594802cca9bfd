"""Arrays travel as raw frames beside the message; a small descriptor rebuilds them without a copy.

In: numpy arrays, or descriptors and frames. Out: descriptors and frames, or read-only numpy views. Never: an object
dtype, a shape that does not fit its frame exactly, or anything that could run code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from joynexus.bounds import Few, Short
from joynexus.wire.errors import WireError

DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in ("<f8", "<f4", "<f2", "<i8", "<i4", "|u1", "|b1")}
"""The dtypes that may cross the wire, by numpy's own little-endian name."""

MAX_DIMENSIONS = 8

Buffer = bytes | memoryview


class Array(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptor of one array.

    Attributes:
        dtype: a key of `DTYPES`.
        shape: lengths, all non-negative.
        frame: index of the message buffer that holds the C-contiguous bytes.
    """

    dtype: Short
    shape: Few[int]
    frame: int


class ArrayPacker:
    """Collect arrays of one outgoing message: `add` gives the descriptor, `buffers` the frames."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def add(self, array: npt.NDArray[Any]) -> Array:
        """Append an array (copied only if it is not C-contiguous and little-endian).

        Raises:
            ValueError: if its dtype may not cross the wire.
        """
        dtype = array.dtype.newbyteorder("<")
        if dtype.str not in DTYPES:
            raise ValueError(f"arrays of dtype {array.dtype} cannot be sent; use one of {', '.join(DTYPES)}")
        flat = np.ascontiguousarray(array, dtype=dtype)
        self.buffers.append(flat.reshape(-1).view(np.uint8).data if flat.size else b"")
        return Array(dtype=dtype.str, shape=tuple(array.shape), frame=len(self.buffers) - 1)


def rebuild(array: Array, buffers: Sequence[Buffer], *, offset: int = 0) -> npt.NDArray[Any]:
    """Return the described array as a read-only view on its frame.

    Args:
        array: descriptor from a decoded message.
        buffers: the message's frames.
        offset: added to `array.frame`, for a message that was merged into another.

    Raises:
        WireError: if the descriptor names an unknown dtype, a bad shape, or a frame of another size.
    """
    dtype = DTYPES.get(array.dtype)
    if dtype is None:
        raise WireError(f"array dtype {array.dtype[:16]!r} is not one of {', '.join(DTYPES)}")
    if len(array.shape) > MAX_DIMENSIONS or any(length < 0 for length in array.shape):
        raise WireError("an array's shape must have at most 8 non-negative lengths")
    frame = array.frame + offset
    if array.frame < 0 or not 0 <= frame < len(buffers):
        raise WireError(f"array frame {array.frame} does not exist")
    buffer = memoryview(buffers[frame])
    expected = math.prod(array.shape) * dtype.itemsize
    if buffer.nbytes != expected:
        raise WireError(f"array of shape {array.shape} needs {expected} bytes, its frame has {buffer.nbytes}")
    try:
        view = np.frombuffer(buffer, dtype=dtype).reshape(array.shape)
    except ValueError as error:  # an empty array whose other lengths are too large for numpy
        raise WireError(f"array of shape {array.shape} cannot be: {error}") from error
    view.flags.writeable = False
    return view
