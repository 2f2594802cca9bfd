"""Putting a training group together: ops of several policies, the slots they need, their samples as buffers.

In: ops in the order in which they are to be done. Out: one `TrainGroup` with its buffers, within the wire's limits.
Never: a choice of what goes in (`training.py` makes it).
"""

from __future__ import annotations

from collections.abc import Callable

from joynexus.wire import Buffer, limits, split
from joynexus.wire.back import OpenSlot, TrainGroup, TrainItem
from joynexus.wire.front import DatasetSamples
from services.master.config import CoreConfig
from services.master.ops import Op
from services.master.policy import Policy, PolicyKey

_BODY_BYTES = limits.MAX_BODY_BYTES // 2
_ITEM_BYTES = 512
_INDEX_BYTES = 9
_DIGEST_BYTES = 66


class GroupBuilder:
    """Collects items until the group is full.

    Args:
        payload: gives the inline samples of an op.

    Attributes:
        estimate_s: what all that is in it takes, roughly; whoever adds something adds to it.
    """

    def __init__(self, config: CoreConfig, payload: Callable[[Op], bytes]) -> None:
        self._config = config
        self._payload = payload
        self._slots: list[OpenSlot] = []
        self._items: list[TrainItem] = []
        self._buffers: list[Buffer] = []
        self._close: list[tuple[str, str]] = []
        self._body_bytes = 0
        self._buffer_bytes = 0
        self.estimate_s = 0.0

    @property
    def empty(self) -> bool:
        """Nothing is in it yet."""
        return not self._items

    @property
    def full(self) -> bool:
        """It has as many ops as a group may have, or takes as long as one may."""
        return len(self._items) >= self._config.group_ops or self.estimate_s >= self._config.group_s

    def fits(self, policy: Policy, op: Op, estimate_s: float) -> bool:
        """Tell whether there is room for an op that takes so long (there always is in an empty group)."""
        return self.empty or (
            self.estimate_s + estimate_s <= self._config.group_s
            and self._body_bytes + policy.spec_nbytes + _body_bytes(op) <= _BODY_BYTES
            and self._buffer_bytes + op.record.payload_nbytes <= self._config.group_bytes
            and len(self._buffers) + limits.MAX_BUFFERS // self._config.group_ops <= limits.MAX_BUFFERS
        )

    def open_slot(self, policy: Policy) -> None:
        """Have the trainer bring a policy into memory first."""
        self._slots.append(
            OpenSlot(
                tenant=policy.tenant,
                policy=policy.name,
                spec=policy.spec,
                checkpoint=policy.checkpoint.digest if policy.checkpoint else "",
                applied_seq=policy.covered,
                life=policy.life,
            )
        )
        self._body_bytes += policy.spec_nbytes

    def close_slot(self, key: PolicyKey) -> None:
        """Have the trainer drop a policy from memory first."""
        self._close.append(key)

    def add_op(self, policy: Policy, op: Op) -> None:
        """Add an op.

        Raises:
            KeyError: if its samples are not in the journal any more.
        """
        record = op.record
        skip = op.done is not None and op.done.skipped
        loads = record.kind == "load_state"
        samples, first = b"", len(self._buffers)
        if record.payload_nbytes and not skip:
            body, *buffers = split(self._payload(op))
            samples = bytes(body)
            self._buffers += buffers
            self._buffer_bytes += record.payload_nbytes
        self._items.append(
            TrainItem(
                tenant=policy.tenant,
                policy=policy.name,
                seq=record.seq,
                kind=record.kind,
                samples=samples,
                first_buffer=first if samples else 0,
                buffers=len(self._buffers) - first,
                payload="" if loads else record.blob,
                dataset=DatasetSamples(dataset=record.manifest, indices=record.indices) if record.manifest else None,
                feature_scope=record.feature_scope,
                rl=record.rl,
                version=record.version,
                state=record.blob if loads else "",
                replay=op.done is not None,
                skip=skip,
                trace=record.trace or record.job,
            )
        )
        self._body_bytes += _body_bytes(op)

    def add_checkpoint(self, policy: Policy, seq: int) -> None:
        """Add a checkpoint behind op `seq`."""
        self._items.append(TrainItem(tenant=policy.tenant, policy=policy.name, seq=seq, kind="checkpoint"))
        self._body_bytes += _ITEM_BYTES

    def build(self, task: str) -> tuple[TrainGroup, list[Buffer]]:
        """Return the message and its buffers."""
        group = TrainGroup(
            task=task, attempt=1, slots=tuple(self._slots), items=tuple(self._items), close=tuple(self._close)
        )
        return group, self._buffers


def _body_bytes(op: Op) -> int:
    record = op.record
    references = _INDEX_BYTES * len(record.indices) + _DIGEST_BYTES * len(record.rollouts)
    return _ITEM_BYTES + record.body_nbytes + references
