"""A real master process on loopback: who gets in, what survives, what is kept."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import blake3
import numpy as np
import pytest

import joynexus
from joynexus.client import _client
from joynexus.contract import Contract
from joynexus.specs import PolicySpec
from joynexus.tenants import TenantLimitsFile
from joynexus.wire import Array, ArrayPacker, ErrorCode, Failure, JoyNexusError, Message, Packet, encode
from joynexus.wire.back import Beat, BeatAck, Register, Registered
from joynexus.wire.front import (
    Accepted,
    AcquireLease,
    Act,
    BlobBegin,
    BlobChunk,
    BlobData,
    BlobOffset,
    BlobRead,
    CreatePolicy,
    ForwardBackward,
    GetPolicy,
    GetUsage,
    Hello,
    Lease,
    ListPolicies,
    OptimStep,
    Ping,
    PolicyInfo,
    PolicyList,
    Pong,
    Samples,
    Status,
    UsageReport,
    Welcome,
)
from tests.process.master_process import MasterProcess, Peer
from tests.waiting import until

SPEC = PolicySpec(
    backbone="stub", normalization="none", chunk=2, contract=Contract(robot="r", cameras=(), state_dim=3, action_dim=2)
)
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "raw_tenant.py"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterProcess]:
    """One master for the tests that do it no harm."""
    with MasterProcess(tmp_path_factory.mktemp("master")) as master:
        yield master


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterProcess]:
    with MasterProcess(tmp_path) as master:
        yield master


def names() -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield f"key-{number}"


NAMES = names()


@pytest.fixture
def tenant(shared: MasterProcess) -> Iterator[Peer]:
    with shared.tenant(next(NAMES)) as peer:
        yield peer


def failed(packet: Packet) -> Failure:
    assert isinstance(packet.message, Failure), packet.message
    return packet.message


def hello(peer: Peer) -> Welcome:
    answer = peer.ask(Hello(protocol_min=1, protocol_max=1, client="test")).message
    assert isinstance(answer, Welcome)
    return answer


def fine(peer: Peer) -> None:
    assert isinstance(peer.ask(Ping()).message, Pong)


# Who gets in


def test_tenant_is_welcomed_as_who_its_key_says(shared: MasterProcess) -> None:
    with shared.tenant("robot-7", tenant="blue", scope="act") as peer:
        welcome = hello(peer)
    assert (welcome.tenant, welcome.scope, welcome.operator) == ("blue", "act", False)


def test_client_of_another_protocol_is_told_to_upgrade(tenant: Peer) -> None:
    answer = tenant.ask(Hello(protocol_min=90, protocol_max=99, client="from the future"))
    assert failed(answer).code is ErrorCode.UPGRADE_REQUIRED


def test_client_library_of_another_protocol_says_which_side_to_change(
    shared: MasterProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_client, "PROTOCOL_MIN", 3)
    monkeypatch.setattr(_client, "PROTOCOL", 3)
    with pytest.raises(JoyNexusError, match="upgrade the service, or install an older client"):
        joynexus.connect(shared.keyring.issue("early", tenant="early"))


def test_revoked_key_is_refused_at_its_next_message(shared: MasterProcess) -> None:
    with shared.tenant("shortlived") as peer:
        fine(peer)
        shared.keyring.registry.revoke("shortlived")
        assert failed(peer.ask(Ping())).code is ErrorCode.FORBIDDEN


def test_scope_of_the_key_is_the_limit(shared: MasterProcess) -> None:
    with shared.tenant("viewer", scope="read") as peer:
        assert failed(peer.ask(CreatePolicy(policy="p", spec=SPEC))).code is ErrorCode.FORBIDDEN
        assert isinstance(peer.ask(ListPolicies()).message, PolicyList)


def test_workers_message_is_refused_at_the_front_and_a_tenants_at_the_back(shared: MasterProcess, tenant: Peer) -> None:
    assert failed(tenant.ask(Beat(progress=1, phase="idle", busy_s=0.0))).code is ErrorCode.FORBIDDEN
    with shared.worker("env") as worker:
        assert failed(worker.ask(CreatePolicy(policy="p", spec=SPEC))).code is ErrorCode.FORBIDDEN


def test_worker_registers_only_as_what_its_key_claims(shared: MasterProcess) -> None:
    register = Register(role="trainer", incarnation="i1", pid=1, credit={"train": 1}, backbone_name="stub")
    with shared.worker("env") as impostor:
        assert failed(impostor.ask(register)).code is ErrorCode.FORBIDDEN
        assert failed(impostor.ask(Beat(progress=0, phase="", busy_s=0.0))).code is ErrorCode.NOT_REGISTERED
    with shared.worker("trainer") as trainer:
        answer = trainer.ask(register).message
        assert isinstance(answer, Registered)
        assert isinstance(trainer.ask(Beat(progress=0, phase="", busy_s=0.0)).message, BeatAck)


def test_tenants_see_neither_each_other_nor_a_difference_to_nothing(shared: MasterProcess, tenant: Peer) -> None:
    assert isinstance(tenant.ask(CreatePolicy(policy="secret", spec=SPEC)).message, PolicyInfo)
    with shared.tenant("rival-key", tenant="rival") as rival:
        theirs = failed(rival.ask(GetPolicy(policy="secret")))
        nothing = failed(rival.ask(GetPolicy(policy="absent")))
    assert theirs.code is nothing.code is ErrorCode.NOT_FOUND
    assert theirs.message.replace("secret", "absent") == nothing.message


def test_complete_tenant_in_plain_pyzmq_and_msgpack(shared: MasterProcess) -> None:
    cluster = shared.keyring.issue("plain", tenant="plain")
    run = subprocess.run(
        [sys.executable, str(EXAMPLE), str(cluster)], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "tenant plain with scope all" in run.stdout


# What survives


def test_garbage_is_answered_and_survived(tenant: Peer) -> None:
    for frames in (
        [b""],
        [b"x"] * 3,
        [os.urandom(100) for _ in range(5)],
        [b"JNX1", b"\xc1", b""],
        [b"JNX1", b"\x91" * 16_000, b""],
        [b"x"] * 3000,
        encode(Ping(), id="x" * 65),
    ):
        tenant.send(frames)
        assert failed(tenant.receive()).code is ErrorCode.INVALID
    fine(tenant)


def test_unknown_kind_and_broken_body_are_refused_under_their_request(tenant: Peer) -> None:
    frames = encode(Ping(), id="m1")
    frames[2] = b"\xc1"
    tenant.send(frames)
    answer = tenant.receive()
    assert (answer.header.re, failed(answer).code) == ("m1", ErrorCode.INVALID)


def test_oversized_frame_cuts_its_sender_off_and_nobody_else(shared: MasterProcess, tenant: Peer) -> None:
    with shared.tenant(next(NAMES)) as glutton:
        fine(glutton)
        glutton.send([b"JNX1", b"", bytes(5 * 1024**2)])
        fine(tenant)
        # What was sent before the connection broke is lost; libzmq connects again by itself.
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            glutton.send(encode(Ping(), id="again"))
            if glutton.control.poll(500):
                break
        assert glutton.receive().header.re == "again"


def test_strangers_without_the_protocol_disturb_nobody(shared: MasterProcess, tenant: Peer) -> None:
    port = int(shared.addresses.front_control.rsplit(":", 1)[1])
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for index, stranger in enumerate(strangers):
        stranger.sendall([b"GET / HTTP/1.1\r\n\r\n", os.urandom(200), b"\xff\0\0\0\0\0\0\0\x01\x7f", b""][index % 4])
    fine(tenant)
    for stranger in strangers:
        stranger.close()
    fine(tenant)


def test_tenant_that_reads_nothing_blocks_nobody(shared: MasterProcess, tenant: Peer) -> None:
    with shared.tenant(next(NAMES)) as silent:
        for index in range(3000):
            silent.send(encode(Status(), id=f"s{index}"))
        start = time.monotonic()
        fine(tenant)
        assert time.monotonic() - start < 15.0  # a blocked master would stay so


# What is kept


def forward(lease: str, seq: int) -> tuple[Message, list[object]]:
    packer = ArrayPacker()
    samples = Samples(
        state=packer.add(np.full((1, 3), seq, np.float32)),
        action=packer.add(np.zeros((1, 2, 2), np.float32)),
        action_mask=packer.add(np.ones((1, 2), bool)),
        images=(),
        instructions=("go",),
    )
    return ForwardBackward(policy="p", lease=lease, seq=seq, samples=samples), list(packer.buffers)


def test_acknowledged_ops_survive_kill_minus_nine(master: MasterProcess) -> None:
    with master.tenant() as peer:
        hello(peer)
        assert isinstance(peer.ask(CreatePolicy(policy="p", spec=SPEC)).message, PolicyInfo)
        lease = peer.ask(AcquireLease(policy="p", holder="h")).message
        assert isinstance(lease, Lease)
        for seq in range(1, 11):
            message, buffers = (
                forward(lease.lease, seq) if seq % 2 else (OptimStep(policy="p", lease=lease.lease, seq=seq), [])
            )
            assert peer.ask(message, buffers).message == Accepted(policy="p", seq=seq)  # type: ignore[arg-type]
        master.kill()
        master.start()
        info = peer.ask(GetPolicy(policy="p"), timeout_s=30).message
        assert isinstance(info, PolicyInfo)
        assert info.next_seq == 11
        message, buffers = forward(lease.lease, 9)
        assert peer.ask(message, buffers).message == Accepted(policy="p", seq=9)  # type: ignore[arg-type]
        message, buffers = forward(lease.lease, 7)
        buffers[0] = np.zeros(3, np.float32).tobytes()
        assert failed(peer.ask(message, buffers)).code is ErrorCode.CONFLICT  # type: ignore[arg-type]
        gap = peer.ask(OptimStep(policy="p", lease=lease.lease, seq=99))
        assert failed(gap).code is ErrorCode.GAP


def test_sigterm_ends_the_master_in_order(master: MasterProcess) -> None:
    with master.tenant() as peer:
        fine(peer)
        assert isinstance(peer.ask(CreatePolicy(policy="p", spec=SPEC)).message, PolicyInfo)
        assert master.terminate() == 0
        master.start()
        info = peer.ask(GetPolicy(policy="p"), timeout_s=30).message
        assert isinstance(info, PolicyInfo)


def test_second_master_on_the_same_addresses_says_why_it_does_not_start(master: MasterProcess, tmp_path: Path) -> None:
    with master.tenant() as peer:
        fine(peer)
    other = tmp_path / "other"
    other.mkdir()
    with MasterProcess(other) as second:
        second.kill()
        second._settings.update({name: getattr(master.addresses, name) for name in ("front_control", "back_control")})
        second.start()
        assert second.process is not None
        assert second.process.wait(30) == 1
        assert "the master cannot start: cannot listen at" in second.log_text()
        assert "Traceback" not in second.log_text()


# Blobs


def upload(peer: Peer, data: bytes, *, chunk: int = 1024**2, stop_at: int = 1 << 60) -> Packet:
    digest = blake3.blake3(data).hexdigest()
    answer = peer.ask(BlobBegin(digest=digest, nbytes=len(data)), bulk=True)
    while isinstance(answer.message, BlobOffset) and not answer.message.complete:
        offset = answer.message.offset
        if offset >= stop_at:
            break
        answer = peer.ask(BlobChunk(digest=digest, offset=offset), (data[offset : offset + chunk],), bulk=True)
    return answer


def test_blob_goes_up_and_comes_down(shared: MasterProcess, tenant: Peer) -> None:
    data = os.urandom(2_500_000)
    digest = blake3.blake3(data).hexdigest()
    answer = upload(tenant, data).message
    assert answer == BlobOffset(digest=digest, offset=len(data), complete=True)
    read = tenant.ask(BlobRead(digest=digest, offset=1000, length=5000), bulk=True)
    assert read.message == BlobData(digest=digest, offset=1000, nbytes=len(data))
    assert bytes(read.buffers[0]) == data[1000:6000]
    with shared.worker("env") as worker:
        read = worker.ask(BlobRead(digest=digest, offset=0, length=10), bulk=True)
        assert bytes(read.buffers[0]) == data[:10]


@pytest.mark.parametrize("size", [0, 1])
def test_smallest_blobs_are_blobs(tenant: Peer, size: int) -> None:
    answer = upload(tenant, b"x" * size).message
    assert isinstance(answer, BlobOffset)
    assert answer.complete


def test_others_blob_is_neither_readable_nor_there(shared: MasterProcess, tenant: Peer) -> None:
    data = os.urandom(100_000)
    digest = blake3.blake3(data).hexdigest()
    upload(tenant, data)
    with shared.tenant(next(NAMES), tenant="rival") as rival:
        theirs = rival.ask(BlobRead(digest=digest, offset=0, length=10), bulk=True)
        nothing = rival.ask(BlobRead(digest="0" * 64, offset=0, length=10), bulk=True)
        assert failed(theirs).code is failed(nothing).code is ErrorCode.NOT_FOUND
        begun = rival.ask(BlobBegin(digest=digest, nbytes=len(data)), bulk=True).message
        assert begun == BlobOffset(digest=digest, offset=0)
        # What the rival appends under this digest does not reach the other's blob.
        spoilt = rival.ask(BlobChunk(digest=digest, offset=0), (bytes(len(data)),), bulk=True)
        assert failed(spoilt).code is ErrorCode.BAD_DATA
        assert isinstance(upload(rival, data).message, BlobOffset)
    read = tenant.ask(BlobRead(digest=digest, offset=0, length=10), bulk=True)
    assert bytes(read.buffers[0]) == data[:10]


def test_chunk_after_a_hole_says_where_to_go_on(tenant: Peer) -> None:
    data = os.urandom(3000)
    digest = blake3.blake3(data).hexdigest()
    tenant.ask(BlobBegin(digest=digest, nbytes=3000), bulk=True)
    tenant.ask(BlobChunk(digest=digest, offset=0), (data[:1000],), bulk=True)
    answer = tenant.ask(BlobChunk(digest=digest, offset=2000), (data[2000:],), bulk=True)
    assert answer.message == BlobOffset(digest=digest, offset=1000)


@pytest.mark.parametrize("digest", ["../../etc/passwd", "x" * 64, "A" * 64, "", "0" * 63])
def test_digest_that_is_none_is_refused(tenant: Peer, digest: str) -> None:
    for message in (
        BlobBegin(digest=digest, nbytes=1),
        BlobRead(digest=digest, offset=0, length=1),
    ):
        assert failed(tenant.ask(message, bulk=True)).code is ErrorCode.INVALID


def test_unfinished_uploads_count_against_the_quota(tmp_path: Path) -> None:
    with MasterProcess(tmp_path, quota_bytes=10_000) as master, master.tenant() as peer:
        fine(peer)
        assert isinstance(peer.ask(BlobBegin(digest="a" * 64, nbytes=6000), bulk=True).message, BlobOffset)
        assert isinstance(peer.ask(BlobBegin(digest="a" * 64, nbytes=6000), bulk=True).message, BlobOffset)
        refused = failed(peer.ask(BlobBegin(digest="b" * 64, nbytes=6000), bulk=True))
        assert refused.code is ErrorCode.TOO_LARGE
        with master.tenant("other", tenant="other") as other:
            assert isinstance(other.ask(BlobBegin(digest="b" * 64, nbytes=6000), bulk=True).message, BlobOffset)


def test_upload_goes_on_where_it_stopped_after_the_master_was_killed(master: MasterProcess) -> None:
    data = os.urandom(3_000_000)
    digest = blake3.blake3(data).hexdigest()
    with master.tenant() as peer:
        upload(peer, data, stop_at=2_000_000)
        master.kill()
        master.start()
        fine(peer)
        lost = peer.ask(BlobChunk(digest=digest, offset=2_097_152), (data[2_097_152:],), bulk=True)
        assert failed(lost).code is ErrorCode.INVALID  # begin again to learn where to go on
        begun = peer.ask(BlobBegin(digest=digest, nbytes=len(data)), bulk=True).message
        assert begun == BlobOffset(digest=digest, offset=2_097_152)
        complete = upload(peer, data).message
        assert isinstance(complete, BlobOffset)
        assert complete.complete
        master.kill()
        master.start()
        fine(peer)
        again = peer.ask(BlobBegin(digest=digest, nbytes=len(data)), bulk=True).message
        assert again == BlobOffset(digest=digest, offset=len(data), complete=True)


def test_bytes_moved_are_metered(shared: MasterProcess) -> None:
    with shared.tenant("metered-key", tenant="metered") as peer:
        upload(peer, os.urandom(10_000))
        usage = peer.ask(GetUsage()).message
    assert "10000" in repr(usage)


# Limits by tenant


def test_limits_take_effect_while_the_master_runs_and_a_damaged_file_changes_nothing(master: MasterProcess) -> None:
    path, deadline = master.folder / "keys" / "limits.json", time.monotonic() + 30

    def until(condition: Callable[[], bool]) -> None:
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.05)

    with master.tenant("key", tenant="blue") as blue, master.tenant("other", tenant="green") as green:
        default = hello(blue).max_inflight_ops
        TenantLimitsFile(path).change("blue", {"max_inflight_ops": 3})
        until(lambda: hello(blue).max_inflight_ops == 3)
        assert hello(green).max_inflight_ops == default
        path.write_bytes(b'{"blue": {"wieght": 1}}')
        until(lambda: b"limits_unreadable" in (master.folder / "master.log").read_bytes())
        assert hello(blue).max_inflight_ops == 3
        path.unlink()
        until(lambda: hello(blue).max_inflight_ops == default)


def test_prices_and_budgets_take_effect_while_the_master_runs_and_a_damaged_list_changes_nothing(
    master: MasterProcess,
) -> None:
    keys, said = master.folder / "keys", master.folder / "master.log"

    def prices(peer: Peer) -> dict[str, str]:
        report = peer.ask(GetUsage()).message
        assert isinstance(report, UsageReport)
        return report.prices

    def refused(peer: Peer) -> ErrorCode:
        state = Array(dtype="<f4", shape=(1, 2), frame=0)
        act = Act(policy="p", instructions=("go",), state=state, images=())
        return failed(peer.ask(act, (bytes(8),))).code

    with master.tenant("key", tenant="blue") as blue:
        assert prices(blue) == {}
        (keys / "prices.toml").write_text('currency = "EUR"\ntrainer_s = 0.1\n')
        until(lambda: prices(blue).get("trainer_s") == "0.1")
        TenantLimitsFile(keys / "limits.json").change("blue", {"budget": 0.0})
        until(lambda: refused(blue) is ErrorCode.OVER_BUDGET)
        (keys / "prices.toml").write_text("trainer_s = 0.1\n")
        until(lambda: b"prices_unreadable" in said.read_bytes())
        assert prices(blue)["currency"] == "EUR"
        assert refused(blue) is ErrorCode.OVER_BUDGET
        (keys / "prices.toml").unlink()
        until(lambda: refused(blue) is ErrorCode.NOT_FOUND)  # it has no policy p
        assert b"over_budget" in said.read_bytes()
