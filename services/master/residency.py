"""Which of a trainer's policies are in its memory, who has to go for whom, and what paging may cost.

In: policies that come, go and have their turns; measured sizes and times. Out: whether there is room, and a victim if
there is none. Never: an eviction (the queue does that), or a search through more than a fixed number of policies.

A page is a checkpoint. Paging is paid for by work: training earns credit, a page-out and a page-in spend it, and while
there is other work nobody has to go unless there is credit. So paging takes at most `page_share` of a busy trainer's
time, whatever the pattern, and a policy that was paged in gets (1 - share) / share times that in work, on average,
before it is the victim. A trainer that has nothing else to do pages at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Literal

from services.master.policy import PolicyKey
from services.master.trainees import Trainee

Rank = tuple[int, float]
"""A tenant's place in line, as `Counters.rank` gives it."""
Way = Literal["evict", "checkpoint"]
"""How a victim goes: at once, or once a checkpoint covers it."""

_SEARCHED = 128
_BURST_S = 1.0
_NEW_COST_WEIGHT = 0.2


class Residency:
    """The slots of one trainer.

    Args:
        max_slots, slot_bytes: policies in memory at once, and bytes that they may take; 0 means no limit.
        share: of the busy time that paging may take.
        stuck_s: a policy that cannot be checkpointed (gradients wait for their step) goes without, if idle so long.
    """

    def __init__(self, *, max_slots: int, slot_bytes: int, share: float, stuck_s: float) -> None:
        self._max_slots = max_slots
        self._slot_bytes = slot_bytes
        self._earns = share / (1 - share)
        self._stuck_s = stuck_s
        self._residents: OrderedDict[PolicyKey, tuple[Trainee, float]] = OrderedDict()  # longest unused first
        self._credit_s = _BURST_S
        self._in_s = self._out_s = 0.0
        self.nbytes = 0
        self.leaving: dict[PolicyKey, Trainee] = {}
        """Those that go once their checkpoint is durable."""

    def __contains__(self, trainee: Trainee) -> bool:
        """Tell whether a policy has a slot here."""
        return trainee.policy.key in self._residents

    def __len__(self) -> int:
        """Number of slots that are taken."""
        return len(self._residents)

    @property
    def may_page(self) -> bool:
        """Work has paid for the next page."""
        return self._credit_s > 0

    def has_room(self, trainee: Trainee) -> bool:
        """Tell whether one more policy fits (the first always does)."""
        if not self._residents:
            return True
        return (not self._max_slots or len(self._residents) < self._max_slots) and (
            not self._slot_bytes or self.nbytes + trainee.slot_nbytes <= self._slot_bytes
        )

    def enter(self, trainee: Trainee, now: float) -> None:
        """A policy gets a slot."""
        self._residents[trainee.policy.key] = trainee, now
        self.nbytes += trainee.slot_nbytes
        trainee.policy.resident = True

    def leave(self, trainee: Trainee) -> None:
        """A policy's slot is free; one that has none is fine."""
        self.leaving.pop(trainee.policy.key, None)
        if self._residents.pop(trainee.policy.key, None) is not None:
            self.nbytes -= trainee.slot_nbytes
        trainee.policy.resident = False

    def used(self, trainee: Trainee, now: float) -> None:
        """A policy had its turn."""
        self._residents[trainee.policy.key] = trainee, now
        self._residents.move_to_end(trainee.policy.key)

    def measured(self, trainee: Trainee, nbytes: int) -> None:
        """A trainer said what a policy really takes."""
        if nbytes and nbytes != trainee.slot_nbytes:
            if trainee in self:
                self.nbytes += nbytes - trainee.slot_nbytes
            trainee.slot_nbytes = nbytes

    def worked(self, seconds: float) -> None:
        """Training took so long: that earns credit."""
        self._credit_s = min(_BURST_S, self._credit_s + self._earns * seconds)

    def paged_in(self, seconds: float) -> None:
        """Opening a slot took so long."""
        self._in_s += _NEW_COST_WEIGHT * (seconds - self._in_s)

    def paged_out(self, seconds: float) -> None:
        """Writing a page took so long."""
        self._out_s += _NEW_COST_WEIGHT * (seconds - self._out_s)

    def victim(self, waiter: Rank, rank: Callable[[str], Rank]) -> tuple[Trainee, Way] | None:
        """Choose who goes for a policy that waits, and charge the page to the credit.

        Those without work go first (the longest unused first, and before all those that a checkpoint covers), then one
        that has work, but whose tenant is not before the waiter's.

        Args:
            waiter: rank of the tenant that waits.
            rank: gives a tenant's rank.
        """
        found: dict[int, tuple[Trainee, Way]] = {}
        for trainee, _ in islice(self._residents.values(), _SEARCHED):
            choice = self._judge(trainee)
            if choice is not None and not (choice[0] == 2 and (2 in found or rank(trainee.policy.tenant) < waiter)):
                found.setdefault(choice[0], (trainee, choice[1]))
                if choice[0] == 0:
                    break
        if not found:
            return None
        trainee, way = found[min(found)]
        self._credit_s -= self._in_s + (self._out_s if way == "checkpoint" else 0.0)
        return trainee, way

    def stuck(self, now: float) -> list[Trainee]:
        """Return policies without work that cannot be checkpointed as they are, and were not used for long."""
        longest = islice(self._residents.values(), _SEARCHED)
        return [
            trainee
            for trainee, last in longest
            if now - last >= self._stuck_s and trainee.cornered and not (trainee.in_flight or trainee.has_work)
        ]

    def _judge(self, trainee: Trainee) -> tuple[int, Way] | None:
        """Say how gladly a policy is let go (0 most), and how; None if it stays."""
        if trainee.vacating:
            return None
        if trainee.in_flight or trainee.has_work:
            return (2, "checkpoint") if trainee.open and not trainee.checkpoint_fails else None
        if trainee.covered:
            return 0, "evict"
        return None if trainee.cornered else (1, "checkpoint")
