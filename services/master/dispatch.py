"""What a trainer gets next: slots for those whose turn it is, and groups of their ops.

In: trainers with policies in their lanes. Out: `TrainGroup`s, within a trainer's credit and memory. Never: an op of a
policy before the one before it, more policies in memory than there is room for, or a scan over policies or ops.

A turn is an op of the policy whose tenant comes first, so a group is wide before it is deep: ops of many policies share
a forward. A policy without a slot waits outside when its turn comes, in the order of tenants again; `residency.py` says
who goes for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from joynexus.wire import ErrorCode, Failure, failure
from services.master.config import CoreConfig
from services.master.groups import GroupBuilder
from services.master.lanes import Counters
from services.master.ops import Op
from services.master.outbox import Outbox
from services.master.outcomes import Outcomes
from services.master.policy import Policy
from services.master.roster import Roster
from services.master.trainees import Trainee
from services.master.trainers import Item, ItemKey, Items, Trainer, Waiter

_PAGES_AT_ONCE = 8
_READS = 5
"""Times that an op's samples are looked for before it is refused."""


class Dispatch:
    """Makes groups.

    Args:
        payload: gives the inline samples of an op.
        pause: has a policy left alone for some seconds.
    """

    def __init__(
        self,
        outbox: Outbox,
        config: CoreConfig,
        roster: Roster,
        outcomes: Outcomes,
        counters: Counters,
        payload: Callable[[Op], bytes],
        pause: Callable[[Trainee, float], None],
    ) -> None:
        self._outbox = outbox
        self._config = config
        self._roster = roster
        self._outcomes = outcomes
        self._counters = counters
        self._payload = payload
        self._pause = pause
        self._misses: Counter[ItemKey] = Counter()  # times that an op's samples could not be read

    def pump(self, trainer: Trainer) -> None:
        """Use a trainer's credit; one that leaves gets at once all that its policies need to move."""
        while trainer.credit > 0 or (trainer.worker.leaving and not trainer.alone):
            builder = GroupBuilder(self._config, self._payload)
            items = Items()
            self._fill(trainer, builder, items)
            if not items:
                return
            for key in trainer.closing:
                builder.close_slot(key)
            trainer.closing.clear()
            task = self._outbox.new_id()
            trainer.groups[task] = items
            group, buffers = builder.build(task)
            self._roster.give(trainer.worker, task, 1, group, buffers)

    def _fill(self, trainer: Trainer, builder: GroupBuilder, items: Items) -> None:
        """Put ops into a group: a turn of the policy whose tenant used least, and again."""
        self._admit(trainer, builder, items)
        self._hurry(trainer, builder, items)
        while not builder.full and not trainer.alone:
            waiter = trainer.lanes.pop()
            if waiter is None:
                return
            if waiter.void:
                continue
            trainee = waiter.trainee
            trainee.queued = False
            if not trainee.has_work:
                continue
            if not self._has_slot(trainer, trainee):
                trainee.queued = True
                trainer.outside.put_back(trainee.policy.tenant, waiter, front=False)
                self._admit(trainer, builder, items)
                continue
            op = trainee.next_op()
            suspect = op is not None and op.alone
            blocked = suspect and (not builder.empty or bool(trainer.groups))
            taken = 0 if blocked else self._take_turn(trainer, trainee, builder, items)
            if trainee.has_work and (taken or blocked or not builder.empty):
                trainee.queued = True
                trainer.lanes.put_back(trainee.policy.tenant, waiter, front=not taken)
            if blocked or (not taken and not builder.empty):
                return
            trainer.alone = suspect and taken > 0

    def _take_turn(self, trainer: Trainer, trainee: Trainee, builder: GroupBuilder, items: Items) -> int:
        """Put some ops of one policy into a group; return how many items that made."""
        policy, taken = trainee.policy, 0
        while taken < self._config.turn_ops and not builder.full:
            op = trainee.next_op()
            if op is None or (op.alone and taken) or not builder.fits(policy, op, trainee.estimate_s(op)):
                break
            try:
                problem = self._add(builder, policy, op)
            except OSError as error:
                problem = self._unread(trainee, op, error)
                if problem is None:
                    break
            if problem is not None:
                if op.done is not None or op.record.seq != policy.applied + 1:
                    break  # the master may answer it once everything before it is applied
                self._outcomes.decided(policy, op, problem)
                continue
            if not trainee.open:
                trainee.open = True
                builder.open_slot(policy)
            trainee.sending(op)
            self._note(builder, items, trainee, op)
            taken += 1
            if op.alone:
                break
            if trainee.checkpoint_due():
                self._add_checkpoint(trainee, builder, items)
        if not taken and trainee.open and trainee.checkpoint_due():
            self._add_checkpoint(trainee, builder, items)
            taken += 1
        if taken:
            trainer.memory.used(trainee, self._outbox.now)
        return taken

    def _add(self, builder: GroupBuilder, policy: Policy, op: Op) -> Failure | None:
        """Add an op to a group, or say why it cannot be done; OSError if its samples cannot be read now."""
        if op.done is None and op.record.kind == "load_state" and not op.record.blob:
            return failure(ErrorCode.NOT_FOUND, f"state '{op.record.state}' could not be saved, so it cannot be loaded")
        try:
            builder.add_op(policy, op)
            if op.done is None and op.since is not None:
                self._outbox.waited("training", op.since)
        except KeyError as error:
            self._outbox.log("error", "payload_lost", policy=policy.name, seq=op.record.seq, reason=str(error))
            return failure(ErrorCode.INTERNAL, f"the samples of op {op.record.seq} are lost: see the master's log")
        self._misses.pop((*policy.key, op.record.seq, False), None)
        return None

    def _unread(self, trainee: Trainee, op: Op, error: OSError) -> Failure | None:
        """An op's samples cannot be read: look again later, or at last say that it cannot be done."""
        policy, seq = trainee.policy, op.record.seq
        key = (*policy.key, seq, False)
        self._misses[key] += 1
        times = self._misses[key]
        self._outbox.log("error", "payload_unread", policy=policy.name, seq=seq, reason=str(error), times=times)
        if times < _READS or op.done is not None:  # what has a result already is never refused
            self._pause(trainee, self._config.retry_s * min(times, _READS))
            return None
        del self._misses[key]
        sentence = f"the samples of op {seq} cannot be read back: see the master's log, and send them again"
        return failure(ErrorCode.INTERNAL, sentence)

    def _add_checkpoint(self, trainee: Trainee, builder: GroupBuilder, items: Items) -> None:
        trainee.sending_checkpoint()
        builder.add_checkpoint(trainee.policy, trainee.sent)
        self._note(builder, items, trainee, None)

    def _note(self, builder: GroupBuilder, items: Items, trainee: Trainee, op: Op | None) -> None:
        key = (*trainee.policy.key, trainee.sent, op is None)
        estimate = trainee.estimate_s(op)
        items[key] = Item(trainee, op, trainee.opening, estimate)
        builder.estimate_s += estimate
        self._counters.charge(trainee.policy.tenant, estimate)

    # Slots

    def _has_slot(self, trainer: Trainer, trainee: Trainee) -> bool:
        """Tell whether a policy has a slot, or gets a free one for which nobody waited before it."""
        if trainee in trainer.memory:
            return True
        if trainer.outside or not trainer.memory.has_room(trainee):
            return False
        trainer.memory.enter(trainee, self._outbox.now)
        return True

    def _admit(self, trainer: Trainer, builder: GroupBuilder, items: Items) -> None:
        """Let in those who wait for a slot, as far as there is room; have others go for them."""
        while (waiter := trainer.outside.peek()) is not None:
            trainee = waiter.trainee
            if waiter.void or not trainee.has_work:
                trainer.outside.pop()
                if not waiter.void:
                    trainee.queued = False
            elif trainer.memory.has_room(trainee):
                trainer.outside.pop()
                trainer.memory.enter(trainee, self._outbox.now)
                trainer.lanes.put_back(trainee.policy.tenant, waiter, front=True)
            elif not self._make_room(trainer, waiter, builder, items):
                self._watch(trainer)
                return

    def _make_room(self, trainer: Trainer, waiter: Waiter, builder: GroupBuilder, items: Items) -> bool:
        """Have one policy leave memory, now or behind a checkpoint; return whether one does."""
        memory = trainer.memory
        if len(memory.leaving) >= min(_PAGES_AT_ONCE, len(trainer.outside)):
            return False
        busy = bool(trainer.groups or trainer.lanes or not builder.empty)
        if busy and not memory.may_page:
            return False
        found = memory.victim(self._counters.rank(waiter.trainee.policy.tenant), self._counters.rank)
        if found is None:
            return False
        victim, way = found
        if way == "evict":
            trainer.close(victim)
            return True
        victim.vacating = True
        memory.leaving[victim.policy.key] = victim
        if victim.checkpoint_due() and not builder.full:
            self._add_checkpoint(victim, builder, items)
        elif not victim.queued and victim.has_work:
            trainer.enqueue(victim)
        return True

    def _hurry(self, trainer: Trainer, builder: GroupBuilder, items: Items) -> None:
        """Take those that leave for others to their steps first: who waits for them may come before all that is here.

        In its own lane, a policy of low priority would hold its slot as long as anybody else has work.
        """
        for trainee in list(trainer.memory.leaving.values()):
            op = trainee.next_op()
            if trainee.has_work and not builder.full and not (op is not None and op.alone):
                self._take_turn(trainer, trainee, builder, items)

    def _watch(self, trainer: Trainer) -> None:
        """Look now and then for policies that hold their slots without work and cannot be checkpointed."""
        if trainer.watching:
            return
        trainer.watching = True

        def look() -> None:
            trainer.watching = False
            if trainer.outside and trainer.worker.alive:
                for trainee in trainer.memory.stuck(self._outbox.now)[: len(trainer.outside)]:
                    self._outbox.log("info", "slot_dropped", policy=trainee.policy.name, trainer=trainer.name)
                    trainee.vacating = trainee.target is not None
                    trainer.close(trainee)
                self.pump(trainer)

        self._outbox.after(self._config.stuck_s, look)
