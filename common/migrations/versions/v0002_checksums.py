"""Every record and payload has a checksum behind it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

TABLES = (
    "policies", "leases", "versions", "checkpoints", "states", "jobs", "pages", "curves", "datasets", "usage", "blobs"
)  # fmt: skip
ROWS = 1000


def upgrade() -> None:
    for table in TABLES:
        _seal(table, "record")
    _seal("ops", "record", "payload", "done")


def _seal(table: str, *columns: str) -> None:
    connection = op.get_bind()
    change = sa.text(f"UPDATE {table} SET {', '.join(f'{name} = :{name}' for name in columns)} WHERE rowid = :rowid")
    for rows in _read(connection, table, columns):
        sealed = [
            {"rowid": rowid, **dict(zip(columns, (_with_checksum(value) for value in values), strict=True))}
            for rowid, *values in rows
        ]
        connection.execute(change, sealed)


def _read(
    connection: sa.Connection, table: str, columns: tuple[str, ...]
) -> Iterator[list[tuple[Any, ...]]]:  # Any: values differ by column
    """Give the rows in parts that fit into memory."""
    query = sa.text(f"SELECT rowid, {', '.join(columns)} FROM {table} WHERE rowid > :last ORDER BY rowid LIMIT {ROWS}")
    last = -1
    while rows := [tuple(row) for row in connection.execute(query, {"last": last})]:
        yield rows
        last = rows[-1][0]


def _with_checksum(value: bytes | None) -> bytes | None:
    return None if value is None else value + zlib.crc32(value).to_bytes(4, "little")
