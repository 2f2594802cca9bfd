"""The journal's tables, and which record lives in which.

In: nothing. Out: SQLAlchemy Core tables and, for each kind of record, its table and key. Never: SQL that only one
database understands, or a table that the migrations do not make (a test compares them).

Key fields are columns, so that people can look around with `sqlite3`; the record itself is MessagePack beside them.
"""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa

from common.journal import records as r

metadata = sa.MetaData()


def _table(name: str, *keys: sa.Column[str] | sa.Column[int]) -> sa.Table:
    return sa.Table(name, metadata, *keys, sa.Column("record", sa.LargeBinary, nullable=False))


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, primary_key=True)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.Integer, primary_key=True, autoincrement=False)


class Shelf(NamedTuple):
    """Where one kind of record lives."""

    table: sa.Table
    key: tuple[str, ...]


ops = sa.Table(
    "ops",
    metadata,
    _text("tenant"),
    _text("policy"),
    _number("seq"),
    sa.Column("record", sa.LargeBinary, nullable=False),
    sa.Column("payload", sa.LargeBinary, nullable=True),
    sa.Column("done", sa.LargeBinary, nullable=True),
)
"""`record` is the `OpRecord` without its payload, `done` the `OpDone` once there is one."""

SHELVES: dict[type[r.Base], Shelf] = {
    type_: Shelf(table, tuple(column.name for column in table.primary_key))
    for type_, table in (
        (r.PolicyRecord, _table("policies", _text("tenant"), _text("policy"))),
        (r.LeaseRecord, _table("leases", _text("tenant"), _text("policy"))),
        (r.VersionRecord, _table("versions", _text("tenant"), _text("policy"), _number("version"))),
        (r.CheckpointRecord, _table("checkpoints", _text("tenant"), _text("policy"))),
        (r.StateRecord, _table("states", _text("tenant"), _text("policy"), _text("state"))),
        (r.JobRecord, _table("jobs", _text("tenant"), _text("job"))),
        (r.PageRecord, _table("pages", _text("tenant"), _text("job"), _number("page"))),
        (r.CurveRecord, _table("curves", _text("tenant"), _text("job"), _number("first"))),
        (r.DatasetRecord, _table("datasets", _text("tenant"), _text("dataset"))),
        (r.UsageRecord, _table("usage", _text("tenant"), _text("policy"))),
        (r.BlobRecord, _table("blobs", _text("tenant"), _text("digest"))),
    )
}
"""All kinds of records except those of ops, in the order in which they are loaded."""
