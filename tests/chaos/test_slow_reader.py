"""A tenant that asks and asks and reads no answer: the master's memory stays, and others are served."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from joynexus.wire import encode
from joynexus.wire.front import CreatePolicy, ListPolicies, Ping, PolicyInfo, Pong
from tests.chaos.verdict import Verdict
from tests.process.master_process import MasterProcess, Peer
from tests.process.test_master import SPEC

POLICIES = 20
ASKED = 3000
"""More than may wait for one connection."""
MAY_GROW_MIB = 32.0


def memory_mib(master: MasterProcess) -> float:
    assert master.process is not None
    return int(Path(f"/proc/{master.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def fine(peer: Peer) -> bool:
    return isinstance(peer.ask(Ping()).message, Pong)


@pytest.mark.case(10, "a tenant asks and asks, and reads nothing")
def test_answers_that_nobody_reads_take_a_bounded_memory_and_hold_up_nobody(tmp_path: Path, verdict: Verdict) -> None:
    with (
        MasterProcess(tmp_path) as master,
        master.tenant("reader") as reader,
        master.tenant("silent", tenant="silent") as silent,
    ):
        for number in range(POLICIES):
            made = silent.ask(CreatePolicy(policy=f"p{number}", spec=SPEC)).message
            assert isinstance(made, PolicyInfo)

        def ask(times: int) -> float:
            for number in range(times):
                silent.send(encode(ListPolicies(), id=f"s{number}"))
            assert fine(reader)  # so the master has looked at all that
            return memory_mib(master)

        with verdict("I5"):
            first, then = ask(ASKED), ask(3 * ASKED)
        with verdict("I4"):
            assert then <= first + MAY_GROW_MIB, f"the master grew from {first:.0f} to {then:.0f} MiB"
        with verdict("I3"):
            while silent.control.poll(2000):
                silent.control.recv_multipart()
            assert fine(silent)
