"""Ops of tests with samples in the message, and kinds of answers."""

from __future__ import annotations

import msgspec
import numpy as np

from joynexus.wire import Array, Message
from joynexus.wire.front import ForwardBackward, Samples

SAMPLES = Samples(
    state=Array(dtype="<f4", shape=(1, 2), frame=0),
    action=Array(dtype="<f4", shape=(1, 1, 2), frame=1),
    action_mask=Array(dtype="|b1", shape=(1, 1), frame=2),
    images=(),
    instructions=("go",),
)
BUFFERS = (np.ones(2, np.float32).tobytes(), np.ones(2, np.float32).tobytes(), b"\x01")


def forward(lease: str, seq: int, *, text: str = "go") -> ForwardBackward:
    samples = msgspec.structs.replace(SAMPLES, instructions=(text,))
    return ForwardBackward(policy="p", lease=lease, seq=seq, samples=samples)


def kinds(messages: list[Message]) -> list[type]:
    return [type(message) for message in messages]
