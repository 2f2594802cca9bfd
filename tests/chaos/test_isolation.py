"""A tenant who has another one's names, ids and digests, and a real master: what is it told, what becomes of the other?

Of two masters, one has policies, versions, jobs, data sets and blobs of tenant `acme`, and in the other it never was.
The same is asked of both.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from joynexus.wire import Buffer, ErrorCode, Failure, Message
from joynexus.wire.back import Beat, Gone, Leaving, Register
from joynexus.wire.front import AcquireLease, CreatePolicy, GetJob, GetPolicy, Lease, ListPolicies, PolicyInfo
from joynexus.wire.messages import FRONT_REQUESTS
from tests.chaos.verdict import Verdict
from tests.process.master_process import MasterProcess, Peer
from tests.unit.master.test_verbs_foreign import ATTACKS
from tests.wire.conversation import Step
from tests.wire.record import SOURCE, SPEC, STATE, WORKERS, Conversation, digest_of

IDS: dict[str, Any] = {
    "file": digest_of(SOURCE), "version": digest_of(STATE), "state": digest_of(STATE), "payload": digest_of(b"?"),
    "unfinished": digest_of(b"??"), "job": "sft-1", "evaluation": "evaluate-1", "parked": "sft-2", "waiting": "sft-3",
    "incarnation": "life-of-env", "task": "0" * 32, "attempt": 1,
}  # fmt: skip
"""What the second tenant has learnt of the first somehow; its lease comes from the conversation."""
_VARYING = re.compile(r"\b[0-9a-f]{32}\b|-?\d+\.\d+(e-?\d+)?|\bkey-[ab]\b")
"""Ids that a master counts, and times."""


@contextmanager
def masters(folder: Path) -> Iterator[tuple[MasterProcess, MasterProcess]]:
    """One master with the first tenant's things, and one without."""
    with MasterProcess(folder / "both", silent_s=600) as both, MasterProcess(folder / "alone", silent_s=600) as alone:
        yield both, alone


def ask(peer: Peer, message: Message, *buffers: Buffer) -> Message:
    """Ask; again, after the hint, if that was too often."""
    deadline = time.monotonic() + 60
    while True:
        answer = peer.ask(message, buffers, bulk=type(message).__name__.startswith("Blob"), timeout_s=60).message
        if not (isinstance(answer, Failure) and answer.code is ErrorCode.OVERLOADED):
            return answer
        assert time.monotonic() < deadline, answer
        peer.control.poll(max(20, answer.retry_after_ms))


def furnish(master: MasterProcess, owner: Peer) -> str:
    """Have the first tenant work with workers of each role, who leave then; return its lease."""
    steps: list[Step] = []
    with ExitStack() as stack:
        workers = {role: stack.enter_context(master.worker(role)) for role in WORKERS}
        Conversation({"client": owner, **workers}, steps).hold()
    lease = ask(owner, AcquireLease(policy="p", holder="me"))
    assert isinstance(lease, Lease)
    return lease.lease


def staff(master: MasterProcess) -> None:
    """Have the same workers come and go, for nothing."""
    for role, fields in WORKERS.items():
        with master.worker(role) as worker:
            ask(worker, Register(role=role, incarnation=f"life-of-{role}", pid=7, **fields))  # type: ignore[arg-type]
            ask(worker, Beat(progress=2, phase="idle", busy_s=0.5, detail={"device": "cpu"}))
            if role not in ("health", "dashboard"):
                ask(worker, Leaving())
                ask(worker, Beat(progress=2, phase="idle", busy_s=0.5))
                ask(worker, Gone())


def attack(master: MasterProcess, lease: str) -> list[tuple[str, str]]:
    """Have the second tenant say every verb with what is the first one's; return what it is told."""
    told = []
    with master.tenant("rival", tenant="rival") as rival:
        assert isinstance(ask(rival, CreatePolicy(policy="mine", spec=SPEC)), PolicyInfo)
        mine = ask(rival, AcquireLease(policy="mine", holder="loop"))
        assert isinstance(mine, Lease)
        for verb in FRONT_REQUESTS:
            for said in ATTACKS[verb]({**IDS, "lease": lease}, mine.lease):
                message, buffers = said if isinstance(said, tuple) else (said, ())
                answer = msgspec.json.encode(ask(rival, message, *buffers)).decode()
                told.append((_VARYING.sub("*", repr(message)), _VARYING.sub("*", answer)))
    return told


def things(owner: Peer) -> list[Message]:
    """What the first tenant has, as it is told."""
    questions = (ListPolicies(), GetPolicy(policy="p"), GetJob(job="sft-1"), GetJob(job="evaluate-2"))
    return [ask(owner, question) for question in questions]


@pytest.mark.case(24, "a tenant says every verb with another's names, ids and digests")
def test_names_of_another_tenant_are_worth_nothing(tmp_path: Path, verdict: Verdict) -> None:
    (tmp_path / "both").mkdir()
    (tmp_path / "alone").mkdir()
    with masters(tmp_path) as (both, alone), both.tenant("owner") as owner:
        lease = furnish(both, owner)
        staff(alone)
        before = things(owner)
        told, expected = attack(both, lease), attack(alone, lease)
        with verdict("I2"):
            assert len(told) > 200
            assert [pair for pair in zip(told, expected, strict=True) if pair[0] != pair[1]] == []
        with verdict("I5"):
            after = things(owner)
            assert _VARYING.sub("*", repr(after)) == _VARYING.sub("*", repr(before))
            assert all(packet.header.re for packet in owner.unasked), "it was told what it had not asked"
        with verdict("I6"):
            log = both.log_text()
            assert len(re.findall(r"outcome=NOT_FOUND .*tenant=rival", log)) > 50
