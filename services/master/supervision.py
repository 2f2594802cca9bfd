"""What health knows of processes and of scaling, as it told last.

In: `Supervised`, the whole picture each time. Out: the same, for views and status. Never: a picture of a health process
that is not there any more, but to the one that has come in its place: who was to leave goes on leaving.
"""

from __future__ import annotations

from collections.abc import Mapping

from joynexus.wire.back import BeatAck, InstanceRow, Supervised
from services.master.events import BackMessage
from services.master.outbox import Outbox
from services.master.roster import Roster

_NOTHING = Supervised()


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

    @property
    def told(self) -> Supervised:
        """Return what health knows; nothing if there is no health now."""
        return self._told if any(self._roster.living("health")) else _NOTHING

    def by_instance(self) -> Mapping[str, InstanceRow]:
        """Return the processes whose instance is known."""
        return {row.instance: row for row in self.told.instances if row.instance}
