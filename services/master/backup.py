"""Backups: while somebody copies the journal, and then the blobs that it refers to, no blob is deleted.

In: `BackupBegin`, `BackupEnd`, the passing of time. Out: tickets, and whether blobs must stay. Never: a ticket before
all that was decided until then is in the journal (a blob that has lost its last reference may be gone before its record
is), or blobs that stay for ever because whoever copied them was killed.
"""

from __future__ import annotations

from joynexus.wire import ErrorCode
from joynexus.wire.front import BackupBegin, BackupEnd, BackupTicket, Done
from services.master.events import FrontMessage
from services.master.outbox import Outbox, not_saved, refuse

MOST_S = 3600.0
"""A ticket is good for so long at most: whoever needs longer takes another meanwhile."""


class Backups:
    """The copies that are being made. A master started anew has forgotten them."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._until: dict[str, float] = {}

    @property
    def under_way(self) -> bool:
        """Tell whether blobs must stay."""
        self._until = {ticket: until for ticket, until in self._until.items() if until > self._outbox.now}
        return bool(self._until)

    def on_begin(self, asked: FrontMessage, message: BackupBegin) -> None:
        """Keep all blobs from now on; answered when the journal has all that was decided until now."""
        _check(asked)
        if not 1.0 <= message.ttl_s <= MOST_S:  # also refuses NaN
            raise refuse(ErrorCode.INVALID, f"ttl_s must lie between 1 and {MOST_S:g}, not {message.ttl_s:g}")
        ticket = self._outbox.new_id()
        self._until[ticket] = self._outbox.now + message.ttl_s

        def lost(reason: str) -> None:
            self._until.pop(ticket, None)
            self._outbox.answer(asked, not_saved("the backup", reason).failure)

        self._outbox.save([], lambda: self._outbox.answer(asked, BackupTicket(ticket=ticket)), lost)

    def on_end(self, asked: FrontMessage, message: BackupEnd) -> None:
        """Delete blobs again."""
        _check(asked)
        self._until.pop(message.ticket, None)
        self._outbox.answer(asked, Done())


def _check(asked: FrontMessage) -> None:
    if not asked.operator:
        raise refuse(ErrorCode.FORBIDDEN, "only an operator's key may make backups")
