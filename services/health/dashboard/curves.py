"""A job as it is watched: its newest state, and its whole curve, of which only what is new is asked for.

In: answers of a `Source`. Out: `JobPicture`. Never: a curve asked for twice, or more than `PAGES` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from joynexus.wire.front import JobInfo, UpdatePoint
    from services.health.dashboard.source import Source

PAGES = 8
"""Answers for one curve that are asked for in one go; the rest follows a second later."""


class JobPicture:
    """What is known of one job.

    Args:
        tenant, name: whose it is, and its name.

    Attributes:
        info: its newest state; its own curves are only what came last.
        losses, updates: the whole curves so far.
        at: when it came, by the clock of whoever asks.
        watchers: streams that follow it.
    """

    def __init__(self, tenant: str, name: str) -> None:
        self.tenant, self.name = tenant, name
        self.info: JobInfo | None = None
        self.losses: list[float] = []
        self.updates: list[UpdatePoint] = []
        self.at = float("-inf")
        self.watchers = 0

    @property
    def known(self) -> bool:
        """Return whether the master ever told of it."""
        return self.info is not None

    async def follow(self, source: Source, session: str, clock: Callable[[], float]) -> None:
        """Ask for its state, and for what is new of its curve.

        Raises:
            JoyNexusError: what the master answered instead.
        """
        for _ in range(PAGES):
            since = max(len(self.losses), len(self.updates))
            info = await source.job(session, self.tenant, self.name, since)
            # Two who ask at once are told the same: what comes second replaces what came first.
            self.losses[since:] = info.losses
            self.updates[since:] = info.updates
            self.info, self.at = info, clock()
            if not info.losses and not info.updates:
                return
            if info.done <= max(len(self.losses), len(self.updates)):
                return
