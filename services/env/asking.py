"""Ask the policy of a task for actions, through the master.

In: rows of states, pictures, texts and seeds. Out: chunks of actions. Never: a version or a tenant named by the asker:
the master takes them from the task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from joynexus.wire import ErrorCode, JoyNexusError, Packet, failure, limits
from joynexus.wire.arrays import ArrayPacker, Buffer, rebuild
from joynexus.wire.back import WorkerAct
from joynexus.wire.errors import RETRYABLE
from joynexus.wire.front import Act, Actions

_ANSWER_S = 30.0
_PATIENCE_S = 300.0  # an inference service may be restarting, or load a backbone
_PAUSE_S = 0.25


class Request(Protocol):
    """`WorkerRuntime.request`."""

    def __call__(self, message: WorkerAct, buffers: Sequence[Buffer] = (), *, timeout_s: float = 30.0) -> Packet:
        """Ask the master and wait for its answer."""


class Asker:
    """Asks for one task.

    Args:
        request: `WorkerRuntime.request`.
        alive: called before each attempt, to say that this worker lives; raises if the task is not wanted any more.
        task, attempt: the piece of work.
        policy: its policy's name.
    """

    def __init__(self, request: Request, alive: Callable[[], None], task: str, attempt: int, policy: str) -> None:
        self._request, self._alive = request, alive
        self._task, self._attempt, self._policy = task, attempt, policy

    def __call__(
        self,
        states: npt.NDArray[np.float32],
        images: Sequence[npt.NDArray[np.uint8]],
        instructions: Sequence[str],
        seeds: Sequence[int],
    ) -> npt.NDArray[np.float32]:
        """Ask for R rows, in one message if they fit.

        Args:
            states: [R, S] float32, raw units.
            images: one [R, H, W, 3] uint8 array a camera, in the contract's order.
            instructions: R task texts.
            seeds: R seeds, for policies that draw; the same seed draws the same.

        Returns:
            [R, chunk, A] float32, raw units.

        Raises:
            JoyNexusError: what the master answered, once asking again did not help for some minutes.
        """
        row_bytes = max((image[0].nbytes for image in images if len(image)), default=1)
        rows = max(1, min(limits.MAX_ACT_ROWS, limits.MAX_CONTROL_FRAME_BYTES // row_bytes))
        parts = [slice(start, start + rows) for start in range(0, len(states), rows)]
        answers = [
            self._ask(states[part], [image[part] for image in images], instructions[part], seeds[part])
            for part in parts
        ]
        return np.concatenate(answers)

    def _ask(
        self,
        states: npt.NDArray[np.float32],
        images: Sequence[npt.NDArray[np.uint8]],
        instructions: Sequence[str],
        seeds: Sequence[int],
    ) -> npt.NDArray[np.float32]:
        """Ask for rows that fit into one message."""
        packer = ArrayPacker()
        act = Act(
            policy=self._policy,
            state=packer.add(states),
            images=tuple(packer.add(image) for image in images),
            instructions=tuple(instructions),
            seeds=tuple(seeds),
        )
        message = WorkerAct(task=self._task, attempt=self._attempt, act=msgspec.msgpack.encode(act))
        until = time.monotonic() + _PATIENCE_S
        while True:
            self._alive()
            try:
                answer = self._request(message, packer.buffers, timeout_s=_ANSWER_S)
                break
            except JoyNexusError as error:
                if error.code not in {*RETRYABLE, ErrorCode.DEADLINE} or time.monotonic() > until:
                    raise
                time.sleep(max(_PAUSE_S, min(error.failure.retry_after_ms / 1000, 5.0)))
        if not isinstance(answer.message, Actions):
            raise JoyNexusError(failure(ErrorCode.INTERNAL, "the master answered a request to act with something else"))
        actions = rebuild(answer.message.actions, answer.buffers)
        if actions.dtype != np.float32 or actions.ndim != 3 or len(actions) != len(states):
            raise JoyNexusError(failure(ErrorCode.INTERNAL, f"{len(states)} rows got actions of {actions.shape}"))
        return actions.astype(np.float32, copy=False)
