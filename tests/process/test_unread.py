"""A peer that reads nothing has a bounded number of bytes waiting; libzmq says when they have left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from joynexus.transport import Socket, receive_frames
from services.master.doors import send
from services.master.events import Peer
from services.master.unread import MOST_OF_ONE, Unread
from tests.process.door import Door
from tests.process.master_process import dial_deaf
from tests.waiting import until as wait

MIB = 2**20


@pytest.fixture
def deaf(door: Door) -> Iterator[Socket]:
    """A connection that has said a word and reads nothing."""
    socket = dial_deaf(door.context, door.laptop, door.address)
    socket.send(b"hello")
    yield socket
    socket.close(0)


def fill(door: Door, answers: Unread) -> Peer:
    """Answer until nothing more is taken."""
    assert door.router.poll(60_000)
    peer = Peer("front", receive_frames(door.router)[0].bytes)
    sent = 0
    while send(door.router, peer, [b"head", bytes(MIB)], answers):
        sent += 1
        assert sent < 500
    assert sent >= MOST_OF_ONE // MIB
    return peer


def test_bytes_that_wait_for_a_peer_that_reads_nothing_are_bounded_and_go_when_it_reads(
    door: Door, deaf: Socket
) -> None:
    answers = Unread()
    peer = fill(door, answers)
    assert answers.nbytes <= MOST_OF_ONE + 2 * MIB

    def read() -> bool:
        while deaf.poll(0):
            deaf.recv_multipart()
        return answers.may_send(peer) and answers.nbytes == 0

    wait(read)


def test_what_waits_for_a_peer_that_has_gone_is_forgotten(door: Door, deaf: Socket) -> None:
    answers = Unread()
    peer = fill(door, answers)
    deaf.close(0)

    def forgotten() -> bool:
        door.router.poll(0)  # as the master does: libzmq looks at its sockets when they are used
        return answers.may_send(peer) and answers.nbytes == 0

    wait(forgotten, 60)
