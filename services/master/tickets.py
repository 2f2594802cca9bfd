"""Tickets: which rollouts may begin, so that none is too old when it is trained on.

In: the number of a rollout, how many updates are published. Out: whether it may begin. Never: a finished rollout thrown
away because it came late: producers are held back before they begin; or a count that a restart could get wrong.

Rollouts are numbered, and update u is trained on the numbers u * batch to (u + 1) * batch - 1, first in, first out. So
the number itself is the ticket: a rollout that begins while `published` updates are in service acts with at least that
version, is trained on in update `number // batch`, and so is at most `max_staleness` updates old if

    number < (published + max_staleness + 1) * batch

which is AReaL's staleness admission (`infra/staleness_manager.py`: accepted + running may be (max_staleness + v + 1) *
batch at version v) without its counters. A rollout that was lost is done again under its number.
"""

from __future__ import annotations

import msgspec


class Tickets(msgspec.Struct, frozen=True, kw_only=True):
    """The staleness budget of one policy's rollouts.

    Attributes:
        batch: rollouts that each update is trained on (at least 1).
        max_staleness: updates that may lie between the version that acted and the one that is trained; 0 makes
            rollouts and training take turns.
    """

    batch: int
    max_staleness: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.max_staleness < 0:
            raise ValueError("batch must be at least 1 and max_staleness at least 0")

    def may_begin(self, number: int, published: int) -> bool:
        """Tell whether a rollout may begin.

        Args:
            number: of the rollout, from 0.
            published: updates whose version is published: 0 while only the version that was there at first is.
        """
        return number < (published + self.max_staleness + 1) * self.batch

    def update(self, number: int) -> int:
        """Return the update that is trained on a rollout."""
        return number // self.batch
