"""A trainer as the Training queue sees it: what is at home there, and what it has to do.

In: nothing but what `training.py` notes. Out: its credit. Never: a decision.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from services.master.lanes import Lanes
from services.master.ops import Op
from services.master.policies import PolicyKey
from services.master.roster import Worker
from services.master.trainees import Trainee


class Item(msgspec.Struct, eq=False):
    """One item of a group on its way; `op` is None for a checkpoint."""

    trainee: Trainee
    op: Op | None
    opening: int
    estimate_s: float


ItemKey = tuple[str, str, int, bool]
"""Tenant, policy, seq, and whether it is a checkpoint."""

Items = OrderedDict[ItemKey, Item]


class Trainer(msgspec.Struct, eq=False):
    """A trainer, the policies at home there, and its groups.

    Attributes:
        lanes: policies that have something to send.
        homed: policies at home here.
        residents: those of them with an open slot, the one used longest ago first.
        groups: items not answered yet, by task.
        alone: its one group holds an op that may kill it, so it gets nothing else meanwhile.
    """

    worker: Worker
    lanes: Lanes[Trainee]
    homed: dict[PolicyKey, Trainee]
    residents: OrderedDict[PolicyKey, Trainee]
    groups: dict[str, Items]
    alone: bool = False

    @property
    def credit(self) -> int:
        """Groups that it would take now."""
        if self.worker.leaving or self.alone:
            return 0
        return self.worker.register.credit.get("train", 1) - len(self.groups)

    @property
    def max_slots(self) -> int:
        """Policies that it holds in memory; 0 if it does not say."""
        stated = self.worker.register.detail.get("max_slots", "")
        return int(stated) if stated.isdecimal() else 0
