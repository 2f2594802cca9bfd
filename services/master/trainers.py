"""A trainer as the Training queue sees it: what is at home there, what is in its memory, and what it has to do.

In: nothing but what the queue notes. Out: its credit, and its state as a place for policies. Never: a decision.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from joynexus.wire.back import TrainDone
from services.master.config import CoreConfig
from services.master.lanes import Counters, Lanes
from services.master.metering import LOST, REPLAY, Account, bearer
from services.master.ops import Op
from services.master.placement import Place, Smoothed
from services.master.policy import PolicyKey
from services.master.residency import Residency
from services.master.trainees import Trainee
from services.master.worker import Worker


class Item(msgspec.Struct, eq=False):
    """One item of a group on its way; `op` is None for a checkpoint."""

    trainee: Trainee
    op: Op | None
    opening: int
    estimate_s: float


ItemKey = tuple[str, str, int, bool]
"""Tenant, policy, seq, and whether it is a checkpoint."""

Items = OrderedDict[ItemKey, Item]


class Waiter(msgspec.Struct, frozen=True, eq=False):
    """A policy in a lane; void once it has another home."""

    trainee: Trainee
    stay: int

    @property
    def void(self) -> bool:
        """It does not live here any more."""
        return self.stay != self.trainee.stay


class Trainer:
    """A trainer, the policies at home there, and its groups.

    Attributes:
        lanes: policies that have something to send.
        outside: those of them that wait for a slot.
        homed: policies at home here.
        active: those of them with unfinished work.
        arriving: policies on their way here, still at home elsewhere.
        memory: its slots.
        closing: policies to be dropped from its memory with the next group.
        groups: items not answered yet, by task.
        alone: its one group holds an op that may kill it, so it gets nothing else meanwhile.
        watching: a timer looks after policies that are stuck in its memory.
    """

    def __init__(self, worker: Worker, counters: Counters, config: CoreConfig, now: float) -> None:
        self.worker = worker
        self.lanes: Lanes[Waiter] = Lanes(counters)
        self.outside: Lanes[Waiter] = Lanes(counters)
        self.homed: dict[PolicyKey, Trainee] = {}
        self.active: dict[PolicyKey, Trainee] = {}
        self.arriving: dict[PolicyKey, Trainee] = {}
        self.memory = Residency(
            max_slots=worker.register.max_slots,
            slot_bytes=worker.register.slot_bytes,
            share=config.page_share,
            stuck_s=config.stuck_s,
        )
        self.closing: list[PolicyKey] = []
        self.groups: dict[str, Items] = {}
        self.alone = False
        self.watching = False
        self.load = Smoothed(now)

    @property
    def name(self) -> str:
        """Name of its worker."""
        return self.worker.name

    @property
    def backbone(self) -> str:
        """Backbone that it has."""
        return self.worker.register.backbone_name

    @property
    def credit(self) -> int:
        """Groups that it would take now."""
        return 0 if self.alone else self.worker.register.credit.get("train", 1) - len(self.groups)

    def place(self, now: float) -> Place:
        """Describe it as a place for policies."""
        return Place(
            name=self.name,
            load=self.load.mean(now),
            policies=len(self.homed),
            nbytes=self.memory.nbytes,
            room=self.worker.register.slot_bytes,
        )

    def settle(self, trainee: Trainee) -> None:
        """A policy lives here from now on."""
        trainee.home = self.worker
        trainee.policy.home = self.name
        self.homed[trainee.policy.key] = trainee

    def unsettle(self, trainee: Trainee, now: float) -> None:
        """A policy does not live here any more; what it still has in this trainer does not count."""
        self.close(trainee)
        self.homed.pop(trainee.policy.key, None)
        if self.active.pop(trainee.policy.key, None) is not None:
            self.load.set(now, len(self.active))
        trainee.home, trainee.policy.home = None, ""
        trainee.stay += 1
        trainee.queued = trainee.vacating = False

    def keep(self, trainee: Trainee) -> None:
        """A policy that was to leave its slot stays after all, unless everybody has to go."""
        trainee.vacating = self.worker.leaving
        self.memory.leaving.pop(trainee.policy.key, None)

    def enqueue(self, trainee: Trainee) -> None:
        """A policy has something to send."""
        trainee.queued = True
        self.lanes.push(trainee.policy.tenant, Waiter(trainee, trainee.stay))

    def close(self, trainee: Trainee) -> None:
        """Take a policy's slot away: it starts again from its checkpoint."""
        if trainee.open:
            self.closing.append(trainee.policy.key)
        self.memory.leave(trainee)
        trainee.reopen()

    def note(self, trainee: Trainee, now: float) -> None:
        """See whether a policy at home here has unfinished work."""
        key, known = trainee.policy.key, trainee.policy.key in self.active
        if trainee.unfinished == known:
            return
        if known:
            del self.active[key]
        else:
            self.active[key] = trainee
        trainee.demand.set(now, float(not known))
        self.load.set(now, len(self.active))

    def account(self, item: Item, done: TrainDone) -> None:
        """An item is done: tell work from paging."""
        trainee = item.trainee
        if item.opening == trainee.opening:
            self.memory.measured(trainee, done.slot_bytes)
        if item.op is None and trainee.policy.key in self.memory.leaving:
            self.memory.paged_out(done.busy_s)
            return
        if done.page_s:
            self.memory.paged_in(done.page_s)
        self.memory.worked(done.busy_s - done.page_s)

    def suspects(self) -> dict[PolicyKey, Op]:
        """Return, of each policy in the oldest unanswered group, the op that was to be done next."""
        suspects: dict[PolicyKey, Op] = {}
        for item in next(iter(self.groups.values()), Items()).values():
            if item.op is not None and item.opening == item.trainee.opening:
                suspects.setdefault(item.trainee.policy.key, item.op)
        return suspects


def account_of(item: Item, done: TrainDone) -> Account:
    """Return who is charged for an item that is done: replays, and what does not count any more, are the service's."""
    policy = item.trainee.policy
    if item.opening != item.trainee.opening:
        return LOST
    newest = policy.covering or policy.checkpoint
    known = item.op.done is not None if item.op else newest is not None and done.seq <= newest.seq
    if known:
        return REPLAY
    of = item.op or policy.ops.get(done.seq)  # a checkpoint is taken for the job whose ops it covers
    return bearer(Account(*policy.key, of.record.job if of is not None else ""), done.result.error)
