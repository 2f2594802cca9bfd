"""A journal of each schema that was ever released, as it was written then: SQL, and the records in it as JSON.

`python -m tests.unit.common.journals.record` records one of today's schema, if there is none. It never touches a file
that is there: a record that is read otherwise than it was written is a broken promise.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import msgspec

from common.journal.journal import Journal, journal_url
from common.journal.opening import NEWEST_SCHEMA
from common.journal.records import JobRecord, OpDone, OpRecord, OpsCovered, Record
from joynexus.specs import JobSpec
from tests.wire.samples import make

FOLDER = Path(__file__).parent
PAYLOADS = {5: b"\0payload of 5", 6: b"\xffpayload of 6" * 100}


def examples() -> list[Record]:
    """Return records of every kind with every field set, jobs of every kind, ops with and without outcome."""
    kinds = [kind for kind in get_args(Record) if kind not in (JobRecord, OpRecord, OpDone, OpsCovered)]
    found: list[Record] = [_kept(make(kind, kind.__name__)) for kind in kinds]
    for number, spec in enumerate(get_args(JobSpec)):
        job = _kept(make(JobRecord, "JobRecord"))
        found.append(msgspec.structs.replace(job, job=f"job-{number}", number=number, spec=make(spec, spec.__name__)))
    for seq in (5, 6):
        op = msgspec.structs.replace(make(OpRecord, "OpRecord"), tenant="tenant", policy="policy", seq=seq)
        found.append(msgspec.structs.replace(op, payload=PAYLOADS[seq]))
    found.append(msgspec.structs.replace(make(OpDone, "OpDone"), tenant="tenant", policy="policy", seq=5))
    return found


def as_json(records: Iterable[Record]) -> bytes:
    """Return records as text, one a line."""
    lines = [msgspec.json.encode({type(record).__name__: record}) for record in records]
    return b"".join(line + b"\n" for line in lines)


def _kept(record: Any) -> Any:  # Any: a record, of a type that mypy cannot know
    return msgspec.structs.replace(record, gone=False) if hasattr(record, "gone") else record


def main() -> None:
    """Write what is missing."""
    sql = FOLDER / f"{NEWEST_SCHEMA}.sql"
    if sql.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.db"
        journal = Journal(journal_url(path))
        journal.append(examples())
        (FOLDER / f"{NEWEST_SCHEMA}.jsonl").write_bytes(as_json(journal.load()))
        journal.close()
        with sqlite3.connect(path) as database:
            sql.write_text("\n".join(database.iterdump()) + "\n")
    print("wrote", sql.name)


if __name__ == "__main__":
    main()
