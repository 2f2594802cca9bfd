"""How many bytes of answers wait in memory for peers that do not read them, and which peer gets no more for now.

In: what is sent to whom. Out: yes or no. Never: a count that a peer could make wrong: libzmq says when it has given a
frame to the network, or dropped it with its connection.

libzmq's high-water mark counts messages, of any size. So a frame is *marked* every now and then: when it has left, all
that was sent to that peer before it has left too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Protocol

MOST_OF_ONE = 64 * 1024**2
"""Bytes for one peer."""
MOST = 512 * 1024**2
"""Bytes for all peers of a door; with more, only those get something who have little unread."""
LITTLE = 1024 * 1024
MARK_BYTES = 32 * 1024
_REMEMBERED = 10_000


class Mark(Protocol):
    """Tells whether a frame has left (`zmq.MessageTracker`)."""

    @property
    def done(self) -> bool:
        """Whether it has."""
        ...


class _Peer:
    def __init__(self) -> None:
        self.marks: deque[tuple[Mark, int]] = deque()
        self.nbytes = 0
        self.unmarked = 0


class Unread:
    """The answers of one door that wait. One thread uses it."""

    def __init__(self) -> None:
        self._peers: dict[Hashable, _Peer] = {}
        self.nbytes = 0

    def may_send(self, to: Hashable) -> bool:
        """Tell whether a peer has read enough to be sent more."""
        peer = self._peers.get(to)
        if peer is None or not peer.marks:
            return True
        self._see(peer)
        if self.nbytes > MOST:
            self._see_all()
        return peer.nbytes < (MOST_OF_ONE if self.nbytes < MOST else LITTLE)

    def wants_mark(self, to: Hashable, nbytes: int) -> bool:
        """Tell whether the last frame of a message of so many bytes is to be marked."""
        peer = self._peers.get(to)
        return nbytes + (peer.unmarked if peer is not None else 0) >= MARK_BYTES

    def sent(self, to: Hashable, nbytes: int, mark: Mark | None) -> None:
        """A message was handed to libzmq."""
        peer = self._peers.get(to)
        if peer is None:
            if len(self._peers) >= _REMEMBERED:
                self._see_all()
            peer = self._peers[to] = _Peer()
        if mark is None:
            peer.unmarked += nbytes
            return
        nbytes += peer.unmarked
        peer.unmarked = 0
        peer.marks.append((mark, nbytes))
        peer.nbytes += nbytes
        self.nbytes += nbytes

    def _see(self, peer: _Peer) -> None:
        while peer.marks and peer.marks[0][0].done:
            nbytes = peer.marks.popleft()[1]
            peer.nbytes -= nbytes
            self.nbytes -= nbytes

    def _see_all(self) -> None:
        for to, peer in [*self._peers.items()]:
            self._see(peer)
            if not peer.marks:  # what is not marked is little
                del self._peers[to]
