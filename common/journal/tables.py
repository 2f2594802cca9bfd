"""The journal's tables, and which record lives in which.

In: nothing. Out: SQLAlchemy Core tables and, for each kind of record, its table and key. Never: SQL that only one
database understands, or a table that the migrations do not make (a test compares them).

Key fields are columns, so that people can look around with `sqlite3` or `psql`; the record itself is MessagePack beside
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import sqlalchemy as sa

from common.journal import records as r

metadata = sa.MetaData()


_NUMBERS = frozenset({"version", "page", "first", "seq"})
# As in SQLite: numbers of any size, and text in the order of its bytes, whatever language the database speaks.
_NUMBER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")
_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def _keys(record: type[r.Base]) -> list[sa.Column[str] | sa.Column[int]]:
    return [
        sa.Column(name, _NUMBER, primary_key=True, autoincrement=False)
        if name in _NUMBERS
        else sa.Column(name, _TEXT, primary_key=True)
        for name in r.KEYS[record]
    ]


class Shelf(NamedTuple):
    """Where one kind of record lives."""

    table: sa.Table
    key: tuple[str, ...]


def _shelf(record: type[r.Base], name: str) -> Shelf:
    table = sa.Table(name, metadata, *_keys(record), sa.Column("record", sa.LargeBinary, nullable=False))
    return Shelf(table, r.KEYS[record])


ops = sa.Table(
    "ops",
    metadata,
    *_keys(r.OpRecord),
    sa.Column("record", sa.LargeBinary, nullable=False),
    sa.Column("payload", sa.LargeBinary, nullable=True),
    sa.Column("done", sa.LargeBinary, nullable=True),
)
"""`record` is the `OpRecord` without its payload, `done` the `OpDone` once there is one."""

_NAMES: dict[type[r.Base], str] = {
    r.PolicyRecord: "policies",
    r.LeaseRecord: "leases",
    r.VersionRecord: "versions",
    r.CheckpointRecord: "checkpoints",
    r.StateRecord: "states",
    r.JobRecord: "jobs",
    r.PageRecord: "pages",
    r.CurveRecord: "curves",
    r.DatasetRecord: "datasets",
    r.UsageRecord: "usage",
    r.LifeRecord: "lives",
    r.BlobRecord: "blobs",
}

SHELVES: dict[type[r.Base], Shelf] = {record: _shelf(record, name) for record, name in _NAMES.items()}
"""All kinds of records except those of ops, in the order in which they are loaded."""


def place(table: sa.Table, key: Iterable[object]) -> str:
    """Say where a record stands."""
    names = (f"{column.name} {value!r}" for column, value in zip(table.primary_key, key, strict=True))
    return f"the record of table '{table.name}' with {', '.join(names)}"
