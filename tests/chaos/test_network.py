"""A tenant whose network goes silent, breaks, is slow or narrow: nothing is done twice, and nobody else notices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import blake3
import msgspec
import pytest

from joynexus.keys import ClusterFile
from joynexus.wire.front import (
    Accepted,
    AcquireLease,
    BlobBegin,
    BlobChunk,
    BlobOffset,
    CreatePolicy,
    GetPolicy,
    Lease,
    Ping,
    PolicyInfo,
    Pong,
)
from tests.chaos.proxy import Proxy
from tests.chaos.verdict import Verdict
from tests.process.master_process import MasterProcess, Peer
from tests.process.test_master import SPEC, forward
from tests.waiting import meanwhile, until

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterProcess]:
    with MasterProcess(tmp_path_factory.mktemp("master")) as master:
        yield master


class Tenant:
    """Somebody behind a network of his own, who drives a policy."""

    def __init__(self, peer: Peer, network: Proxy, bulk: Proxy) -> None:
        self.peer, self.network, self.bulk = peer, network, bulk
        assert isinstance(self.ask(CreatePolicy(policy="p", spec=SPEC)), PolicyInfo)
        lease = self.ask(AcquireLease(policy="p", holder="h"))
        assert isinstance(lease, Lease)
        self._lease = lease.lease
        self.acknowledged = 0

    def ask(self, message: CreatePolicy | AcquireLease | GetPolicy | Ping) -> object:
        return self.peer.ask(message, timeout_s=PATIENCE_S).message

    def op(self) -> None:
        """Send the next op until it is acknowledged."""
        message, buffers = forward(self._lease, self.acknowledged + 1)
        answer = self.peer.ask(message, buffers, timeout_s=PATIENCE_S).message
        assert answer == Accepted(policy="p", seq=self.acknowledged + 1)
        self.acknowledged += 1

    def taken(self) -> int:
        """Ops that the master has taken."""
        info = self.ask(GetPolicy(policy="p"))
        assert isinstance(info, PolicyInfo)
        return info.next_seq - 1


@contextmanager
def behind_a_network(master: MasterProcess, name: str) -> Iterator[Tenant]:
    file = ClusterFile.load(master.keyring.issue(name, tenant=name))
    with ExitStack() as stack:
        control, bulk = (stack.enter_context(Proxy(address)) for address in (file.control, file.bulk))
        far = msgspec.structs.replace(file, control=control.address, bulk=bulk.address)
        yield Tenant(stack.enter_context(Peer(far)), control, bulk)


class Neighbour:
    """Another tenant, with a good network, who asks again and again."""

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self.served = 0

    def goes_on(self) -> None:
        """Wait until more of its requests were answered: now, whatever is wrong with somebody else's network."""
        before = self.served
        with self._verdict("I5"):
            until(lambda: self.served >= before + 5, seconds=PATIENCE_S)


@contextmanager
def beside(master: MasterProcess, name: str, verdict: Verdict) -> Iterator[Neighbour]:
    """While this lasts, another tenant asks; none of its requests may stay without an answer."""
    neighbour = Neighbour(verdict)

    with verdict("I5"), master.tenant(name, tenant=name) as peer:

        def ping(over: threading.Event) -> None:
            while not over.is_set():
                assert isinstance(peer.ask(Ping(), timeout_s=PATIENCE_S).message, Pong)
                neighbour.served += 1

        with meanwhile(ping):
            neighbour.goes_on()
            yield neighbour


@pytest.mark.case(8, "half-open connection: nothing goes through and nobody hangs up")
def test_silent_network_is_noticed_by_both_ends_and_an_op_lost_in_it_is_applied_once(
    master: MasterProcess, verdict: Verdict
) -> None:
    with beside(master, "neighbour-8", verdict) as neighbour, behind_a_network(master, "silent") as tenant:
        tenant.op()
        tenant.network.faults.blackhole = True
        with verdict("I3"), meanwhile(lambda _: tenant.op()):
            neighbour.goes_on()
            until(lambda: tenant.network.hung_up >= 2, seconds=30)  # both ends: heartbeats are missed
            tenant.network.faults.blackhole = False
        tenant.op()
        with verdict("I1"):
            assert tenant.taken() == tenant.acknowledged == 3
        with verdict("I4"):
            until(lambda: tenant.network.connections == 1, seconds=30)


@pytest.mark.case(8, "connections are reset under the requests")
def test_reset_connections_cost_no_op_and_double_none(master: MasterProcess, verdict: Verdict) -> None:
    with behind_a_network(master, "reset") as tenant:
        for _ in range(3):
            before = tenant.network.heard
            with verdict("I3"), meanwhile(lambda _: tenant.op()):
                until(lambda before=before: tenant.network.heard > before)
                tenant.network.reset()
        with verdict("I1"):
            assert tenant.taken() == tenant.acknowledged == 3


@pytest.mark.case(9, "blackouts again and again")
def test_blackouts_delay_ops_and_lose_none(master: MasterProcess, verdict: Verdict) -> None:
    with beside(master, "neighbour-9", verdict) as neighbour, behind_a_network(master, "blackouts") as tenant:
        for _ in range(6):
            tenant.op()
            tenant.network.faults.blackhole = True
            before = tenant.network.heard
            with verdict("I3"), meanwhile(lambda _: tenant.op()):
                until(lambda before=before: tenant.network.heard > before)
                neighbour.goes_on()
                tenant.network.faults.blackhole = False
        with verdict("I1"):
            assert tenant.taken() == tenant.acknowledged == 12


@pytest.mark.case(11, "an upload through a network of 100 kB/s")
def test_slow_upload_holds_up_itself_alone(master: MasterProcess, verdict: Verdict) -> None:
    data = bytes(range(256)) * 1200  # 300 kB: three seconds
    digest = blake3.blake3(data).hexdigest()
    part = 100_000
    with behind_a_network(master, "slow") as tenant:
        tenant.bulk.faults.bandwidth = 100_000.0
        with beside(master, "neighbour-11", verdict) as neighbour:
            begun = tenant.peer.ask(BlobBegin(digest=digest, nbytes=len(data)), bulk=True, timeout_s=PATIENCE_S)
            assert begun.message == BlobOffset(digest=digest, offset=0)
            for offset in range(0, len(data), part):
                chunk = BlobChunk(digest=digest, offset=offset)
                with meanwhile(lambda _: neighbour.goes_on()):
                    answer = tenant.peer.ask(chunk, [data[offset : offset + part]], bulk=True, timeout_s=PATIENCE_S)
                tenant.op()  # control does not stand behind bulk
        with verdict("I1"):
            assert answer.message == BlobOffset(digest=digest, offset=len(data), complete=True)
            assert tenant.taken() == tenant.acknowledged


@pytest.mark.case(11, "a network that is slow and cuts messages to pieces")
def test_sliced_and_late_messages_arrive_whole(master: MasterProcess, verdict: Verdict) -> None:
    with behind_a_network(master, "sliced") as tenant:
        tenant.network.faults.slice_bytes = 7
        tenant.network.faults.latency_s = 0.05
        for _ in range(5):
            with verdict("I3"):
                tenant.op()
        with verdict("I1"):
            assert tenant.taken() == tenant.acknowledged == 5
