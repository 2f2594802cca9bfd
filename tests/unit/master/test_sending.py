"""The shell's sending: what does not fit into a message is an error of one asker, never the end of the master."""

from __future__ import annotations

from collections import Counter

import pytest

from common.metrics import Figures
from joynexus.wire import Buffer, ErrorCode, Failure, decode
from joynexus.wire.back import PredictGroup, PredictItem
from joynexus.wire.front import Accepted
from services.master import service
from services.master.commands import Send
from services.master.events import Door, Peer
from services.master.oplog import OpLog
from services.master.service import MasterService

FRONT, BACK = Peer("front", b"t"), Peer("back", b"w")
LARGE = "x" * 2_000_000


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[Buffer]]:
    frames: list[list[Buffer]] = []

    def send(_socket: object, _peer: Peer, parts: list[Buffer], _unread: object) -> bool:
        frames.append(parts)
        return True

    monkeypatch.setattr(service, "send", send)
    return frames


@pytest.fixture
def shell() -> MasterService:
    """A master without sockets: only what sending needs."""
    master = object.__new__(MasterService)
    doors: tuple[Door, Door] = ("front", "back")
    master._sockets = dict.fromkeys(doors)  # type: ignore[assignment]  # nothing is sent through them here
    master._unread = {}
    master._oplog = OpLog(Figures())
    master.counts = Counter()
    return master


def test_an_answer_that_is_too_large_becomes_a_sentence(shell: MasterService, sent: list[list[Buffer]]) -> None:
    assert shell._send(Send(peer=FRONT, message=Accepted(policy=LARGE, seq=1), id="1", re="r1")) is None
    packet = decode(sent[0])
    assert isinstance(packet.message, Failure)
    assert (packet.header.re, packet.message.code) == ("r1", ErrorCode.TOO_LARGE)


def test_work_that_is_too_large_is_dropped_and_nothing_raises(shell: MasterService, sent: list[list[Buffer]]) -> None:
    item = PredictItem(
        request="0", tenant="a", policy="p", version=1, digest="d", act=LARGE.encode(), first_buffer=0, buffers=0
    )
    assert shell._send(Send(peer=BACK, message=PredictGroup(task="t", attempt=1, items=(item,)), id="1")) is None
    assert sent == []
