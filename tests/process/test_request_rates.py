"""A tenant that asks too often is told to come back, and its neighbours are served meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import zmq

from joynexus.client._io import Connection, answer_of
from joynexus.keys import ClusterFile
from joynexus.tenants import TenantLimitsFile
from joynexus.transport import dial
from joynexus.wire import encode
from joynexus.wire.front import ClusterStatus, Ping, Pong, Status
from tests.process.master_process import MasterProcess, Peer
from tests.process.test_master import fine


def flood(cluster: ClusterFile, enough: threading.Event) -> None:
    """Ask over several connections as fast as they take it, and read whatever is answered."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    lines = [dial(context, cluster.control, cluster.server_public, cluster.keys()) for _ in range(4)]
    ping = encode(Ping(), id="again")
    while not enough.is_set():
        for line in lines:
            for frames in (ping, [b"no", b"message"]):
                while line.poll(0, zmq.POLLOUT) and len(frames) < 200:
                    line.send_multipart(frames)
                    if line.poll(0):
                        line.recv_multipart()
                        break
    context.destroy(linger=0)


def test_a_flood_of_one_tenant_leaves_its_neighbours_served(tmp_path: Path) -> None:
    with MasterProcess(tmp_path, max_requests_per_s=100) as master:
        flooding = ClusterFile.load(master.keyring.issue("hasty", tenant="hasty"))
        boss = ClusterFile.load(master.keyring.issue("boss", tenant="ops", operator=True))
        with master.tenant("calm", tenant="calm") as calm, Peer(boss) as operator:
            fine(calm)
            enough = threading.Event()
            thread = threading.Thread(target=flood, args=(flooding, enough))
            thread.start()
            try:
                refused = 0
                while refused < 2000:
                    for _ in range(5):
                        fine(calm)
                    status = operator.ask(Status(), timeout_s=60).message
                    assert isinstance(status, ClusterStatus)
                    refused = status.counts.get("rate", 0)
            finally:
                enough.set()
                thread.join()
            assert "hasty" in master.log_text()
            assert master.log_text().count("message_refused") < 40


def test_a_client_over_its_tenants_rate_waits_and_is_answered_and_an_operators_word_changes_the_rate(
    tmp_path: Path,
) -> None:
    with MasterProcess(tmp_path, max_requests_per_s=20) as master:
        cluster = ClusterFile.load(master.keyring.issue("laptop", tenant="acme"))
        connections = [Connection(cluster) for _ in range(2)]
        try:
            asked = [
                connection.ask(Ping(), answer_of(Pong), patience_s=120) for _ in range(40) for connection in connections
            ]
            assert all(isinstance(answer.result(180), Pong) for answer in asked)
        finally:
            for connection in connections:
                connection.close()
        assert "reason=rate" in master.log_text()
        TenantLimitsFile(tmp_path / "keys" / "limits.json").change("acme", {"max_requests_per_s": 100_000})
        with Peer(cluster) as tenant:
            in_a_row, deadline = 0, time.monotonic() + 90
            while in_a_row < 200:
                assert time.monotonic() < deadline
                in_a_row = in_a_row + 1 if isinstance(tenant.ask(Ping()).message, Pong) else 0
