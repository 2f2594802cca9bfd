"""What a policy saw, did and was paid in some episodes: what reinforcement learning is trained on, as one blob.

In: arrays of whole episodes, or a blob that anybody may have written. Out: the other. Never: half an episode, a number
that is not finite, a shape that disagrees with another, or a copy of the pictures when a blob is read.

A decision is one question to the policy and the chunk that answered it. The N decisions of E episodes lie end to end;
C is the chunk, A the length of an action, S that of the state, V how many values the critic gives (0 without one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from joynexus.specs import MAX_DECISIONS
from joynexus.unreadable import UNREADABLE
from joynexus.wire.arrays import Array, ArrayPacker, Buffer, rebuild
from joynexus.wire.frames import join, split

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Trajectories:
    """Whole episodes under one version.

    Attributes:
        version: that acted; of several pages together (`concatenate`) the oldest.
        contract: digest of the environment's contract.
        instruction: task text.
        lengths: [E] int64, decisions of each episode; their sum is N.
        seeds: [E] int64, that the episodes were reset with.
        draws: [E] int64, seeds of what the policy drew in them; no two episodes have both in common.
        success: [E] bool.
        terminated: [E] bool: the task ended the episode, so that nothing more could come; else it was cut off.
        last_value: [E, V] float32, value of the observation behind the last action; 0 where `terminated`.
        state: [N, S] float32, raw units.
        images: one [N, H, W, 3] uint8 array a camera, in the contract's order.
        sample: [N, …] float32, what the head drew (`ActionModule.log_prob` takes it).
        log_prob: [N, C, A] float32, of each number drawn, when it was drawn.
        value: [N, V] float32.
        rewards: [N, C] float32, unscaled; 0 behind the executed actions.
        executed: [N] int64, actions executed of each chunk: 1 to C.
    """

    version: int
    contract: str
    instruction: str
    lengths: Ints
    seeds: Ints
    draws: Ints
    success: Flags
    terminated: Flags
    last_value: Floats
    state: Floats
    images: tuple[npt.NDArray[np.uint8], ...]
    sample: Floats
    log_prob: Floats
    value: Floats
    rewards: Floats
    executed: Ints


MAX_NUMBERS_BYTES = 1 << 30
"""Most bytes of arrays, pictures aside, in a blob that is read: they are copied."""
_MAX_BODY_BYTES = 1 << 20  # of all that is no array

_PER_EPISODE = ("lengths", "seeds", "draws", "success", "terminated", "last_value")
_PER_DECISION = ("state", "sample", "log_prob", "value", "rewards", "executed")
_ARRAYS = (*_PER_EPISODE, *_PER_DECISION)
_DTYPES: dict[str, type[np.generic]] = {
    **dict.fromkeys(_ARRAYS, np.float32),
    **dict.fromkeys(("lengths", "seeds", "draws", "executed"), np.int64),
    **dict.fromkeys(("success", "terminated"), np.bool_),
}
_TWO_DIMENSIONS = ("last_value", "state", "value", "rewards")
_DIMENSIONS = {**dict.fromkeys(_ARRAYS, 1), **dict.fromkeys(_TWO_DIMENSIONS, 2), "log_prob": 3}


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """All that is no array; `arrays` are those of `_ARRAYS` in that order, and `images` follow."""

    version: int
    contract: str
    instruction: str
    arrays: tuple[Array, ...]
    images: tuple[Array, ...]


def pack(trajectories: Trajectories) -> bytes:
    """Return one blob.

    Raises:
        ValueError: one sentence on what is wrong with the trajectories.
    """
    _check(trajectories)
    packer = ArrayPacker()
    body = _Body(
        version=trajectories.version,
        contract=trajectories.contract,
        instruction=trajectories.instruction,
        arrays=tuple(packer.add(getattr(trajectories, name)) for name in _ARRAYS),
        images=tuple(packer.add(image) for image in trajectories.images),
    )
    return join([msgspec.msgpack.encode(body), *packer.buffers])


def unpack(data: Buffer) -> Trajectories:
    """Read a blob that anybody may have written; the pictures are read-only views on it.

    Raises:
        ValueError: one sentence on what is wrong with the blob.
    """
    body_data, *buffers = split(data) or [memoryview(b"")]
    if body_data.nbytes > _MAX_BODY_BYTES:
        raise ValueError(f"the blob's first part has {body_data.nbytes} bytes, at most {_MAX_BODY_BYTES} may be")
    try:
        body = msgspec.msgpack.decode(body_data, type=_Body)
    except UNREADABLE as error:
        raise ValueError(f"the blob holds no trajectories: {error}") from error
    if len(body.arrays) != len(_ARRAYS) or len(buffers) != len(body.arrays) + len(body.images):
        raise ValueError(f"the blob holds no trajectories: it has {len(body.arrays)} arrays and {len(buffers)} frames")
    views = {name: rebuild(array, buffers) for name, array in zip(_ARRAYS, body.arrays, strict=True)}
    nbytes = sum(view.nbytes for view in views.values())
    if nbytes > MAX_NUMBERS_BYTES:
        raise ValueError(f"the trajectories have {nbytes} bytes of numbers, at most {MAX_NUMBERS_BYTES} may be")
    most = max(len(view) if view.ndim else 0 for view in views.values())
    if most > MAX_DECISIONS:  # each episode and decision is looked at, for which Python needs many times its bytes
        raise ValueError(f"the trajectories have {most} rows, but an update is trained on at most {MAX_DECISIONS}")
    # Copied, because numbers within a blob lie where they cannot be computed with fast.
    arrays: dict[str, Any] = {name: view.copy() for name, view in views.items()}
    trajectories = Trajectories(
        version=body.version,
        contract=body.contract,
        instruction=body.instruction,
        images=tuple(rebuild(image, buffers) for image in body.images),
        **arrays,
    )
    _check(trajectories)
    return trajectories


def concatenate(parts: Sequence[Trajectories]) -> Trajectories:
    """Return the episodes of several pages as one, in order.

    Raises:
        ValueError: one sentence if there are none, or they are not of one policy in one task.
    """
    if not parts:
        raise ValueError("there are no trajectories")
    first = parts[0]
    for other in parts[1:]:
        if (first.contract, first.instruction) != (other.contract, other.instruction):
            raise ValueError("some trajectories have another contract or instruction than others of the same update")
        for name in ("last_value", *_PER_DECISION):
            if getattr(first, name).shape[1:] != getattr(other, name).shape[1:]:
                raise ValueError(f"{name} has other lengths in some trajectories than in others of the same update")
        if [image.shape[1:] for image in first.images] != [image.shape[1:] for image in other.images]:
            raise ValueError("some trajectories have other pictures than others of the same update")
    arrays: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
    together = Trajectories(
        version=min(part.version for part in parts),
        contract=first.contract,
        instruction=first.instruction,
        images=tuple(np.concatenate(views) for views in zip(*(part.images for part in parts), strict=True)),
        **arrays,
    )
    _check_distinct(together)
    return together


def _check(t: Trajectories) -> None:
    """ValueError with one sentence if something in the trajectories disagrees with something else."""
    if t.version < 1:
        raise ValueError(f"trajectories are of version {t.version}: versions count from 1")
    for name in _ARRAYS:
        array = getattr(t, name)
        if array.dtype != _DTYPES[name] or (array.ndim < 2 if name == "sample" else array.ndim != _DIMENSIONS[name]):
            raise ValueError(f"{name} of the trajectories is {array.dtype} {list(array.shape)}, which it cannot be")
    episodes, decisions = len(t.lengths), len(t.executed)
    for name in _ARRAYS:
        array = getattr(t, name)
        count, what = (episodes, "episodes") if name in _PER_EPISODE else (decisions, "decisions")
        if len(array) != count:
            raise ValueError(f"{name} of the trajectories has {len(array)} rows for {count} {what}")
        if array.dtype == np.float32 and not np.isfinite(array).all():
            raise ValueError(f"{name} of the trajectories holds numbers that are not finite")
    for image in t.images:
        if image.dtype != np.uint8 or image.ndim != 4 or image.shape[3] != 3 or len(image) != decisions:
            raise ValueError(
                f"pictures of the trajectories are {image.dtype} {list(image.shape)}: [{decisions}, H, W, 3] is needed"
            )
    if not episodes or not all(1 <= length <= decisions for length in t.lengths) or t.lengths.sum() != decisions:
        raise ValueError(f"the episodes' lengths do not add up to the {decisions} decisions of the trajectories")
    chunk, values = t.log_prob.shape[1], t.value.shape[1]
    if t.rewards.shape[1] != chunk or chunk < 1:
        raise ValueError(f"rewards of the trajectories are for chunks of {t.rewards.shape[1]}, log_prob for {chunk}")
    if values not in (0, 1, chunk) or t.last_value.shape[1] != values:
        raise ValueError(
            f"the trajectories have {values} values a decision and {t.last_value.shape[1]} at the end of an episode: "
            f"0, 1 or one for each of {chunk} actions is needed in both"
        )
    if (t.executed < 1).any() or (t.executed > chunk).any():
        raise ValueError(f"some chunk of the trajectories has not 1 to {chunk} executed actions")
    if t.rewards[np.arange(chunk) >= t.executed[:, None]].any():
        raise ValueError("the trajectories have rewards for actions that were not executed")
    if t.last_value[t.terminated].any():
        raise ValueError("the trajectories have a value behind the end of an episode that the task ended")
    _check_distinct(t)


def _check_distinct(t: Trajectories) -> None:
    if (t.seeds < 0).any() or (t.draws < 0).any():
        raise ValueError("some seed of the trajectories is negative")
    if len(set(zip(t.seeds.tolist(), t.draws.tolist(), strict=True))) != len(t.seeds):
        raise ValueError("an episode is twice in the trajectories: none has both seed and draw of another")
