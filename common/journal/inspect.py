"""Whether all that a Postgres server has of a journal is as it was written.

In: its URL. Out: what is damaged. Never: a change, or a wait for the master, which may go on meanwhile.
"""

from __future__ import annotations

import sqlalchemy as sa

from common.journal import records as r
from common.journal import rows
from common.journal.opening import NEWEST_SCHEMA
from common.journal.postgres import checked, engine_of, first_line, name_of
from common.journal.repair import Report
from common.journal.tables import SHELVES, ops, place

_DONE = rows.Reader.of(r.OpDone)


def inspect(url: str) -> Report:
    """Read every row, as of one moment.

    Raises:
        ValueError: if there is no journal, or it cannot be read.
    """
    where = checked(url)
    engine = engine_of(where, poolclass=sa.NullPool)
    damaged: list[str] = []
    kept = 0
    try:
        with engine.connect() as connection:
            connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            check_schema(connection, name_of(where))
            tables: list[tuple[type[r.Base], sa.Table]] = [(kind, shelf.table) for kind, shelf in SHELVES.items()]
            tables.append((r.OpRecord, ops))
            for kind, table in tables:
                sound, hurt = _read(connection, kind, table)
                kept += sound
                damaged += hurt
    except sa.exc.DBAPIError as error:
        raise ValueError(f"the journal {name_of(where)} cannot be read: {first_line(error)}") from error
    return Report(damaged=tuple(damaged), besides=(), kept=kept)


def check_schema(connection: sa.Connection, name: str) -> None:
    """Raise ValueError if the server has no journal, or none of today's schema."""
    if not sa.inspect(connection).has_table("alembic_version"):
        raise ValueError(f"there is no journal in {name}")
    found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    if found != NEWEST_SCHEMA:
        raise ValueError(f"the journal {name} has schema {found}, this release reads {NEWEST_SCHEMA}: start it once")


def _read(connection: sa.Connection, kind: type[r.Base], table: sa.Table) -> tuple[int, list[str]]:
    """Count the sound records of a table, and name the places of those that are not."""
    reader, keys, columns = rows.Reader.of(kind), len(table.primary_key), [*table.primary_key, table.c.record]
    if table is ops:
        columns += [ops.c.payload, ops.c.done]
    sound, damaged = 0, []
    for row in connection.execute(sa.select(*columns).execution_options(yield_per=100)):
        key, data = tuple(row[:keys]), row[keys:]
        try:
            reader.read(key, data[0])
            if table is ops and data[1] is not None:
                rows.unseal(data[1])
            if table is ops and data[2] is not None:
                _DONE.read(key, data[2])
        except ValueError as error:
            damaged.append(f"{place(table, key)}: {error}")
        else:
            sound += 1 + (table is ops and data[2] is not None)
    return sound, damaged
