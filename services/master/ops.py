"""One op and the states it goes through.

    received → journaled → dispatched → applied → replied
                                               ↘ failed

In: what happened to the op. Out: its state, or `InvalidTransition` with its story. Never: a state that was not in the
table. `docs/architecture.md` draws the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from common.journal.records import OpDone, OpRecord, Record
from joynexus.wire import Failure
from joynexus.wire.back import RlEpoch
from services.master.events import Peer


class OpState(StrEnum):
    """Where an op is."""

    RECEIVED = "received"
    """Its records are on their way to the disk; nobody was told anything."""
    JOURNALED = "journaled"
    """It is durable and was acknowledged; it waits for a trainer."""
    DISPATCHED = "dispatched"
    """A trainer has it."""
    APPLIED = "applied"
    """Its outcome is known and on its way to the disk."""
    REPLIED = "replied"
    """It was applied; the result is durable and was sent to whoever waited."""
    FAILED = "failed"
    """It was refused, vetoed or set aside and changed nothing; that is durable and was told."""


TRANSITIONS: dict[OpState, frozenset[OpState]] = {
    OpState.RECEIVED: frozenset({OpState.JOURNALED}),
    OpState.JOURNALED: frozenset({OpState.DISPATCHED, OpState.APPLIED}),
    OpState.DISPATCHED: frozenset({OpState.APPLIED, OpState.JOURNALED}),
    OpState.APPLIED: frozenset({OpState.REPLIED, OpState.FAILED}),
    OpState.REPLIED: frozenset(),
    OpState.FAILED: frozenset(),
}
"""From each state to where. An op whose journal write failed was never there; a lost trainer takes a dispatched op back
to `journaled`; an op that is set aside, or whose slot cannot be opened, is `applied` (as a failure) without one."""

_STORY_LENGTH = 12
_WAITERS = 8


class InvalidTransition(AssertionError):  # noqa: N818 - named as in the design
    """The core has a bug; the message tells the op's story."""


class Op:
    """An op in the master's memory.

    Attributes:
        record: its journal row, without the payload.
        payload: its inline samples while they are at hand; else they are read back from the journal.
        done: its outcome, once known.
        unsaved: the records of its outcome, until they are durable.
        waiters: connections and request ids that want the result.
        alone: a trainer died while it was to be done next, so the next one gets nothing beside it.
        kills: trainers that died over it alone.
        given_up: its job has ended: it fails with this, instead of being sent (again).
        since: when it was accepted; None if that was before the master started.
    """

    __slots__ = (
        "_story",
        "alone",
        "done",
        "given_up",
        "kills",
        "payload",
        "record",
        "since",
        "state",
        "unsaved",
        "waiters",
    )

    def __init__(self, record: OpRecord, payload: bytes = b"", state: OpState = OpState.RECEIVED) -> None:
        self.since: float | None = None
        self.record = record
        self.payload = payload
        self.state = state
        self.done: OpDone | None = None
        self.unsaved: Sequence[Record] = ()
        self.waiters: list[tuple[Peer, str]] = []
        self.alone = False
        self.kills = 0
        self.given_up: Failure | None = None
        self._story: tuple[tuple[OpState, OpState, str], ...] = ()

    @property
    def blobs(self) -> tuple[tuple[str, int], ...]:
        """Digests and sizes of the blobs that doing it needs."""
        return ((self.record.blob, self.record.blob_nbytes), *self.record.rollouts)

    @property
    def nbytes(self) -> int:
        """Bytes that a replay of this op has to move; those of an update count with its last epoch."""
        rl, rollouts = self.record.rl, 0
        if isinstance(rl, RlEpoch) and rl.epoch == rl.algorithm.epochs - 1:
            rollouts = sum(nbytes for _, nbytes in self.record.rollouts)
        return self.record.payload_nbytes or self.record.blob_nbytes or rollouts

    @property
    def told(self) -> bool:
        """Its outcome is durable."""
        return self.state in (OpState.REPLIED, OpState.FAILED)

    def move(self, to: OpState, why: str) -> None:
        """Go to another state.

        Raises:
            InvalidTransition: if the table has no such step.
        """
        if to not in TRANSITIONS[self.state]:
            raise InvalidTransition(
                f"op {self.record.seq} of '{self.record.policy}' cannot go from {self.state} to {to} ({why}); "
                f"its story: {', '.join(f'{a}→{b}: {why}' for a, b, why in self._story) or 'none'}"
            )
        self._story = (*self._story[-_STORY_LENGTH:], (self.state, to, why))
        self.state = to

    def attach(self, peer: Peer, request: str) -> None:
        """Remember one more who waits; a connection that asks again with the same id waits once."""
        waiter = (peer, request)
        if waiter not in self.waiters:
            self.waiters = [*self.waiters[-_WAITERS:], waiter]
