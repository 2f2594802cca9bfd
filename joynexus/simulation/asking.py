"""Ask the policy of a task for actions, through the master.

In: rows of states, pictures, texts and seeds. Out: chunks of actions, and what training needs to know of them. Never: a
version or a tenant named by the asker: the master takes them from the task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from joynexus.wire import ErrorCode, JoyNexusError, Packet, failure, limits
from joynexus.wire.arrays import Array, ArrayPacker, Buffer, rebuild
from joynexus.wire.errors import RETRYABLE
from joynexus.wire.front import Act, Actions

_ANSWER_S = 30.0
_PATIENCE_S = 300.0  # an inference service may be restarting, or load a backbone
_PAUSE_S = 0.25

Floats = npt.NDArray[np.float32]


class Explored(NamedTuple):
    """What training needs to know of actions that were drawn; see `joynexus.wire.front.Exploration`."""

    sample: Floats
    log_prob: Floats
    value: Floats


class Answer(NamedTuple):
    """What the policy does in R rows.

    Attributes:
        version: that acts.
        actions: [R, chunk, A], raw units.
        explored: how they were drawn, if that was asked for.
    """

    version: int
    actions: Floats
    explored: Explored | None = None


class Request(Protocol):
    """Sends an encoded `Act` to the master under the task that it is for, and waits for the answer."""

    def __call__(self, act: bytes, buffers: Sequence[Buffer], *, timeout_s: float) -> Packet:
        """Ask; raises JoyNexusError."""


class Asker:
    """Asks for one task.

    Args:
        request: to the master.
        alive: called before each attempt, to say that this worker lives; raises if the task is not wanted any more.
        policy: name of the task's policy.
        explore: draw the actions as the policy's RL job says, and tell how.
    """

    def __init__(self, request: Request, alive: Callable[[], None], policy: str, *, explore: bool = False) -> None:
        self._request, self._alive = request, alive
        self._policy, self._explore = policy, explore

    def __call__(
        self,
        states: npt.NDArray[np.float32],
        images: Sequence[npt.NDArray[np.uint8]],
        instructions: Sequence[str],
        seeds: Sequence[int],
    ) -> Answer:
        """Ask for R rows, in one message if they fit.

        Args:
            states: [R, S] float32, raw units.
            images: one [R, H, W, 3] uint8 array a camera, in the contract's order.
            instructions: R task texts.
            seeds: R seeds, for policies that draw; the same seed draws the same.

        Raises:
            JoyNexusError: what the master answered, once asking again did not help for some minutes; or that versions
                changed between two messages.
        """
        row_bytes = max((image[0].nbytes for image in images if len(image)), default=1)
        rows = max(1, min(limits.MAX_ACT_ROWS, limits.MAX_CONTROL_FRAME_BYTES // row_bytes))
        parts = [slice(start, start + rows) for start in range(0, len(states), rows)]
        answers = [
            self._ask(states[part], [image[part] for image in images], instructions[part], seeds[part])
            for part in parts
        ]
        return answers[0] if len(answers) == 1 else _join(answers)

    def _ask(
        self,
        states: npt.NDArray[np.float32],
        images: Sequence[npt.NDArray[np.uint8]],
        instructions: Sequence[str],
        seeds: Sequence[int],
    ) -> Answer:
        """Ask for rows that fit into one message."""
        packer = ArrayPacker()
        act = msgspec.msgpack.encode(
            Act(
                policy=self._policy,
                state=packer.add(states),
                images=tuple(packer.add(image) for image in images),
                instructions=tuple(instructions),
                seeds=tuple(seeds),
                explore=self._explore,
            )
        )
        until = time.monotonic() + _PATIENCE_S
        while True:
            self._alive()
            try:
                answer = self._request(act, packer.buffers, timeout_s=_ANSWER_S)
                break
            except JoyNexusError as error:
                if error.code not in {*RETRYABLE, ErrorCode.DEADLINE}:
                    raise
                if time.monotonic() > until:  # without the hint: what did not pass for so long may never do
                    raise JoyNexusError(msgspec.structs.replace(error.failure, retry_after_ms=0)) from error
                time.sleep(max(_PAUSE_S, min(error.failure.retry_after_ms / 1000, 5.0)))
        return self._read(answer, len(states))

    def _read(self, answer: Packet, rows: int) -> Answer:
        if not isinstance(answer.message, Actions):
            raise _broken("the master answered a request to act with something else")
        message = answer.message
        actions = _floats(message.actions, answer.buffers, rows, 3)
        if not self._explore:
            return Answer(message.version, actions)
        told = message.exploration
        if told is None:
            raise _broken("the master answered a request to explore without telling how actions were drawn")
        sample = _floats(told.sample, answer.buffers, rows)
        log_prob = _floats(told.log_prob, answer.buffers, rows, 3)
        value = _floats(told.value, answer.buffers, rows, 2)
        if log_prob.shape != actions.shape:
            raise _broken(f"actions of {actions.shape} got log-probabilities of {log_prob.shape}")
        return Answer(message.version, actions, Explored(sample, log_prob, value))


def _floats(array: Array, buffers: Sequence[Buffer], rows: int, dimensions: int = 0) -> Floats:
    values: npt.NDArray[Any] = rebuild(array, buffers)
    if values.dtype != np.float32 or values.shape[:1] != (rows,) or (dimensions and values.ndim != dimensions):
        raise _broken(f"{rows} rows got numbers of {values.shape} ({values.dtype})")
    return values.astype(np.float32, copy=False)


def _join(answers: Sequence[Answer]) -> Answer:
    if len({answer.version for answer in answers}) > 1:
        raise JoyNexusError(failure(ErrorCode.UNAVAILABLE, "the policy's version changed between two messages"))
    actions = np.concatenate([answer.actions for answer in answers])
    told = [answer.explored for answer in answers if answer.explored is not None]
    if not told:
        return Answer(answers[0].version, actions)
    return Answer(answers[0].version, actions, Explored(*map(np.concatenate, zip(*told, strict=True))))


def _broken(sentence: str) -> JoyNexusError:
    return JoyNexusError(failure(ErrorCode.INTERNAL, sentence))
