"""A policy's place in the Training queue: what its trainer has of it, and when it needs a checkpoint.

In: ops that are sent, answers, lost trainers. Out: the next op to send, and whether a checkpoint is due behind it.
Never: I/O, or knowledge of other policies.
"""

from __future__ import annotations

from common.journal.records import OpRecord
from services.master.config import CoreConfig
from services.master.ops import Op, OpState
from services.master.policies import Policy
from services.master.roster import Worker

_FIRST_COST_S = 0.05
_NEW_COST_WEIGHT = 0.2
_OPTIMIZER_KINDS = frozenset({"optim_step", "train_step"})


class Trainee:
    """One policy, as the trainers see it.

    Attributes:
        home: its trainer, if it has one.
        opening: counts how often its slot was opened: answers from before the newest opening do not count.
        open: the slot was opened in this opening.
        sent: last op that was sent in this opening.
        queued: it waits in its home trainer's lanes.
        in_flight: items that its trainer has not answered.
        checkpoint_sent: op behind which the newest checkpoint item was sent.
        checkpoint_wanted: a checkpoint is wanted behind the last op, whatever the cadence.
        faults: times in a row that its slot could not be opened.
        paused: it is not to be sent until a timer lets it.
        cost_s: what one of its ops takes, roughly.
    """

    def __init__(self, policy: Policy, config: CoreConfig) -> None:
        self.policy = policy
        self.home: Worker | None = None
        self.opening = 0
        self.open = False
        self.sent = policy.covered
        self.queued = False
        self.in_flight = 0
        self.checkpoint_sent = policy.covered
        self.checkpoint_wanted = False
        self.faults = 0
        self.paused = False
        self.cost_s = _FIRST_COST_S
        self._config = config
        self._steps = 0
        self._nbytes = 0
        self._gradients_wait = False

    def reopen(self) -> None:
        """What the trainer has of it does not count any more; it starts again from the checkpoint."""
        self.opening += 1
        self.open = False
        self.in_flight = 0
        self.sent = self.checkpoint_sent = self.policy.covered
        self._steps = self._nbytes = 0
        self._gradients_wait = False
        for op in self.unanswered():
            op.move(OpState.JOURNALED, "its trainer has lost it")

    def unanswered(self) -> list[Op]:
        """Return the ops that are with a trainer, in order."""
        ops = self.policy.ops
        candidates = range(self.policy.applied + 1, self.policy.journaled + 1)
        return [ops[seq] for seq in candidates if ops[seq].state is OpState.DISPATCHED]

    @property
    def has_work(self) -> bool:
        """There is something to send now, and a reason to: ops with known results alone are not replayed."""
        if self.paused:
            return False
        if self.sent < self.policy.journaled:
            wanted = self.policy.applied < self.policy.journaled or self.checkpoint_wanted
            return wanted and self.next_op() is not None
        return self.open and self.checkpoint_due()

    @property
    def idle(self) -> bool:
        """Its trainer has nothing of it to do."""
        return self.in_flight == 0 and self.sent == self.policy.journaled

    @property
    def covered(self) -> bool:
        """The checkpoint has everything."""
        return self.policy.covered == self.policy.journaled

    def next_op(self) -> Op | None:
        """Return the next op to send; None if there is none, or its state is not there yet."""
        if self.sent >= self.policy.journaled:
            return None
        op = self.policy.ops[self.sent + 1]
        return None if self.waits_for_state(op.record) else op

    def waits_for_state(self, record: OpRecord) -> bool:
        """Tell whether the state that an op loads is still to be saved by an op before it."""
        if record.kind != "load_state" or record.blob:
            return False
        source = self.policy.ops.get(record.state_seq)
        return source is not None and source.done is None

    def sending(self, op: Op) -> None:
        """The next op is being sent."""
        record = op.record
        self.sent = record.seq
        self.in_flight += 1
        self._nbytes += op.nbytes
        if record.kind == "forward_backward":
            self._gradients_wait = True
        elif record.kind in _OPTIMIZER_KINDS or record.kind == "load_state":
            self._gradients_wait = False
            self._steps += record.kind in _OPTIMIZER_KINDS
        if op.state is OpState.JOURNALED:
            op.move(OpState.DISPATCHED, f"opening {self.opening}")

    def checkpoint_due(self) -> bool:
        """Tell whether a checkpoint belongs behind the op that was sent last."""
        if self._gradients_wait or self.sent <= max(self.checkpoint_sent, self.policy.covered):
            return False
        every = self.policy.checkpoint_every or self._config.checkpoint_steps
        if self._steps >= every or self._nbytes >= self._config.checkpoint_bytes:
            return True
        return self.checkpoint_wanted and self.sent == self.policy.journaled

    def sending_checkpoint(self) -> None:
        """A checkpoint is being sent."""
        self.in_flight += 1
        self.checkpoint_sent = self.sent
        self._steps = self._nbytes = 0

    def answered(self, busy_s: float) -> None:
        """One of its items was answered."""
        self.in_flight -= 1
        self.cost_s += _NEW_COST_WEIGHT * (busy_s - self.cost_s)

    def covered_further(self) -> None:
        """A newer checkpoint is durable; a slot that is behind it is opened again from there."""
        if self.sent < self.policy.covered:
            self.reopen()
        if self.policy.covered >= self.policy.journaled:
            self.checkpoint_wanted = False

    def checkpoint_failed(self) -> None:
        """The trainer could not write the checkpoint: the one before it stands, and another one is due later."""
        self.checkpoint_sent = self.policy.covered
