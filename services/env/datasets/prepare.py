"""Turn a data set into blobs that can be trained on: read once, checked, decoded, frozen.

In: a data set's folder, a blob store. Out: a `DatasetManifest` and one safetensors blob an episode. Never: more than a
few pictures in memory, a blob of an episode that was not read to its end, or a manifest with an error in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from joynexus.contract import Camera, Contract
from joynexus.datasets import DatasetManifest, EpisodeEntry
from joynexus.statistics import compute_statistics
from services.env.datasets.check import scan_dataset
from services.env.datasets.scan import Scan


class BlobSink(Protocol):
    """What of a `BlobStore` preparing needs."""

    def new_file(self) -> AbstractContextManager[Path]:
        """Give a path to write a blob to."""

    def put_file(self, path: Path, *, move: bool = False) -> tuple[str, int]:
        """Store a file; returns digest and size."""


_DTYPES = {"float32": "F32", "float64": "F64", "uint8": "U8"}


def prepare_dataset(
    folder: Path,
    blobs: BlobSink,
    *,
    image_side: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    alive: Callable[[], None] = lambda: None,
) -> DatasetManifest:
    """Validate a data set and store it as blobs.

    Args:
        folder: LeRobot v2.0, v2.1 or v3.0, or HDF5 files as LIBERO and robomimic write them.
        blobs: where the episodes go, such as a `BlobStore`.
        image_side: if given, larger pictures are shrunk until their longer side has this many pixels; the contract's
            cameras say so.
        progress: called with (episodes done, episodes in all).
        alive: called with each episode, file and picture, to show that a large set is no hang.

    Returns:
        The manifest; the same folder gives the same manifest and the same blobs.

    Raises:
        DatasetError: if the set cannot be used, with a report of all faults.
        BlobStoreFullError: if the disk is full.
    """
    if image_side is not None and image_side < 1:
        raise ValueError(f"image_side is {image_side}: it must be a number of pixels")
    scan = scan_dataset(folder, alive)
    contract = _resized(scan.contract, image_side)
    entries = []
    for number in range(len(scan.rows)):
        progress(number, len(scan.rows))
        entries.append(_store_episode(scan, number, contract, blobs, alive))
    progress(len(scan.rows), len(scan.rows))
    return DatasetManifest(
        source_format=scan.source_format,
        source_digest=scan.folder.digest(alive),
        fps=scan.fps,
        contract=contract,
        statistics=compute_statistics([rows.state for rows in scan.rows], [rows.action for rows in scan.rows]),
        episodes=tuple(entries),
        faults=scan.report.faults,
    )


def _resized(contract: Contract, image_side: int | None) -> Contract:
    def resize(camera: Camera) -> Camera:
        longer = max(camera.height, camera.width)
        if image_side is None or longer <= image_side:
            return camera
        height, width = (max(1, round(side * image_side / longer)) for side in (camera.height, camera.width))
        return msgspec.structs.replace(camera, height=height, width=width)

    return msgspec.structs.replace(contract, cameras=tuple(resize(camera) for camera in contract.cameras))


def _store_episode(
    scan: Scan, number: int, contract: Contract, blobs: BlobSink, alive: Callable[[], None]
) -> EpisodeEntry:
    rows, length = scan.rows[number], len(scan.rows[number].state)
    tensors: list[tuple[str, tuple[int, ...], str, Iterator[npt.NDArray[np.generic]]]] = [
        ("timestamp", (length,), "float64", iter([rows.timestamp])),
        ("state", rows.state.shape, "float32", iter([rows.state])),
        ("action", rows.action.shape, "float32", iter([rows.action])),
    ]
    for camera in contract.cameras:
        shape = (length, camera.height, camera.width, 3)
        tensors.append((f"image.{camera.name}", shape, "uint8", scan.pictures(number, camera)))
    with blobs.new_file() as path:
        with path.open("wb") as file:
            _write_safetensors(file, tensors, alive)
        digest, nbytes = blobs.put_file(path, move=True)
    return EpisodeEntry(length=length, instruction=scan.instructions[number], blob=digest, nbytes=nbytes)


def _write_safetensors(
    file: BinaryIO,
    tensors: list[tuple[str, tuple[int, ...], str, Iterator[npt.NDArray[np.generic]]]],
    alive: Callable[[], None],
) -> None:
    """Write a safetensors file whose tensors come in pieces, so that an episode's pictures need not fit in memory.

    The format (https://huggingface.co/docs/safetensors): header length as 8 little-endian bytes, JSON header, bytes.
    """
    header, offset = {}, 0
    for name, shape, dtype, _ in tensors:
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for piece in chain.from_iterable(pieces for *_, pieces in tensors):
        alive()
        file.write(np.ascontiguousarray(piece).data)
    if file.tell() != 8 + len(text) + offset:
        raise AssertionError("an episode's arrays do not have the shapes that its header states")
