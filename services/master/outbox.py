"""What the parts of the core share: where commands go, what waits for the journal, and what waits for time.

In: what a part wants sent, saved, said, or done later. Out: commands, and calls back once the journal or the clock
says so. Never: a clock or randomness of its own, or a blob deleted that a restart might still want.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from common.journal.records import Record, key_of
from joynexus.wire import Buffer, ErrorCode, JoyNexusError, Message, failure
from services.master.commands import Command, DeleteBlobs, Log, Persist, Send, Waited
from services.master.events import BackMessage, FrontMessage, Peer
from services.master.recent import Recent

Saved = Callable[[], None]
Lost = Callable[[str], None]


class _Save(msgspec.Struct):
    number: int
    records: tuple[Record, ...]
    saved: Saved | None
    lost: Lost | None


class Outbox:
    """Collects commands while an event is handled.

    Args:
        new_id: gives ids that never repeat, not even after a restart.
        retry_s: pause before the journal is tried again.

    Attributes:
        now: time of the event that is being handled, in seconds of the shell's monotonic clock.
        recent: what went wrong lately.
    """

    def __init__(self, new_id: Callable[[], str], retry_s: float) -> None:
        self.now = 0.0
        self.new_id = new_id
        self.recent = Recent()
        self._retry_s = retry_s
        self._commands: list[Command] = []
        self._tokens = itertools.count(1)
        self._saves = 0
        self._open: dict[int, None] = {}  # numbers of what is not durable yet, and not undone, in order
        self._saving: dict[int, _Save] = {}
        self._unsaved: list[_Save] = []  # in the order in which they were said
        self._doomed: deque[tuple[int, tuple[str, ...]]] = deque()  # blobs, and the save that they wait for
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()

    # Messages

    def send(
        self, peer: Peer, message: Message, *, re: str = "", buffers: Sequence[Buffer] = (), deadline_ms: int = 0
    ) -> str:
        """Send a message and return its id."""
        id_ = self.new_id()
        self._commands.append(
            Send(peer=peer, message=message, id=id_, re=re, buffers=tuple(buffers), deadline_ms=deadline_ms)
        )
        return id_

    def answer(self, asked: FrontMessage | BackMessage, message: Message) -> None:
        """Answer a request."""
        self.send(asked.peer, message, re=asked.header.id)

    def delete_blobs(self, digests: Sequence[str]) -> None:
        """Delete blobs that nobody refers to, once all that was saved until now is durable.

        A master that goes down before finds in its journal what refers to them, and wants them.
        """
        self._doomed.append((self._saves, tuple(digests)))
        self._delete()

    def log(
        self, level: Literal["debug", "info", "warning", "error"], event: str, **fields: str | int | float | bool
    ) -> None:
        """Write a log line."""
        self.recent.note(self.now, level, event, fields)
        self._commands.append(Log(level=level, event=event, fields=fields))

    def waited(self, queue: str, since: float) -> None:
        """Say since when a piece of work has waited that is given to a worker now."""
        self._commands.append(Waited(queue, self.now - since))

    def take(self) -> list[Command]:
        """Give away the commands collected so far."""
        commands, self._commands = self._commands, []
        return commands

    # The journal

    def save(self, records: Sequence[Record], saved: Saved | None = None, lost: Lost | None = None) -> None:
        """Write records to the journal, then call `saved`.

        Args:
            records: written all or none.
            saved: called once they are durable: acknowledge, dispatch, free.
            lost: called with the reason if they could not be written: undo. Without it they must become durable
                sooner or later (results of work that was done), so they are tried again until they are, in order;
                while anything waits so, whoever can be told no is told no at once.
        """
        if self._unsaved and lost is not None:
            lost("the journal cannot be written at the moment")
            return
        self._saves += 1
        self._open[self._saves] = None
        save = _Save(self._saves, tuple(records), saved, lost)
        if self._unsaved:
            self._unsaved.append(save)
        else:
            self._persist(save)

    def persisted(self, token: int) -> None:
        """The journal has the records of this token."""
        save = self._saving.pop(token, None)
        if save is None:
            return
        self._close(save)
        if save.saved is not None:
            save.saved()

    def persist_failed(self, token: int, reason: str) -> None:
        """The journal could not write the records of this token."""
        save = self._saving.pop(token, None)
        if save is None:
            return
        self.log("error", "journal_write_failed", reason=reason, records=len(save.records))
        if save.lost is not None:
            self._close(save)
            save.lost(reason)
            return
        # What was said about the same things since then counts more, so it must not be overwritten later.
        saving = self._saving.values()
        newer = {key_of(record) for other in saving if other.number > save.number for record in other.records}
        save.records = tuple(record for record in save.records if key_of(record) not in newer)
        if not self._unsaved:
            self.after(self._retry_s, self._save_again)
        bisect.insort(self._unsaved, save, key=lambda waiting: waiting.number)

    def _save_again(self) -> None:
        waiting, self._unsaved = self._unsaved, []
        for save in waiting:
            self._persist(save)

    def _persist(self, save: _Save) -> None:
        token = next(self._tokens)
        self._saving[token] = save
        self._commands.append(Persist(token=token, records=save.records))

    def _close(self, save: _Save) -> None:
        del self._open[save.number]
        self._delete()

    def _delete(self) -> None:
        first = next(iter(self._open), self._saves + 1)
        while self._doomed and self._doomed[0][0] < first:
            self._commands.append(DeleteBlobs(digests=self._doomed.popleft()[1]))

    # Time

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call back once so much time has passed."""
        heapq.heappush(self._timers, (self.now + delay_s, next(self._timer_numbers), call))

    def run_timers(self) -> None:
        """Call back whoever's time has come."""
        while self._timers and self._timers[0][0] <= self.now:
            heapq.heappop(self._timers)[2]()

    def next_timer(self) -> float | None:
        """When the next call back is due."""
        return self._timers[0][0] if self._timers else None


def refuse(code: ErrorCode, sentence: str, *, retry_after_ms: int = 0) -> JoyNexusError:
    """Make the exception that answers the request at hand with a failure."""
    return JoyNexusError(failure(code, sentence, retry_after_ms=retry_after_ms))


def not_found(kind: str, name: str) -> JoyNexusError:
    """The one answer for what does not exist and for what is somebody else's."""
    return refuse(ErrorCode.NOT_FOUND, f"there is no {kind} '{name[:80]}' here: list yours, or check the name")


def not_saved(what: str, reason: str) -> JoyNexusError:
    """Nothing was accepted because the journal cannot be written."""
    sentence = f"{what} was not accepted because the service cannot write to its disk ({reason}): try again later"
    return refuse(ErrorCode.UNAVAILABLE, sentence, retry_after_ms=1000)
