"""Requests to act as they travel: many in one group to a worker, each with its own part of the answer back.

In: requests that were chosen, a worker's answer. Out: a `PredictGroup` with its buffers, `Actions` with theirs. Never:
a choice of what goes together, or a decoded array.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from joynexus.wire import Array, Buffer, ErrorCode, Message, failure
from joynexus.wire.back import Predicted, PredictGroup, PredictItem
from joynexus.wire.front import Actions
from services.master.batching import Request
from services.master.device_time import DeviceTime
from services.master.events import Peer
from services.master.policy import Policy
from services.master.worker import Worker


class ActRequest(Request, kw_only=True, eq=False):
    """A request to act, on its way; `held` are its bytes in memory, `kills` the workers that died over it alone."""

    peer: Peer
    re: str
    policy: Policy
    version: int
    digest: str
    scope: str
    trace: str
    job: str
    body: bytes
    buffers: tuple[Buffer, ...]
    held: int
    deadline: float
    kills: int = 0
    done: bool = False


class InferenceWorker(msgspec.Struct, eq=False):
    """An inference worker.

    Attributes:
        groups: what it has, by task, in order.
        since: since when it has been free, or at its first group.
    """

    worker: Worker
    groups: dict[str, list[ActRequest]]
    since: float

    @property
    def suspects(self) -> bool:
        """What it has may kill it, so it gets nothing beside it."""
        return any(group[0].alone for group in self.groups.values())

    def free_at(self, device: DeviceTime) -> float | None:
        """Return when it will have done its first group; None if nobody knows."""
        seconds = device.of(rows_of(next(iter(self.groups.values()))))
        return None if seconds is None else self.since + seconds


def rows_of(group: Sequence[ActRequest]) -> int:
    """Return the rows of a group."""
    return sum(request.rows for request in group)


def group_of(task: str, group: Sequence[ActRequest]) -> tuple[PredictGroup, list[Buffer]]:
    """Return the message that asks for a group, and its buffers."""
    items: list[PredictItem] = []
    buffers: list[Buffer] = []
    for index, request in enumerate(group):
        items.append(
            PredictItem(
                request=str(index),
                tenant=request.tenant,
                policy=request.policy.name,
                version=request.version,
                digest=request.digest,
                act=request.body,
                first_buffer=len(buffers),
                buffers=len(request.buffers),
                feature_scope=request.scope,
                trace=request.trace,
            )
        )
        buffers += request.buffers
    return PredictGroup(task=task, attempt=1, items=tuple(items)), buffers


def reply_to(item: Predicted, buffers: tuple[Buffer, ...]) -> tuple[Message, tuple[Buffer, ...]]:
    """Turn a worker's answer into the asker's, with the buffers that are its own."""
    if item.error is not None:
        return item.error, ()
    drawn = item.exploration
    arrays = [item.actions, *((drawn.sample, drawn.log_prob, drawn.value) if drawn is not None else ())]
    mine: list[Buffer] = []
    moved: list[Array] = []
    for array in arrays:
        if array is None or not 0 <= array.frame < len(buffers):
            return failure(ErrorCode.INTERNAL, "the inference worker answered without actions: see its log"), ()
        moved.append(msgspec.structs.replace(array, frame=len(mine)))
        mine.append(buffers[array.frame])
    if drawn is not None:
        drawn = msgspec.structs.replace(drawn, sample=moved[1], log_prob=moved[2], value=moved[3])
    return Actions(version=item.version, actions=moved[0], exploration=drawn), tuple(mine)
