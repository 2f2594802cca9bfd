"""What a pool and its worker processes say to each other, over one pipe each.

In: requests for some rows (a row is one environment). Out: replies by row. Never: pickle; a frame is one MessagePack
struct with arrays as raw bytes.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from joynexus.contract import Contract
from joynexus.simulation.interface import SimObservation, SimulatorOptions, StepResult


class Array(msgspec.Struct, frozen=True):
    """An array, by value."""

    dtype: Literal["uint8", "float32"]
    shape: tuple[int, ...]
    data: bytes


class Make(msgspec.Struct, frozen=True, tag=True):
    """Make the environments of rows 0 to `rows` - 1."""

    task: str
    options: SimulatorOptions
    rows: int


class Reset(msgspec.Struct, frozen=True, tag=True):
    """Begin an episode in some rows."""

    seeds: dict[int, int]
    render: bool


class Step(msgspec.Struct, frozen=True, tag=True):
    """Execute a chunk in some rows; `record` names those that draw every step, `final` as in `Simulator`."""

    actions: dict[int, Array]
    render: bool
    final: bool
    record: tuple[int, ...]


class Made(msgspec.Struct, frozen=True, tag=True):
    """The environments are there; they say what they are."""

    contract: Contract
    instruction: str


class MakeFailed(msgspec.Struct, frozen=True, tag=True):
    """They cannot be made: a sentence; `wrong` if what was asked for is at fault, not this machine."""

    reason: str
    wrong: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """What one row has after a request: its observation and what a step led to, or why it failed."""

    state: Array | None = None
    images: tuple[Array, ...] = ()
    rewards: Array | None = None
    success: bool = False
    done: bool = False
    terminated: bool = False
    frames: tuple[Array, ...] = ()
    failed: str = ""


class Outcomes(msgspec.Struct, frozen=True, tag=True):
    """Outcome by row."""

    rows: dict[int, Outcome]


Request = Make | Reset | Step
Reply = Made | MakeFailed | Outcomes

encode = msgspec.msgpack.encode
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def decode_request(data: bytes) -> Request:
    """Decode what a pool sent."""
    request: Request = _requests.decode(data)
    return request


def decode_reply(data: bytes) -> Reply:
    """Decode what a worker process sent."""
    reply: Reply = _replies.decode(data)
    return reply


def pack(array: npt.NDArray[np.uint8] | npt.NDArray[np.float32]) -> Array:
    """Return an array by value."""
    kind: Literal["uint8", "float32"] = "uint8" if array.dtype == np.uint8 else "float32"
    return Array(kind, array.shape, np.ascontiguousarray(array, kind).tobytes())


def unpack_float32(array: Array) -> npt.NDArray[np.float32]:
    """Return a float32 array, read-only; ValueError if it is none."""
    return _unpack(array, "float32").view(np.float32)


def unpack_uint8(array: Array) -> npt.NDArray[np.uint8]:
    """Return a uint8 array, read-only; ValueError if it is none."""
    return _unpack(array, "uint8").view(np.uint8)


def _unpack(array: Array, dtype: str) -> npt.NDArray[np.generic]:
    if array.dtype != dtype or len(array.data) != math.prod(array.shape) * np.dtype(dtype).itemsize:
        raise ValueError(f"an array of {len(array.data)} bytes is no {dtype} {array.shape}")
    return np.frombuffer(array.data, dtype).reshape(array.shape)


def pack_observation(observation: SimObservation) -> Outcome:
    """Return an observation as a row's outcome; ValueError if its state is not finite, which would fail all rows."""
    if not np.isfinite(observation.state).all():
        raise ValueError("the simulator's state holds NaN or infinities: its physics became unstable")
    return Outcome(state=pack(observation.state), images=tuple(pack(image) for image in observation.images))


def pack_result(result: StepResult) -> Outcome:
    """Return a step's result as a row's outcome; errors as `pack_observation`, also for rewards."""
    seen = pack_observation(result.observation)
    if not np.isfinite(result.rewards).all():
        raise ValueError("the simulator paid a reward that is NaN or infinite")
    return msgspec.structs.replace(
        seen,
        rewards=pack(result.rewards),
        success=result.success,
        done=result.done,
        terminated=result.terminated,
        frames=tuple(pack(frame) for frame in result.frames),
    )


def unpack_observation(outcome: Outcome) -> SimObservation:
    """Return the observation of a row's outcome; ValueError if it has none."""
    if outcome.state is None:
        raise ValueError("a row's outcome has no observation")
    return SimObservation(unpack_float32(outcome.state), tuple(unpack_uint8(image) for image in outcome.images))


def unpack_result(outcome: Outcome) -> StepResult:
    """Return the step's result of a row's outcome; ValueError if it has none."""
    if outcome.rewards is None:
        raise ValueError("a step's outcome has no rewards")
    return StepResult(
        observation=unpack_observation(outcome),
        rewards=unpack_float32(outcome.rewards),
        success=outcome.success,
        done=outcome.done,
        terminated=outcome.terminated,
        frames=tuple(unpack_uint8(frame) for frame in outcome.frames),
    )
