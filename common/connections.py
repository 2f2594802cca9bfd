"""Which connections there are, whose, and which of them must go: bounds for strangers and for whoever has a key.

In: news of connections, the first and every further word of each, how much each has sent. Out: those to hang up on.
Never: a socket, a clock, or memory for more connections than there are.

A connection is *new* until its handshake is over or given up, *mute* if it has said nothing since, and *spoken* for
whom it speaks otherwise. Of too many new ones the oldest goes (a peer with a key has spoken within milliseconds), of
too many mute ones too (it comes back by itself), and of too many of one owner the one that was silent for longest: the
newest is the one that a client that was started again needs.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Id = tuple[str, bytes]
"""Door and routing id of a connection."""
Place = tuple[int, int]
"""Descriptor, and inode of the socket there: descriptors are used again."""

Reason = Literal["silent", "connections", "backlog"]

_SLACK_BYTES = 64 * 1024
"""Handshakes, and whatever else is too little to matter."""
_BEAT_BYTES_PER_S = 64
"""More than heartbeats take: a PING and a PONG in 2 s, each of some 40 bytes."""


class Bounds(NamedTuple):
    """How much there may be.

    Attributes:
        new, mute: connections that are new, and that say nothing.
        spoken: all others together.
        of_one: of these, those of one owner.
        backlog_bytes: what one connection may have sent that has not come out as messages; an owner has twice as much.
    """

    new: int
    mute: int
    spoken: int
    of_one: int
    backlog_bytes: int


@dataclass(slots=True)
class Connection:
    """One connection.

    Attributes:
        read: bytes that came out of it as messages.
        marked: `read` as it was at `Connections.mark`.
        beats: bytes that may have been heartbeats, as of `measured_at`.
    """

    place: Place
    since: float
    owner: str = ""
    read: int = 0
    marked: int = 0
    beats: float = 0.0
    measured_at: float = 0.0


class Ending(NamedTuple):
    """Hang up on a connection."""

    place: Place
    owner: str
    reason: Reason
    why: str


def on_the_line(nbytes: int) -> int:
    """Return how many bytes a frame of so many takes on an encrypted connection (RFC 26: 33 more; RFC 23: 2 or 9)."""
    encrypted = nbytes + 33
    return encrypted + (2 if encrypted <= 255 else 9)


class Connections:
    """All connections of a process's doors.

    Args:
        bounds: how much there may be.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.new: dict[int, Connection] = {}  # by descriptor, oldest first
        self.mute: dict[int, Connection] = {}
        self.spoken: dict[Id, Connection] = {}
        self._ids: dict[int, Id] = {}  # of those that have spoken, by descriptor
        self._owners: dict[str, OrderedDict[Id, None]] = {}  # longest silent first

    def accepted(self, place: Place, now: float) -> Iterator[Ending]:
        """Somebody has come."""
        descriptor, inode = place
        id_ = self._ids.get(descriptor)
        if id_ is not None:
            if self.spoken[id_].place == (descriptor, inode):
                return  # its first word was faster than the news of it
            self._drop(id_)
        self.new.pop(descriptor, None)
        self.mute.pop(descriptor, None)
        self.new[descriptor] = Connection(place, now, measured_at=now)
        yield from self._too_many(self.new, self._bounds.new)

    def closed(self, descriptor: int, there: Place | None) -> None:
        """A connection that has said nothing has gone, unless it is what is `there` now.

        News of several doors come in any order: this one may be of the connection that was there before.
        """
        for those in (self.new, self.mute):
            if descriptor in those and those[descriptor].place != there:
                del those[descriptor]

    def heard(self, id_: Id, nbytes: int, now: float, who: Callable[[], tuple[Place, str] | None]) -> Iterator[Ending]:
        """A message came.

        Args:
            id_: whence.
            nbytes: its size on the line.
            now: when.
            who: gives place and owner, asked at a connection's first word; None if it has gone.
        """
        known = self.spoken.get(id_)
        if known is not None:
            known.read += nbytes
            self._owners[known.owner].move_to_end(id_)
            return
        found = who()
        if found is None:
            return
        place, owner = found
        before = self._ids.get(place[0])
        if before is not None:
            earlier = self.spoken[before]
            self._drop(before)
            if earlier.place == place:  # one of the two has gone, and the next word says which
                earlier.owner = ""
                earlier.read += nbytes
                self.new[place[0]] = earlier
                yield from self._too_many(self.new, self._bounds.new)
                return
        connection = self.new.pop(place[0], None) or self.mute.pop(place[0], None)
        if connection is None or connection.place != place:
            connection = Connection(place, now, measured_at=now)
        connection.owner = owner
        connection.read += nbytes
        self.spoken[id_] = connection
        self._ids[place[0]] = id_
        self._owners.setdefault(owner, OrderedDict())[id_] = None
        if len(self._owners[owner]) > self._bounds.of_one:
            yield self._end_one_of(owner, f"more than {self._bounds.of_one} connections of one tenant or worker key")
        if len(self.spoken) > self._bounds.spoken:
            most = max(self._owners, key=lambda name: len(self._owners[name]))
            yield self._end_one_of(most, f"more than {self._bounds.spoken} connections, and most are its")

    def settled(self, before: float) -> Iterator[Ending]:
        """Whoever has come before then has made a handshake, if he is still there."""
        while self.new:
            descriptor, connection = next(iter(self.new.items()))
            if connection.since >= before:
                return
            del self.new[descriptor]
            self.mute[descriptor] = connection
            yield from self._too_many(self.mute, self._bounds.mute)

    def mark(self) -> list[Place]:
        """Note how much of each was read until now, and return where to look how much has come: see `measured`."""
        connections = self._all()
        for connection in connections:
            connection.marked = connection.read
        return [connection.place for connection in connections]

    def measured(self, received: Mapping[Place, int | None], now: float) -> Iterator[Ending]:
        """See how much each has sent that has not come out, and forget who has gone.

        What came in all, less what was read before that was looked up, is at least what heartbeats have sent. So they
        have sent no more than the least of this so far, and what they can have sent since.

        Args:
            received: bytes that had come from there, looked up after the last `mark`; None if it has gone.
            now: when.
        """
        backlogs: Counter[str] = Counter()
        most = self._bounds.backlog_bytes
        for connection in self._all():
            sent = received.get(connection.place, 0)  # 0: it came since
            if sent is None:
                self._forget(connection)
                continue
            sent = max(sent, connection.marked)
            beats = connection.beats + _BEAT_BYTES_PER_S * (now - connection.measured_at)
            connection.beats, connection.measured_at = min(beats, sent - connection.marked), now
            backlog = max(0, int(sent - connection.read - connection.beats - _SLACK_BYTES))
            backlogs[connection.owner] += backlog
            if backlog > most or (backlog and backlogs[connection.owner] > 2 * most):
                backlogs[connection.owner] -= backlog
                self._forget(connection)
                why = f"{backlog} bytes came that are no message yet, or waited too long to be read"
                yield Ending(connection.place, connection.owner, "backlog", why)

    def _all(self) -> list[Connection]:
        return [*self.new.values(), *self.mute.values(), *self.spoken.values()]

    def _too_many(self, those: dict[int, Connection], most: int) -> Iterator[Ending]:
        if len(those) > most:
            place = those.pop(next(iter(those))).place
            yield Ending(place, "", "silent", f"more than {most} connections say nothing")

    def _end_one_of(self, owner: str, why: str) -> Ending:
        id_ = next(iter(self._owners[owner]))
        place = self.spoken[id_].place
        self._drop(id_)
        return Ending(place, owner, "connections", why)

    def _forget(self, connection: Connection) -> None:
        descriptor = connection.place[0]
        for those in (self.new, self.mute):
            if those.get(descriptor) is connection:
                del those[descriptor]
        id_ = self._ids.get(descriptor)
        if id_ is not None and self.spoken[id_] is connection:
            self._drop(id_)

    def _drop(self, id_: Id) -> None:
        connection = self.spoken.pop(id_)
        del self._ids[connection.place[0]]
        of_owner = self._owners[connection.owner]
        del of_owner[id_]
        if not of_owner:
            del self._owners[connection.owner]
