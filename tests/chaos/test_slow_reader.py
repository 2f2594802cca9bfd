"""A tenant that asks and asks and reads no answer: the master's memory stays, and others are served."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from joynexus.keys import ClusterFile
from joynexus.wire import encode
from joynexus.wire.front import CreatePolicy, GetPolicy, ListPolicies, Ping, PolicyInfo, Pong
from tests.chaos.verdict import Verdict
from tests.process.master_process import MasterProcess, Peer, dial_deaf
from tests.process.test_master import SPEC
from tests.waiting import until

POLICIES = 40
"""Their list has 24 kB."""
ASKED = 1500
"""More than may wait for one connection."""
MAY_GROW_MIB = 32.0
"""Less than half of what is answered beyond that."""


class Deaf(Peer):
    """A tenant whose answers stay where they are until it asks for them."""

    def __init__(self, cluster: ClusterFile) -> None:
        super().__init__(cluster)
        self.control.close(0)
        self.control = dial_deaf(self._context, cluster)


def memory_mib(master: MasterProcess) -> float:
    assert master.process is not None
    return int(Path(f"/proc/{master.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def made(peer: Peer, policy: str) -> bool:
    return isinstance(peer.ask(GetPolicy(policy=policy)).message, PolicyInfo)


@contextmanager
def tenants(master: MasterProcess) -> Iterator[tuple[Peer, Peer, Deaf]]:
    """A neighbour, and a tenant with two connections, of which the second reads nothing."""
    with (
        master.tenant("reader") as reader,
        master.tenant("second", tenant="silent") as second,
        Deaf(second.cluster) as silent,
    ):
        yield reader, second, silent


@pytest.mark.case(10, "a tenant asks and asks, and reads nothing")
def test_answers_that_nobody_reads_take_a_bounded_memory_and_hold_up_nobody(tmp_path: Path, verdict: Verdict) -> None:
    with MasterProcess(tmp_path, max_requests_per_s=1_000_000) as master, tenants(master) as (reader, second, silent):
        for number in range(POLICIES):
            assert isinstance(second.ask(CreatePolicy(policy=f"p{number}", spec=SPEC)).message, PolicyInfo)
        last = itertools.count()

        def ask(times: int) -> float:
            for number in range(times):
                silent.send(encode(ListPolicies(), id=f"s{number}"))
            policy = f"last{next(last)}"
            silent.send(encode(CreatePolicy(policy=policy, spec=SPEC), id=policy))
            until(lambda: made(second, policy))  # so all before it was answered
            assert isinstance(reader.ask(Ping()).message, Pong)
            return memory_mib(master)

        with verdict("I5"):
            first, then = ask(ASKED), ask(2 * ASKED)
        with verdict("I4"):
            assert then <= first + MAY_GROW_MIB, f"the master grew from {first:.0f} to {then:.0f} MiB"
        with verdict("I3"):
            while silent.control.poll(2000):
                silent.control.recv_multipart()
            assert isinstance(silent.ask(Ping()).message, Pong)
