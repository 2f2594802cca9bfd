"""The Training queue: ops to their policies' home trainers, in order, in groups; results and checkpoints back.

In: journaled ops, `TrainDone`, `SlotFailed`, trainers that come and go. Out: `TrainGroup`s; outcomes of ops, durable
before anybody hears of them. Never: an op of a policy before the one before it, a policy in two trainers, an outcome
taken from a trainer that was declared dead, or a scan over policies or ops.

A lost trainer's policies start again from their checkpoints: the ops above are sent again in order, to the next
trainer; those whose result is known are marked `replay` and their results are only compared. An op that was the first
unanswered one when its trainer died is then sent alone, so that the innocent are cleared and the guilty one set aside.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from joynexus.wire import ErrorCode, Failure, failure
from joynexus.wire.back import SlotFailed, TrainDone
from services.master.config import CoreConfig
from services.master.events import BackMessage
from services.master.groups import GroupBuilder
from services.master.lanes import Counters, Lanes
from services.master.ops import Op
from services.master.outbox import Outbox, refuse
from services.master.outcomes import Outcomes
from services.master.policies import Policy, PolicyKey
from services.master.roster import Roster, Worker
from services.master.trainees import Trainee
from services.master.trainers import Item, Items, Trainer

_SLOT_FAULTS = 10
_LONG_PAUSE_S = 60.0


class Training:
    """All policies that have ops, and all trainers.

    Args:
        payload: gives the inline samples of an op.
        counters: use by tenant.
    """

    def __init__(
        self,
        outbox: Outbox,
        config: CoreConfig,
        roster: Roster,
        outcomes: Outcomes,
        payload: Callable[[Op], bytes],
        counters: Counters,
    ) -> None:
        self._outbox = outbox
        self._config = config
        self._roster = roster
        self._outcomes = outcomes
        self._payload = payload
        self._counters = counters
        self._trainees: dict[PolicyKey, Trainee] = {}
        self._trainers: dict[str, Trainer] = {}  # by worker name
        self._homeless: dict[str, OrderedDict[PolicyKey, Trainee]] = {}  # by backbone
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

    def serves(self, backbone: str) -> bool:
        """Tell whether a trainer with this backbone is there."""
        return any(True for _ in self._with_backbone(backbone))

    def backbones(self) -> list[str]:
        """Return the backbones that trainers have now, in order of name."""
        return sorted({trainer.worker.register.backbone_name for trainer in self._trainers.values()})

    def known_heads(self, backbone: str) -> set[str]:
        """Return the action modules that the trainers with this backbone say they have."""
        stated = (trainer.worker.register.detail.get("heads", "") for trainer in self._with_backbone(backbone))
        return {head.strip() for heads in stated for head in heads.split(",") if head.strip()}

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
            if item.opening == item.trainee.opening:
                item.trainee.answered(message.busy_s)
                item.trainee.faults = 0
                self._take_in(item, message)
        self._conclude(trainer, message.task, last=message.last)

    def on_slot_failed(self, said: BackMessage, message: SlotFailed) -> None:
        """A policy could not be brought into memory (or not be continued there)."""
        trainer = self._trainer(said, message)
        items = trainer.groups[message.task]
        key = (message.tenant, message.policy)
        failed = [items.pop(item) for item in list(items) if item[:2] == key]
        if failed and failed[0].opening == failed[0].trainee.opening:
            self._slot_failed(failed[0].trainee, message.error)
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
        """A trainer is there: whoever waits for one moves in."""
        self._trainers[worker.name] = Trainer(worker, Lanes(self._counters), {}, OrderedDict(), {})
        self._queue(*self._homeless.pop(worker.register.backbone_name, {}).values())

    def leaving(self, worker: Worker) -> None:
        """A trainer finishes what it has; then its policies move."""
        trainer = self._trainers[worker.name]
        if not trainer.groups:
            self._move_out(trainer)

    def lost(self, worker: Worker) -> None:
        """A trainer is dead: its policies start again elsewhere, from their checkpoints."""
        trainer = self._trainers.pop(worker.name)
        killers = self._suspects(trainer)
        for op in killers.values():
            op.kills += 1
        homed = self._move_out(trainer, queue=False)
        for trainee in homed:
            suspect = killers.get(trainee.policy.key)
            if suspect is not None and suspect.kills >= self._config.kills:
                self._set_aside(trainee, suspect)
        self._queue(*homed)

    # Outcomes

    def _take_in(self, item: Item, message: TrainDone) -> None:
        trainee, policy = item.trainee, item.trainee.policy
        if item.op is None:
            self._checkpointed(trainee, message)
        elif item.op.done is None and message.seq != policy.applied + 1:
            self._outbox.log("error", "op_out_of_order", policy=policy.name, seq=message.seq, applied=policy.applied)
            trainee.reopen()
        else:
            self._outcomes.applied(policy, item.op, message)
        self._queue(trainee)

    def _checkpointed(self, trainee: Trainee, message: TrainDone) -> None:
        policy, error = trainee.policy, message.result.error
        if error is None:
            self._outcomes.checkpointed(policy, message, trainee.covered_further)
            return
        self._outbox.log("error", "checkpoint_failed", policy=policy.name, seq=message.seq, reason=error.message)
        opening = trainee.opening

        def later() -> None:
            if trainee.opening == opening:
                trainee.checkpoint_failed()
                self._queue(trainee)

        self._outbox.after(5 * self._config.retry_s, later)

    def _slot_failed(self, trainee: Trainee, error: Failure) -> None:
        policy = trainee.policy
        trainee.reopen()
        trainee.faults += 1
        self._outbox.log("error", "slot_failed", policy=policy.name, reason=error.message, times=trainee.faults)
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
                self._outbox.log("error", "item_left_out", policy=item.trainee.policy.name, worker=trainer.worker.name)
                item.trainee.reopen()
                self._queue(item.trainee)
        del trainer.groups[task]
        trainer.alone = False
        self._roster.take(trainer.worker, task)
        if trainer.worker.leaving and not trainer.groups:
            self._move_out(trainer)
        self._pump(trainer)

    # Loss

    def _suspects(self, trainer: Trainer) -> dict[PolicyKey, Op]:
        """Return, of each policy in the oldest unanswered group, the op that was to be done next."""
        suspects: dict[PolicyKey, Op] = {}
        for item in next(iter(trainer.groups.values()), Items()).values():
            if item.op is not None and item.opening == item.trainee.opening:
                suspects.setdefault(item.trainee.policy.key, item.op)
        return suspects

    def _set_aside(self, trainee: Trainee, op: Op) -> None:
        if op.done is None and op.record.seq == trainee.policy.applied + 1:
            sentence = f"op {op.record.seq} was set aside because {op.kills} trainers died over it; the policy goes on"
            self._outcomes.decided(trainee.policy, op, failure(ErrorCode.POISON, sentence))
        else:  # it was applied once, so it cannot be left out; at least others get their turn in between
            self._pause(trainee, _LONG_PAUSE_S)

    def _move_out(self, trainer: Trainer, *, queue: bool = True) -> list[Trainee]:
        """Make a trainer's policies homeless; they start again from their checkpoints."""
        homed = list(trainer.homed.values())
        trainer.homed.clear()
        trainer.residents.clear()
        trainer.lanes = Lanes(self._counters)
        for trainee in homed:
            trainee.home = None
            trainee.queued = False
            trainee.reopen()
        if queue:
            self._queue(*homed)
        return homed

    # Dispatch

    def _trainee(self, policy: Policy) -> Trainee:
        trainee = self._trainees.get(policy.key)
        if trainee is None:
            trainee = self._trainees[policy.key] = Trainee(policy, self._config)
        return trainee

    def _with_backbone(self, backbone: str) -> Iterable[Trainer]:
        return (
            trainer
            for trainer in self._trainers.values()
            if trainer.worker.register.backbone_name == backbone and not trainer.worker.leaving
        )

    def _queue(self, *trainees: Trainee) -> None:
        """Have policies wait for their turn if they have something to send; then use what credit there is."""
        trainers: dict[str, Trainer] = {}
        for trainee in trainees:
            if not trainee.queued and trainee.has_work:
                trainer = self._home(trainee)
                if trainer is not None:
                    self._enqueue(trainer, trainee)
                    trainers[trainer.worker.name] = trainer
        for trainer in trainers.values():
            self._pump(trainer)

    def _home(self, trainee: Trainee) -> Trainer | None:
        """Return a policy's trainer; the one with the fewest policies becomes it."""
        policy = trainee.policy
        if trainee.home is None:
            trainers = self._with_backbone(policy.spec.backbone)
            trainer = min(trainers, key=lambda trainer: len(trainer.homed), default=None)
            if trainer is None:
                self._homeless.setdefault(policy.spec.backbone, OrderedDict())[policy.key] = trainee
                return None
            trainee.home = trainer.worker
            trainer.homed[policy.key] = trainee
        return self._trainers[trainee.home.name]

    def _pump(self, trainer: Trainer) -> None:
        while trainer.credit > 0:
            builder = GroupBuilder(self._config, self._payload)
            items = Items()
            self._fill(trainer, builder, items)
            if not items:
                return
            task = self._outbox.new_id()
            trainer.groups[task] = items
            group, buffers = builder.build(task)
            self._roster.give(trainer.worker, task, 1, group, buffers)

    def _fill(self, trainer: Trainer, builder: GroupBuilder, items: Items) -> None:
        """Put ops into a group: a turn of the policy whose tenant used least, and again."""
        while not builder.full and not trainer.alone:
            trainee = trainer.lanes.pop()
            if trainee is None:
                return
            trainee.queued = False
            op = trainee.next_op()
            suspect = op is not None and op.kills > 0
            blocked = suspect and (not builder.empty or bool(trainer.groups))
            taken = 0 if blocked else self._take_turn(trainer, trainee, builder, items)
            if trainee.has_work and (taken or blocked or not builder.empty):
                trainee.queued = True
                trainer.lanes.put_back(trainee.policy.tenant, trainee, front=not taken)
            if blocked or (not taken and not builder.empty):
                return
            trainer.alone = suspect and taken > 0

    def _take_turn(self, trainer: Trainer, trainee: Trainee, builder: GroupBuilder, items: Items) -> int:
        """Put some ops of one policy into a group; return how many items that made."""
        policy, taken = trainee.policy, 0
        while taken < self._config.turn_ops and not builder.full:
            op = trainee.next_op()
            if op is None or (op.kills and taken) or not builder.fits(policy, op):
                break
            problem = self._add(builder, policy, op)
            if problem is not None:
                if op.done is not None or op.record.seq != policy.applied + 1:
                    break  # the master may answer it once everything before it is applied
                self._outcomes.decided(policy, op, problem)
                continue
            self._open_slot(trainer, trainee, builder)
            trainee.sending(op)
            self._note(items, trainee, op)
            taken += 1
            if op.kills:
                break
            if trainee.checkpoint_due():
                self._add_checkpoint(trainee, builder, items)
        if not taken and trainee.open and trainee.checkpoint_due():
            self._add_checkpoint(trainee, builder, items)
            taken += 1
        if taken:
            trainer.residents.move_to_end(policy.key)
        return taken

    def _add(self, builder: GroupBuilder, policy: Policy, op: Op) -> Failure | None:
        """Add an op to a group, or say why it cannot be done."""
        if op.done is None and op.record.kind == "load_state" and not op.record.blob:
            return failure(ErrorCode.NOT_FOUND, f"state '{op.record.state}' could not be saved, so it cannot be loaded")
        try:
            builder.add_op(policy, op)
        except KeyError as error:
            self._outbox.log("error", "payload_lost", policy=policy.name, seq=op.record.seq, reason=str(error))
            return failure(ErrorCode.INTERNAL, f"the samples of op {op.record.seq} are lost: see the master's log")
        return None

    def _add_checkpoint(self, trainee: Trainee, builder: GroupBuilder, items: Items) -> None:
        trainee.sending_checkpoint()
        builder.add_checkpoint(trainee.policy, trainee.sent)
        self._note(items, trainee, None)

    def _note(self, items: Items, trainee: Trainee, op: Op | None) -> None:
        key = (*trainee.policy.key, trainee.sent, op is None)
        items[key] = Item(trainee, op, trainee.opening, trainee.cost_s)
        self._counters.charge(trainee.policy.tenant, trainee.cost_s)

    def _open_slot(self, trainer: Trainer, trainee: Trainee, builder: GroupBuilder) -> None:
        """Have a policy brought into memory if it is not there; others make room if the trainer's slots are limited."""
        if trainee.open:
            return
        trainee.open = True
        trainer.residents[trainee.policy.key] = trainee
        builder.open_slot(trainee.policy)
        if not trainer.max_slots:
            return
        for key, other in list(trainer.residents.items()):
            if len(trainer.residents) <= trainer.max_slots:
                return
            if not other.open:
                del trainer.residents[key]
            elif other.idle and other is not trainee:
                if other.covered:
                    del trainer.residents[key]
                    builder.close_slot(other.policy)
                    other.reopen()
                else:  # it can go once its checkpoint is written
                    other.checkpoint_wanted = True
                    if other.has_work and not other.queued:
                        self._enqueue(trainer, other)

    def _enqueue(self, trainer: Trainer, trainee: Trainee) -> None:
        trainee.queued = True
        trainer.lanes.push(trainee.policy.tenant, trainee)

    def _pause(self, trainee: Trainee, seconds: float) -> None:
        """Leave a policy alone for a while."""
        trainee.paused = True

        def resume() -> None:
            trainee.paused = False
            self._queue(trainee)

        self._outbox.after(seconds, resume)
