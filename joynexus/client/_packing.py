"""Arrays of the caller as messages: training batches, observations to act on, and the actions that come back.

In: numpy arrays in raw units and a policy's spec. Out: messages with their buffers. Never: an array of another shape
or type than the policy takes, a question to the service, or a normalisation (the service does that, once).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from joynexus.client._io import Convert, answer_of
from joynexus.specs import PolicySpec
from joynexus.wire import ArrayPacker, Buffer, Packet, join, limits, rebuild
from joynexus.wire.front import Act, Actions, DatasetSamples, Samples

Images = Mapping[str, npt.NDArray[np.uint8]] | Sequence[npt.NDArray[np.uint8]]
"""One array per camera: by name, or in the contract's order."""


@dataclass(frozen=True)
class Batch:
    """Training samples in raw units, B of them.

    Attributes:
        state: [B, S].
        action: [B, chunk, A].
        instructions: B task texts, or one for all.
        images: one [B, H, W, 3] uint8 array per camera.
        action_mask: [B, chunk] bool, False where the episode had ended; None means all are valid.
    """

    state: npt.NDArray[Any]
    action: npt.NDArray[Any]
    instructions: Sequence[str] | str
    images: Images = ()
    action_mask: npt.NDArray[np.bool_] | None = None

    def copy(self) -> Batch:
        """Return the same samples in arrays of their own."""
        images: Images
        if isinstance(self.images, Mapping):
            images = {name: np.array(picture) for name, picture in self.images.items()}
        else:
            images = [np.array(picture) for picture in self.images]
        mask = None if self.action_mask is None else np.array(self.action_mask)
        texts = self.instructions if isinstance(self.instructions, str) else tuple(self.instructions)
        return Batch(np.array(self.state), np.array(self.action), texts, images, mask)


@dataclass(frozen=True)
class Chunk:
    """Actions of one version.

    Attributes:
        actions: [chunk, A] float32 in raw units; [R, chunk, A] if R rows were asked for.
        version: the version that acted.
    """

    actions: npt.NDArray[np.float32]
    version: int


def by_reference(dataset: str, indices: Sequence[int]) -> DatasetSamples:
    """Name steps of a data set; ValueError if an index is no whole number."""
    try:
        return DatasetSamples(dataset=dataset, indices=tuple(operator.index(index) for index in indices))
    except TypeError as error:
        raise ValueError(f"indices must be whole numbers, steps of data set '{dataset}': {error}") from error


def pack_observation(
    spec: PolicySpec,
    policy: str,
    images: Images,
    instruction: str | Sequence[str],
    state: npt.ArrayLike,
    *,
    version: int,
    seed: int | Sequence[int],
) -> tuple[Act, list[Buffer], Convert[Chunk]]:
    """Pack what a policy is to act on; see `Policy.act`.

    Returns:
        The message, its buffers, and what makes a `Chunk` of the answer.
    """
    rows = np.asarray(state, dtype=np.float32)
    single = rows.ndim == 1
    rows = rows[None] if single else rows
    if rows.ndim != 2 or rows.shape[1] != spec.contract.state_dim:
        raise ValueError(f"state has shape {list(np.shape(state))}, the policy takes [{spec.contract.state_dim}]")
    pictures = [picture[None] if single else picture for picture in _pictures(images, spec)]
    packer = ArrayPacker()
    message = Act(
        policy=policy,
        version=version,
        state=packer.add(rows),
        images=tuple(packer.add(_picture_rows(picture, len(rows))) for picture in pictures),
        instructions=_texts(instruction, len(rows)),
        contract=spec.contract.digest(),
        seeds=_seeds(seed, len(rows)),
    )

    def convert(packet: Packet) -> Chunk:
        answer = answer_of(Actions)(packet)
        actions = rebuild(answer.actions, packet.buffers)
        return Chunk(actions=actions[0] if single else actions, version=answer.version)

    return message, packer.buffers, convert


def join_samples(samples: Samples, buffers: Sequence[Buffer]) -> bytes:
    """Return a batch as the one blob it travels as when it is too large for a message."""
    return join([msgspec.msgpack.encode(samples), *buffers])


def pack_batch(batch: Batch, spec: PolicySpec) -> tuple[Samples, list[Buffer]]:
    """Pack samples to train on; ValueError if an array has a wrong shape or type."""
    contract = spec.contract
    state, action = np.asarray(batch.state, dtype=np.float32), np.asarray(batch.action, dtype=np.float32)
    if state.ndim != 2 or state.shape[1] != contract.state_dim or not len(state):
        raise ValueError(f"state has shape {list(state.shape)}, the policy trains on [B, {contract.state_dim}]")
    shape = (len(state), spec.chunk, contract.action_dim)
    if action.shape != shape:
        raise ValueError(f"action has shape {list(action.shape)}, the policy trains on {list(shape)}")
    mask = np.ones(shape[:2], dtype=np.bool_) if batch.action_mask is None else np.asarray(batch.action_mask)
    if mask.shape != shape[:2] or mask.dtype != np.bool_:
        raise ValueError(f"action_mask must be bool of shape {list(shape[:2])}")
    packer = ArrayPacker()
    samples = Samples(
        state=packer.add(state),
        action=packer.add(action),
        action_mask=packer.add(mask),
        images=tuple(packer.add(_picture_rows(picture, len(state))) for picture in _pictures(batch.images, spec)),
        instructions=_texts(batch.instructions, len(state)),
    )
    return samples, packer.buffers


def _pictures(images: Images, spec: PolicySpec) -> list[npt.NDArray[np.uint8]]:
    cameras = [camera.name for camera in spec.contract.cameras]
    if isinstance(images, Mapping):
        absent = [name for name in cameras if name not in images]
        if absent:
            raise ValueError(f"there is no picture of camera '{absent[0]}'; the policy sees {', '.join(cameras)}")
        images = [images[name] for name in cameras]
    if len(images) != len(cameras):
        raise ValueError(f"the policy sees {len(cameras)} cameras ({', '.join(cameras)}), got {len(images)} pictures")
    return [np.asarray(picture) for picture in images]


def _picture_rows(picture: npt.NDArray[Any], rows: int) -> npt.NDArray[np.uint8]:
    if picture.dtype != np.uint8 or picture.ndim != 4 or picture.shape[0] != rows or picture.shape[3] != 3:
        raise ValueError(
            f"a picture must be uint8 of shape [H, W, 3] (with {rows} rows: [{rows}, H, W, 3]), "
            f"got {picture.dtype} of shape {list(picture.shape)}"
        )
    return picture


def _texts(texts: str | Sequence[str], rows: int) -> tuple[str, ...]:
    each = (texts,) * rows if isinstance(texts, str) else tuple(texts)
    if len(each) != rows:
        raise ValueError(f"there are {rows} samples but {len(each)} instructions: give one for each, or one for all")
    longest = max(map(len, each), default=0)
    if longest > limits.MAX_INSTRUCTION_CHARS:
        raise ValueError(
            f"an instruction has {longest} characters, and at most {limits.MAX_INSTRUCTION_CHARS} are taken: shorten it"
        )
    return each


def _seeds(seed: int | Sequence[int], rows: int) -> tuple[int, ...]:
    try:
        given = tuple(operator.index(value) for value in np.asarray(seed, dtype=object).reshape(-1).tolist())
    except TypeError as error:
        raise ValueError(f"a seed must be a whole number: {error}") from error
    given = given * rows if np.ndim(seed) == 0 else given
    if len(given) != rows:
        raise ValueError(f"there are {rows} rows but {len(given)} seeds: give one for each, or one for all")
    return given if any(given) else ()
