"""What is refused is counted, and logged with the key's name and never its secret, without a flood of lines."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
import zmq

from common import refusals
from common.refusals import Refusals
from joynexus.keys import ClusterFile, KeyPair
from joynexus.transport import dial
from joynexus.wire import ErrorCode
from joynexus.wire.front import BlobBegin, ClusterStatus, CreatePolicy, Ping, Status
from tests.process.master_process import MasterProcess, Peer, short_folder
from tests.process.test_master import SPEC, failed


class Lines:
    def __init__(self) -> None:
        self.written: list[tuple[str, str, int]] = []

    def warning(self, _event: str, *, reason: str, key: str, why: str, count: int) -> None:
        self.written.append((reason, key, count))


def test_a_flood_of_refusals_is_counted_in_full_and_logged_in_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines()
    monkeypatch.setattr(refusals, "log", lines)
    noted = Refusals("refused")
    for _ in range(1000):
        noted.note("scope", "robot", "no")
    noted.note("scope", "laptop", "no")
    assert noted.counts == Counter(scope=1001)
    assert lines.written == [*(("scope", "robot", 2**power) for power in range(10)), ("scope", "laptop", 1)]


def test_strangers_without_number_take_bounded_memory_and_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines()
    monkeypatch.setattr(refusals, "log", lines)
    noted = Refusals("refused")
    for number in range(20_000):
        noted.note("handshake", f"unknown ({number})", "no")
    assert noted.counts == Counter(handshake=20_000)
    assert len(lines.written) < 1100


def counts(operator: Peer) -> dict[str, int]:
    status = operator.ask(Status()).message
    assert isinstance(status, ClusterStatus)
    return status.counts


def test_an_operator_sees_what_was_refused_and_a_tenant_does_not() -> None:
    with short_folder() as folder, MasterProcess(Path(folder)) as master:
        boss = ClusterFile.load(master.keyring.issue("boss", tenant="ops", operator=True))
        with Peer(boss) as operator, master.tenant("reading-robot", scope="read") as reader:
            for _ in range(3):
                assert failed(reader.ask(CreatePolicy(policy="p", spec=SPEC))).code is ErrorCode.FORBIDDEN
            blob = BlobBegin(digest="0" * 64, nbytes=1)
            assert failed(reader.ask(blob, bulk=True)).code is ErrorCode.FORBIDDEN
            reader.send([b"no", b"message"])
            assert failed(reader.receive()).code is ErrorCode.INVALID
            assert (counts(operator)["scope"], counts(operator)["malformed"]) == (4, 1)
            assert counts(reader) == {}
            stranger, context = KeyPair.generate(), zmq.Context()
            line = dial(context, boss.control, boss.server_public, stranger)
            deadline = time.monotonic() + 20
            while not counts(operator).get("handshake"):
                assert time.monotonic() < deadline, counts(operator)
                operator.ask(Ping())
            line.close(0)
            context.term()
            text = master.log_text()
            assert "reading-robot" in text
            assert stranger.public[:8] in text
            for pair in (stranger, reader.cluster.keys(), boss.keys()):
                assert pair.secret not in text
