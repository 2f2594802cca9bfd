"""A policy's place in the Training queue: what its trainer has of it, and when it needs a checkpoint.

In: ops that are sent, answers, lost trainers. Out: the next op to send, and whether a checkpoint is due behind it.
Never: I/O, or knowledge of other policies.
"""

from __future__ import annotations

from common.journal.records import OpRecord
from joynexus.wire.back import TrainKind
from services.master.config import CoreConfig
from services.master.ops import Op, OpState
from services.master.placement import Smoothed
from services.master.policy import Policy
from services.master.worker import Worker

_FIRST_COST_S = 0.05
_NEW_COST_WEIGHT = 0.2
_FIRST_SLOT_BYTES = 16 * 1024 * 1024
_OPTIMIZER_KINDS = frozenset({"optim_step", "train_step", "rl_epoch"})
_CLEAN_KINDS = frozenset({"load_state", "load_weights", "rl_begin"})
"""Behind these no gradients wait."""


class Trainee:
    """One policy, as the trainers see it.

    Attributes:
        home: its trainer, if it has one.
        stay: counts its homes: what waits under an earlier number is void.
        opening: counts how often its slot was opened: answers from before the newest opening do not count.
        open: the slot was opened in this opening.
        sent: last op that was sent in this opening.
        queued: it waits in its home trainer's lanes, or there for a slot.
        in_flight: items that its trainer has not answered.
        checkpoint_sent: op behind which the newest checkpoint item was sent.
        checkpoint_wanted: a checkpoint is wanted behind the last op, whatever the cadence.
        vacating: it is to leave its slot at the next optimizer boundary, as soon as a checkpoint covers it.
        target: the trainer that it moves to.
        moved_s: when it last began to move.
        checkpoint_fails: its trainer could not write the newest one.
        faults: times in a row that its slot could not be opened.
        paused: it is not to be sent until a timer lets it.
        held: no op is to be sent until whoever drives it says so.
        slot_nbytes: what it takes in memory, roughly until a trainer has said it.
        demand: share of time in which it has unfinished work.
    """

    def __init__(self, policy: Policy, config: CoreConfig, now: float) -> None:
        self.policy = policy
        self.home: Worker | None = None
        self.stay = 0
        self.opening = 0
        self.open = False
        self.sent = policy.covered
        self.queued = False
        self.in_flight = 0
        self.checkpoint_sent = policy.covered
        self.checkpoint_wanted = False
        self.vacating = False
        self.target: Worker | None = None
        self.moved_s = float("-inf")
        self.faults = 0
        self.paused = False
        self.held = False
        self.slot_nbytes = policy.checkpoint.nbytes if policy.checkpoint else _FIRST_SLOT_BYTES
        self.demand = Smoothed(now)
        self._costs: dict[TrainKind, float] = {}
        self._config = config
        self._steps = 0
        self._nbytes = 0
        self._gradients = self._boundary = 0  # the last op sent that left gradients, and the last that left none
        self.checkpoint_fails = False

    def reopen(self) -> None:
        """What the trainer has of it does not count any more; it starts again from the checkpoint."""
        self.opening += 1
        self.open = False
        self.in_flight = 0
        self.sent = self.checkpoint_sent = self.policy.covered
        self._steps = self._nbytes = 0
        self._gradients = self._boundary = 0
        self.checkpoint_fails = False
        for op in self.unanswered():
            op.move(OpState.JOURNALED, "its trainer has lost it")

    def unanswered(self) -> list[Op]:
        """Return the ops that are with a trainer, in order."""
        ops = self.policy.ops
        candidates = range(self.policy.applied + 1, self.policy.journaled + 1)
        return [ops[seq] for seq in candidates if ops[seq].state is OpState.DISPATCHED]

    @property
    def unfinished(self) -> bool:
        """Somebody waits for it."""
        return self.policy.applied < self.policy.journaled and not self.held

    @property
    def has_work(self) -> bool:
        """There is something to send now, and a reason to: ops with known results alone are not replayed."""
        if self.paused:
            return False
        if self.next_op() is not None:
            return self.policy.applied < self.policy.journaled or self.checkpoint_wanted
        return self.open and self.checkpoint_due()

    @property
    def gradients_wait(self) -> bool:
        """What was sent ends between two optimizer steps, where no checkpoint can be taken."""
        return self._gradients > self._boundary

    @property
    def cornered(self) -> bool:
        """It cannot be checkpointed as it is."""
        return self.gradients_wait or self.checkpoint_fails

    @property
    def covered(self) -> bool:
        """The checkpoint has everything that its trainer has."""
        return not self.open or self.policy.covered >= self.sent

    @property
    def vacated(self) -> bool:
        """It was to leave its slot, and may now."""
        return self.vacating and self.in_flight == 0 and self.covered

    def next_op(self) -> Op | None:
        """Return the next op to send; None if there is none, or not now."""
        if self.held or self.sent >= self.policy.journaled or (self.vacating and not self.gradients_wait):
            return None
        op = self.policy.ops[self.sent + 1]
        given_up = op.given_up is not None and op.done is None
        return None if given_up or self.waits_for_state(op.record) else op

    def waits_for_state(self, record: OpRecord) -> bool:
        """Tell whether the state that an op loads is still to be saved by an op before it."""
        if record.kind != "load_state" or record.blob:
            return False
        source = self.policy.ops.get(record.state_seq)
        return source is not None and source.done is None

    def estimate_s(self, op: Op | None) -> float:
        """Return what an op (or a checkpoint) takes, roughly."""
        return self._costs.get(_kind(op), _FIRST_COST_S)

    def sending(self, op: Op) -> None:
        """The next op is being sent."""
        record = op.record
        self.sent = record.seq
        self.in_flight += 1
        self._nbytes += op.nbytes
        if op.state is OpState.JOURNALED:
            op.move(OpState.DISPATCHED, f"opening {self.opening}")
        if op.done is not None and op.done.skipped:
            return
        if record.kind == "forward_backward":
            self._gradients = record.seq
        elif record.kind in _OPTIMIZER_KINDS:
            self._boundary = record.seq
            self._steps += 1

    def checkpoint_due(self) -> bool:
        """Tell whether a checkpoint belongs behind the op that was sent last."""
        newest = max(self.checkpoint_sent, self.policy.covered)
        if self.gradients_wait or self.sent <= newest:
            return False
        every = self.policy.checkpoint_every or self._config.checkpoint_steps
        if self.vacating or self._steps >= every or self._nbytes >= self._config.checkpoint_bytes:
            return True
        return self.sent - newest >= self._config.checkpoint_ops or (
            self.checkpoint_wanted and self.sent == self.policy.journaled
        )

    def sending_checkpoint(self) -> None:
        """A checkpoint is being sent."""
        self.in_flight += 1
        self.checkpoint_sent = self.sent
        self._steps = self._nbytes = 0

    def answered(self, op: Op | None, busy_s: float, *, well: bool) -> None:
        """One of its items was answered, well or with an error."""
        self.in_flight -= 1
        cost = self._costs.get(_kind(op), _FIRST_COST_S)
        self._costs[_kind(op)] = cost + _NEW_COST_WEIGHT * (busy_s - cost)
        if op is None:
            self.checkpoint_fails = not well
            return
        op.alone = False
        if well and op.record.kind in _CLEAN_KINDS:  # one that failed left the gradients where they were
            self._boundary = max(self._boundary, op.record.seq)

    def covered_further(self) -> None:
        """A newer checkpoint is durable."""
        if self.policy.covered >= self.policy.journaled:
            self.checkpoint_wanted = False

    @property
    def behind(self) -> bool:
        """Its slot is behind the checkpoint, and must be opened again from there."""
        return self.sent < self.policy.covered

    def checkpoint_failed(self) -> None:
        """The trainer could not write the checkpoint: the one before it stands, and another one is due later."""
        self.checkpoint_sent = self.policy.covered


def _kind(op: Op | None) -> TrainKind:
    return "checkpoint" if op is None else op.record.kind
