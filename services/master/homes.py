"""Where policies live: each in the memory of one trainer with its backbone.

In: policies that have something to send, trainers that come. Out: a home, the best there is; word to those that had to
wait for one. Never: a policy in two trainers, or all that wait given to the first trainer that comes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from services.master.outbox import Outbox
from services.master.placement import choose
from services.master.policy import Policy, PolicyKey
from services.master.trainees import Trainee
from services.master.trainers import Trainer

_AT_ONCE, _EVERY_S = 16, 0.05
"""Policies that wait for a home get one so many at a time."""


class Homes:
    """The homes of all policies.

    Args:
        trainers: that are there, by name.
        queue: has policies wait for their turn with a trainer.
    """

    def __init__(self, outbox: Outbox, trainers: Mapping[str, Trainer], queue: Callable[..., None]) -> None:
        self._outbox = outbox
        self._trainers = trainers
        self._queue = queue
        self._homeless: dict[str, OrderedDict[PolicyKey, Trainee]] = {}  # by backbone

    def with_backbone(self, backbone: str) -> Iterable[Trainer]:
        """Return the trainers in which policies of this backbone may live."""
        there = (trainer for trainer in self._trainers.values() if not trainer.worker.leaving)
        return (trainer for trainer in there if trainer.backbone == backbone)

    def of(self, trainee: Trainee) -> Trainer | None:
        """Return a policy's trainer; if it has none, the best one becomes it; without any, it waits for one."""
        if trainee.home is None:
            places = [trainer.place(self._outbox.now) for trainer in self.with_backbone(trainee.policy.spec.backbone)]
            place = choose(places, trainee.slot_nbytes)
            if place is None:
                self.wait(trainee)
                return None
            self._trainers[place.name].settle(trainee)
        return self._trainers[trainee.home.name] if trainee.home is not None else None

    def wait(self, trainee: Trainee) -> None:
        """A policy has work and no home."""
        self._homeless.setdefault(trainee.policy.spec.backbone, OrderedDict())[trainee.policy.key] = trainee

    def forget(self, policy: Policy) -> None:
        """A policy is deleted."""
        if (waiting := self._homeless.get(policy.spec.backbone)) is not None:
            waiting.pop(policy.key, None)

    def find(self, backbone: str) -> None:
        """Give homes to a few of those that wait, and a little later to others.

        So the first trainer after a restart does not get them all, and no event takes as long as there are policies.
        """
        waiting = self._homeless.get(backbone)
        if not waiting or not any(True for _ in self.with_backbone(backbone)):
            return
        self._queue(*[waiting.popitem(last=False)[1] for _ in range(min(_AT_ONCE, len(waiting)))])
        if waiting:
            self._outbox.after(_EVERY_S, lambda: self.find(backbone))
