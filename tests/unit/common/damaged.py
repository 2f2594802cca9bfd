"""Journals of tests, to be damaged: what is in one, and what can be read of it afterwards."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from common.journal.journal import Journal, journal_url
from common.journal.records import BlobRecord, OpDone, OpRecord, PolicyRecord, Record, key_of
from joynexus.wire.front import OpResult
from tests.unit.common.test_journal import ONE_OF_EACH, SPEC

PAYLOADS = {seq: bytes([seq % 256]) * 9000 for seq in range(40, 60)}


def op(policy: str, seq: int, payload: bytes = b"") -> OpRecord:
    return OpRecord(tenant="a", policy=policy, seq=seq, kind="train_step", payload=payload, payload_nbytes=len(payload))


def content() -> list[Record]:
    records: list[Record] = [*ONE_OF_EACH[:-2]]
    records += [PolicyRecord(tenant="a", policy=f"p{number}", spec=SPEC) for number in range(20)]
    records += [BlobRecord(tenant="a", digest=f"{number:064x}", nbytes=number) for number in range(200)]
    for seq in range(1, 60):
        records += [op("p1", seq, PAYLOADS.get(seq, b"")), op("p2", seq)]
        records += [OpDone(tenant="a", policy="p1", seq=seq, result=OpResult(policy="p1", seq=seq))]
    return records


def said(folder: Path) -> list[bytes]:
    """All that a journal says, payloads too; as bytes, because one record holds a NaN, which is not equal to itself."""
    journal = Journal(journal_url(folder / "journal.db"))
    try:
        records = [type(record).__name__.encode() + msgspec.msgpack.encode(record) for record in journal.load()]
        return [*records, *(journal.payload("a", "p1", seq) for seq in PAYLOADS)]
    finally:
        journal.close()


def change(folder: Path, statement: str) -> None:
    database = sqlite3.connect(folder / "journal.db")
    with database:
        database.execute(statement)
    database.close()


def keys(folder: Path) -> set[tuple[object, ...]]:
    journal = Journal(journal_url(folder / "journal.db"))
    try:
        return {key_of(record) for record in journal.load()}
    finally:
        journal.close()
