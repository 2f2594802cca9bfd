"""The Training queue: ops to their policies' home trainers, in order; results and checkpoints back.

In: journaled ops, `TrainDone`, `SlotFailed`, trainers that come and go. Out: policies with a home and a place in its
lanes (`dispatch.py` makes groups of them); outcomes of ops, durable before anybody hears of them. Never: a policy in
two trainers, an outcome taken from a trainer that was declared dead, or a scan over policies or ops.

A lost trainer's policies start again from their checkpoints: the ops above are sent again in order, to the next
trainer; those whose result is known are marked `replay` and their results are only compared. An op that was the first
unanswered one when its trainer died is sent alone then, and only deaths over it alone count: that clears the innocent.
A trainer that leaves is asked for checkpoints first, so that nothing has to be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from joynexus.wire import ErrorCode, Failure, failure
from joynexus.wire.back import SlotFailed, TrainDone
from services.master.config import CoreConfig
from services.master.dispatch import Dispatch
from services.master.events import BackMessage
from services.master.homes import Homes
from services.master.lanes import Counters
from services.master.metering import Account, Meter, Use, bearer
from services.master.moves import Moves
from services.master.ops import Op, OpState
from services.master.outbox import Outbox, refuse
from services.master.outcomes import Outcomes
from services.master.policies import Policies
from services.master.policy import Policy, PolicyKey
from services.master.roster import Roster
from services.master.trainees import Trainee
from services.master.trainers import Item, Trainer, account_of
from services.master.worker import Worker

_SLOT_FAULTS = 10
_LONG_PAUSE_S = 60.0


class Training:
    """All policies that have ops, and all trainers.

    Args:
        payload: gives the inline samples of an op.
        counters: use by tenant.

    Attributes:
        moves: policies that change their home.
    """

    def __init__(
        self,
        outbox: Outbox,
        config: CoreConfig,
        roster: Roster,
        policies: Policies,
        outcomes: Outcomes,
        payload: Callable[[Op], bytes],
        counters: Counters,
        meter: Meter,
    ) -> None:
        self._outbox = outbox
        self._config = config
        self._roster = roster
        self._outcomes = outcomes
        self._counters = counters
        self._meter = meter
        self._dispatch = Dispatch(outbox, config, roster, outcomes, counters, payload, self._pause)
        self._trainees: dict[PolicyKey, Trainee] = {}
        self._trainers: dict[str, Trainer] = {}  # by worker name
        self._homes = Homes(outbox, self._trainers, self._queue)
        self.moves = Moves(outbox, config, policies, self._trainers, self._trainee, self._queue)
        roster.add_staff("trainer", self)

    # For other parts

    def ready(self, policy: Policy) -> None:
        """A policy may have something to send."""
        self._queue(self._trainee(policy))

    def want_checkpoint(self, policy: Policy) -> None:
        """Have everything that a policy has done so far covered by a checkpoint."""
        trainee = self._trainee(policy)
        trainee.checkpoint_wanted = True
        self._queue(trainee)

    def hold(self, policy: Policy) -> None:
        """Send nothing more of a policy, and let nothing count that its trainer has not answered."""
        trainee = self._trainee(policy)
        trainee.held = True
        if trainee.in_flight and trainee.home is not None:
            self._trainers[trainee.home.name].close(trainee)
        self._queue(trainee)

    def release(self, policy: Policy) -> None:
        """Go on with a policy that was held."""
        trainee = self._trainee(policy)
        trainee.held = False
        self._queue(trainee)

    def abandon(self, policy: Policy, job: str, error: Failure) -> None:
        """A job has ended: its ops that no trainer has fail, so that nobody trains on them."""
        for seq in range(policy.applied + 1, policy.next_seq):
            if policy.ops[seq].record.job == job:
                policy.ops[seq].given_up = error
        self.ready(policy)

    def forget(self, policy: Policy) -> None:
        """A policy is deleted: it leaves its trainer's memory.

        Raises:
            JoyNexusError: `UNAVAILABLE` while a trainer has something to do for it.
        """
        trainee = self._trainees.get(policy.key)
        if trainee is None:
            return
        if trainee.in_flight or trainee.target is not None:
            sentence = f"policy '{policy.name}' is being checkpointed or moved: try again soon"
            raise refuse(ErrorCode.UNAVAILABLE, sentence, retry_after_ms=500)
        if trainee.home is not None:
            self._trainers[trainee.home.name].unsettle(trainee, self._outbox.now)
        self._homes.forget(policy)
        del self._trainees[policy.key]

    def serves(self, backbone: str) -> bool:
        """Tell whether a trainer with this backbone is there."""
        return any(True for _ in self._homes.with_backbone(backbone))

    def backbones(self) -> list[str]:
        """Return the backbones that trainers have now, in order of name."""
        return sorted({trainer.backbone for trainer in self._trainers.values()})

    def known_heads(self, backbone: str) -> set[str]:
        """Return the action modules that the trainers with this backbone say they have."""
        return {head for trainer in self._homes.with_backbone(backbone) for head in trainer.worker.register.heads}

    def trainers(self) -> Iterable[Trainer]:
        """Return the trainers that are there (for views)."""
        return self._trainers.values()

    def nbytes(self, policy: Policy) -> int:
        """Return what a policy takes in its trainer's memory; 0 if it is in none (for views)."""
        trainee = self._trainees.get(policy.key)
        return trainee.slot_nbytes if trainee is not None and policy.resident else 0

    def running(self, policy: Policy) -> int:
        """Number of a policy's items that are with its trainer."""
        trainee = self._trainees.get(policy.key)
        return trainee.in_flight if trainee else 0

    # Messages

    def on_done(self, said: BackMessage, message: TrainDone) -> None:
        """An item is done."""
        trainer = self._trainer(said, message)
        key = (message.tenant, message.policy, message.seq, message.kind == "checkpoint")
        item = trainer.groups[message.task].pop(key, None)
        if item is not None:
            self._counters.charge(message.tenant, message.busy_s - item.estimate_s)
            trainer.account(item, message)
            use: Use = {
                "trainer_s": message.busy_s, "samples": message.samples, "backbone_forwards": message.backbone_forwards
            }  # fmt: skip
            self._meter.worked(trainer.worker, account_of(item, message), use)
            if item.opening == item.trainee.opening:
                item.trainee.answered(item.op, message.busy_s - message.page_s, well=message.result.error is None)
                item.trainee.faults = 0
                self._take_in(item, message)
        self._conclude(trainer, message.task, last=message.last)

    def on_slot_failed(self, said: BackMessage, message: SlotFailed) -> None:
        """A policy could not be brought into memory (or not be continued there)."""
        trainer = self._trainer(said, message)
        items = trainer.groups[message.task]
        key = (message.tenant, message.policy)
        failed = [items.pop(item) for item in list(items) if item[:2] == key]
        first = failed[0].op.record.job if failed and failed[0].op is not None else ""
        self._meter.worked(trainer.worker, bearer(Account(*key, first), message.error), {"trainer_s": message.busy_s})
        if failed and failed[0].opening == failed[0].trainee.opening:
            self._slot_failed(trainer, failed[0].trainee, message.error)
        self._conclude(trainer, message.task, last=message.last)

    def _trainer(self, said: BackMessage, message: TrainDone | SlotFailed) -> Trainer:
        """Return the trainer that answers for a group of its own; one key may serve several roles."""
        worker = self._roster.check(said, message.task, message.attempt)
        trainer = self._trainers.get(worker.name)
        if trainer is None or message.task not in trainer.groups:
            raise refuse(ErrorCode.INVALID, f"task '{message.task[:64]}' is no training")
        return trainer

    # Staff

    def joined(self, worker: Worker) -> None:
        """A trainer is there: whoever waits for one moves in, and others may come for the sake of loads."""
        trainer = Trainer(worker, self._counters, self._config, self._outbox.now)
        self._trainers[worker.name] = trainer
        self._homes.find(trainer.backbone)
        self.moves.balance()

    def leaving(self, worker: Worker) -> None:
        """A trainer finishes what it has, and checkpoints its policies, which then move."""
        trainer = self._trainers[worker.name]
        self.moves.closed(trainer, "is leaving")
        homed = list(trainer.homed.values())
        for trainee in homed:
            trainee.vacating = True
        self._queue(*homed)
        self._dispatch.pump(trainer)
        self._let_go(trainer)

    def lost(self, worker: Worker) -> None:
        """A trainer is dead: its policies start again elsewhere, from their checkpoints."""
        trainer = self._trainers.pop(worker.name)
        killers = trainer.suspects()
        for op in killers.values():
            op.alone = True
            op.kills += sum(map(len, trainer.groups.values())) == 1
        self.moves.closed(trainer, "was lost")
        homed = list(trainer.homed.values())
        for trainee in homed:
            trainer.unsettle(trainee, self._outbox.now)
        for trainee in homed:
            suspect = killers.get(trainee.policy.key)
            if suspect is not None and suspect.kills >= self._config.kills:
                self._set_aside(trainee, suspect)
            if trainee.target is not None:
                self.moves.carry_out(trainee)
            elif trainee.has_work:
                self._homes.wait(trainee)
            else:
                self._queue(trainee)
        self._homes.find(trainer.backbone)

    # Outcomes

    def _take_in(self, item: Item, message: TrainDone) -> None:
        trainee, policy = item.trainee, item.trainee.policy
        if item.op is None:
            self._checkpointed(trainee, message)
        elif item.op.done is None and message.seq != policy.applied + 1:
            self._outbox.log("error", "op_out_of_order", policy=policy.name, seq=message.seq, applied=policy.applied)
            self._close(trainee)
        else:
            self._outcomes.applied(policy, item.op, message)
        self._queue(trainee)

    def _checkpointed(self, trainee: Trainee, message: TrainDone) -> None:
        policy, error = trainee.policy, message.result.error
        if error is None:
            self._outcomes.checkpointed(policy, message, lambda: self._covered(trainee))
            return
        self._outbox.log(
            "error",
            "checkpoint_failed",
            tenant=policy.tenant,
            policy=policy.name,
            seq=message.seq,
            reason=error.message,
        )
        if trainee.target is not None:
            self.moves.give_up(trainee, f"it cannot be checkpointed ({error.message})")
        elif trainee.home is not None:
            self._trainers[trainee.home.name].keep(trainee)
        opening = trainee.opening

        def later() -> None:
            if trainee.opening == opening:
                trainee.checkpoint_failed()
                self._queue(trainee)

        self._outbox.after(5 * self._config.retry_s, later)

    def _covered(self, trainee: Trainee) -> None:
        """A checkpoint is durable; a slot that is behind it is opened again from there."""
        trainee.covered_further()
        if trainee.behind:
            self._close(trainee)
        self._queue(trainee)

    def _slot_failed(self, trainer: Trainer, trainee: Trainee, error: Failure) -> None:
        policy = trainee.policy
        trainer.close(trainee)
        trainee.faults += 1
        self._outbox.log(
            "error",
            "slot_failed",
            tenant=policy.tenant,
            policy=policy.name,
            reason=error.message,
            times=trainee.faults,
        )
        if error.category == "user" or trainee.faults >= _SLOT_FAULTS:
            trainee.faults = 0
            for seq in range(policy.applied + 1, policy.journaled + 1):
                self._outcomes.decided(policy, policy.ops[seq], error)
            trainee.checkpoint_wanted = False
        else:
            self._pause(trainee, self._config.retry_s * trainee.faults)

    def _conclude(self, trainer: Trainer, task: str, *, last: bool) -> None:
        """If a group is done, take its credit back."""
        items = trainer.groups[task]
        if items and not last:
            return
        for item in items.values():
            if item.opening == item.trainee.opening:
                self._outbox.log("error", "item_left_out", policy=item.trainee.policy.name, worker=trainer.name)
                trainer.close(item.trainee)
                self._queue(item.trainee)
        del trainer.groups[task]
        trainer.alone = False
        self._roster.take(trainer.worker, task)
        self._dispatch.pump(trainer)
        self._let_go(trainer)

    # Loss

    def _set_aside(self, trainee: Trainee, op: Op) -> None:
        if op.done is None and op.record.seq == trainee.policy.applied + 1:
            sentence = f"op {op.record.seq} was set aside: {op.kills} trainers died over it alone; the policy goes on"
            self._outcomes.decided(trainee.policy, op, failure(ErrorCode.POISON, sentence))
        else:  # it was applied once, so it cannot be left out; at least others get their turn in between
            self._pause(trainee, _LONG_PAUSE_S)

    def _let_go(self, trainer: Trainer) -> None:
        """A trainer that leaves has nothing more to do: who cannot be checkpointed there goes without."""
        if not trainer.worker.leaving or trainer.groups:
            return
        for trainee in [trainee for trainee in trainer.homed.values() if trainee.cornered]:
            trainer.close(trainee)
            self._queue(trainee)

    def _close(self, trainee: Trainee) -> None:
        """A policy starts again from its checkpoint."""
        if trainee.home is not None:
            self._trainers[trainee.home.name].close(trainee)
        else:
            trainee.reopen()

    # Their turn

    def _trainee(self, policy: Policy) -> Trainee:
        trainee = self._trainees.get(policy.key)
        if trainee is None:
            trainee = self._trainees[policy.key] = Trainee(policy, self._config, self._outbox.now)
        return trainee

    def _queue(self, *trainees: Trainee) -> None:
        """Have policies wait for their turn if they have something to send; then use what credit there is."""
        touched: dict[str, Trainer] = {}
        for trainee in trainees:
            if self._trainees.get(trainee.policy.key) is not trainee:
                continue  # its policy was deleted since
            self._answer_given_up(trainee.policy)
            if trainee.vacated and trainee.home is not None:
                touched[trainee.home.name] = self._trainers[trainee.home.name]
                self._vacate(trainee)
            if not trainee.queued and trainee.has_work:
                trainer = self._homes.of(trainee)
                if trainer is not None:
                    trainer.enqueue(trainee)
                    touched[trainer.name] = trainer
            if trainee.home is not None:
                self._trainers[trainee.home.name].note(trainee, self._outbox.now)
        for trainer in touched.values():
            self._dispatch.pump(trainer)

    def _answer_given_up(self, policy: Policy) -> None:
        """Have ops fail that were given up, as soon as all before them are done."""
        while (op := policy.ops.get(policy.applied + 1)) is not None and op.given_up is not None:
            if op.state is not OpState.JOURNALED:
                return
            self._outcomes.decided(policy, op, op.given_up)

    def _vacate(self, trainee: Trainee) -> None:
        """A policy was to leave its slot, and a checkpoint has all that it did there."""
        home = self._trainers[trainee.home.name] if trainee.home else None
        if home is None:
            return
        home.close(trainee)
        trainee.vacating = False
        if trainee.target is not None:
            self.moves.carry_out(trainee)
        elif home.worker.leaving:
            home.unsettle(trainee, self._outbox.now)

    def _pause(self, trainee: Trainee, seconds: float) -> None:
        """Leave a policy alone for a while."""
        trainee.paused = True

        def resume() -> None:
            trainee.paused = False
            self._queue(trainee)

        self._outbox.after(seconds, resume)
