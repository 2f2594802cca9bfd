"""A real master that cannot write its journal, or dies around the fsync: what was acknowledged is there, once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.failpoints import VARIABLE
from joynexus.wire import ErrorCode, Failure, encode
from joynexus.wire.front import Accepted, AcquireLease, CreatePolicy, GetPolicy, Lease, Ping, PolicyInfo, Pong
from tests.chaos.verdict import Verdict
from tests.process.master_process import MasterProcess, Peer
from tests.process.test_master import SPEC, forward
from tests.waiting import until

OPS = 3
SHORT_LEASE_MS = 15_000
"""Short enough to wait for its end, long enough not to end on a machine that has much else to do."""


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of failpoints of the processes that are started from now on."""
    folder = tmp_path / "points"
    folder.mkdir()
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


@contextmanager
def driving(
    master: MasterProcess, name: str = "laptop", tenant: str = "acme", ttl_ms: int = 300_000
) -> Iterator[tuple[Peer, str]]:
    """A tenant that drives a policy, with some ops behind it."""
    with master.tenant(name, tenant=tenant) as peer:
        assert isinstance(peer.ask(CreatePolicy(policy="p", spec=SPEC)).message, PolicyInfo)
        lease = peer.ask(AcquireLease(policy="p", holder=name, ttl_ms=ttl_ms)).message
        assert isinstance(lease, Lease)
        for seq in range(1, OPS + 1):
            assert isinstance(op(peer, lease.lease, seq), Accepted)
        yield peer, lease.lease


def op(peer: Peer, lease: str, seq: int) -> object:
    """Send an op; return what came back."""
    message, buffers = forward(lease, seq)
    return peer.ask(message, buffers).message


@pytest.mark.case(16, "the disk is full, or breaks, as an op is written down")
@pytest.mark.parametrize("fault", ["enospc", "eio"])
def test_op_that_cannot_be_written_is_refused_before_it_is_acknowledged_and_works_once_there_is_room(
    tmp_path: Path, points: Path, verdict: Verdict, fault: str
) -> None:
    with MasterProcess(tmp_path) as master, driving(master) as (peer, lease):
        (points / "master.append").write_text(fault)
        refused = op(peer, lease, OPS + 1)
        with verdict("I3"):
            assert isinstance(refused, Failure)
            assert (refused.code, refused.retry_after_ms > 0) == (ErrorCode.UNAVAILABLE, True)
        with verdict("I5"), driving(master, "other", tenant="umbrella") as (other, theirs):
            assert isinstance(op(other, theirs, OPS + 1), Accepted)
        assert isinstance(op(peer, lease, OPS + 1), Accepted)
        master.kill()
        master.start()
        with verdict("I1"):
            info = peer.ask(GetPolicy(policy="p")).message
            assert isinstance(info, PolicyInfo)
            assert info.next_seq == OPS + 2
        with verdict("I6"):
            assert "journal_refuses" in master.log_text()
            assert {"enospc": "No space left", "eio": "Input/output error"}[fault] in master.log_text()


@pytest.mark.case(1, "the master is killed around the fsync of an op")
@pytest.mark.parametrize(("point", "written"), [("master.append", 0), ("master.after_fsync_before_ack", 1)])
def test_op_whose_acknowledgement_was_lost_with_the_master_is_there_once(
    tmp_path: Path, points: Path, verdict: Verdict, point: str, written: int
) -> None:
    with MasterProcess(tmp_path) as master, driving(master) as (peer, lease):
        (points / point).write_text("kill")
        message, buffers = forward(lease, OPS + 1)
        peer.send(encode(message, id="lost", buffers=buffers))
        with verdict("I6"):
            until((points / f"{point}.struck").exists)
        master.kill()
        master.start()
        with verdict("I1"):
            info = peer.ask(GetPolicy(policy="p")).message
            assert isinstance(info, PolicyInfo)
            assert info.next_seq == OPS + 1 + written
            assert isinstance(op(peer, lease, OPS + 1), Accepted)
            info = peer.ask(GetPolicy(policy="p")).message
            assert isinstance(info, PolicyInfo)
            assert info.next_seq == OPS + 2
        with verdict("I3"):
            assert isinstance(peer.ask(Ping()).message, Pong)


@pytest.mark.case(5, "a tenant's client is killed in its loop")
def test_policy_of_a_killed_client_goes_to_the_next_one_after_its_silence_with_every_op(
    tmp_path: Path, verdict: Verdict
) -> None:
    with MasterProcess(tmp_path) as master:
        with driving(master, ttl_ms=SHORT_LEASE_MS) as (_, old):
            pass  # the connection goes, and nobody gave the lease back
        with master.tenant("another-laptop") as peer:
            ask = AcquireLease(policy="p", holder="another-laptop", ttl_ms=SHORT_LEASE_MS)
            refused = peer.ask(ask).message
            with verdict("I3"):
                assert isinstance(refused, Failure)
                assert refused.code is ErrorCode.CONFLICT
                until(lambda: isinstance(peer.ask(ask).message, Lease))
            with verdict("I1"):
                lease = peer.ask(ask).message
                assert isinstance(lease, Lease)
                assert lease.next_seq == OPS + 1
                late = op(peer, old, OPS + 1)
                assert isinstance(late, Failure)
                assert isinstance(op(peer, lease.lease, OPS + 1), Accepted)
