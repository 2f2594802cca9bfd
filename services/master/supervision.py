"""What health knows of processes and of scaling, as it told last; and processes that an operator has end.

In: `Supervised`, the whole picture each time; `DrainWorker`. Out: the same, for views and status; a worker that is told
to leave. Never: a picture of a health process that is not there any more, except to the one in its place: who was
to leave goes on leaving.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from joynexus.wire import ErrorCode
from joynexus.wire.back import BeatAck, InstanceRow, Supervised
from joynexus.wire.front import Done, DrainWorker
from services.master.events import BackMessage, FrontMessage
from services.master.named import worker_named
from services.master.outbox import Outbox, refuse
from services.master.roster import Roster

_NOTHING = Supervised()
_DRAINED = ("trainer", "inference", "env")
"""Health and the dashboard are given no work."""


class Supervision:
    """The newest word of health."""

    def __init__(self, outbox: Outbox, roster: Roster) -> None:
        self._outbox = outbox
        self._roster = roster
        self._told = _NOTHING

    def on_supervised(self, said: BackMessage, message: Supervised) -> None:
        """Take in what health knows."""
        self._roster.of(said)
        self._told = message
        self._outbox.answer(said, BeatAck())

    def on_drain(self, asked: FrontMessage, message: DrainWorker) -> None:
        """Have a worker finish what it has, and end."""
        if not asked.operator:
            raise refuse(ErrorCode.FORBIDDEN, "only an operator may drain a worker")
        able = itertools.chain.from_iterable(map(self._roster.living, _DRAINED))
        self._roster.drain(worker_named(message.worker, able, self.by_instance()), by=asked.tenant)
        self._outbox.answer(asked, Done())

    @property
    def told(self) -> Supervised:
        """Return what health knows; nothing if there is no health now."""
        return self._told if any(self._roster.living("health")) else _NOTHING

    def by_instance(self) -> Mapping[str, InstanceRow]:
        """Return the processes whose instance is known."""
        return {row.instance: row for row in self.told.instances if row.instance}
