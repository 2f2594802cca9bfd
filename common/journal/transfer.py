"""A journal's rows, from a Postgres server into a file and back.

In: a URL and a path. Out: the same rows on the other side, as of one moment, as they are: nothing is decoded. Never:
rows of two journals mixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from common.journal import opening
from common.journal.inspect import check_schema
from common.journal.journal import Journal, journal_url
from common.journal.postgres import PostgresBackend, checked, engine_of, first_line, lock, name_of
from common.journal.tables import metadata

_ROWS = 500


def to_file(url: str, path: Path) -> None:
    """Copy a server's journal into a new file; ValueError if there is none, or it cannot be read."""
    where = checked(url)
    Journal(journal_url(path)).close()
    source, target = engine_of(where, poolclass=sa.NullPool), opening.engine_of(journal_url(path))
    try:
        with source.connect() as reading, target.begin() as writing:
            reading.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            check_schema(reading, name_of(where))
            for table in metadata.sorted_tables:
                _copy(reading, writing, table)
    except sa.exc.DBAPIError as error:
        raise ValueError(f"the journal {name_of(where)} cannot be copied: {first_line(error)}") from error
    finally:
        target.dispose()


def has_records(url: str) -> bool:
    """Tell whether a server has a journal that is not empty; ValueError if it cannot be reached."""
    where = checked(url)
    try:
        with engine_of(where, poolclass=sa.NullPool).connect() as connection:
            there = set(sa.inspect(connection).get_table_names())
            tables = (table for table in metadata.sorted_tables if table.name in there)
            return any(connection.execute(sa.select(table).limit(1)).first() is not None for table in tables)
    except sa.exc.DBAPIError as error:
        raise ValueError(f"the journal {name_of(where)} cannot be opened: {first_line(error)}") from error


def to_server(path: Path, url: str) -> None:
    """Copy a journal in a file to a server, in the place of what is there.

    Raises:
        ValueError: if a master has the journal there, or it cannot be reached.
        JournalError: if it does not take them; nothing is kept then.
    """
    Journal(journal_url(path)).close()  # brings an older one to today's schema
    backend, source = PostgresBackend(url), opening.engine_of(journal_url(path))
    try:

        def write(writing: sa.Connection) -> None:
            with source.connect() as reading:
                for table in metadata.sorted_tables:
                    _copy(reading, writing, table)

        backend.transact(write)
    finally:
        source.dispose()
        backend.close()


@contextmanager
def without_master(url: str) -> Iterator[bool]:
    """Keep masters away meanwhile; gives whether that could be done (false: one has the journal)."""
    where = checked(url)
    try:
        with engine_of(where, poolclass=sa.NullPool).connect() as connection:
            yield lock(connection)
    except sa.exc.DBAPIError as error:
        raise ValueError(f"the journal {name_of(where)} cannot be opened: {first_line(error)}") from error


def _copy(reading: sa.Connection, writing: sa.Connection, table: sa.Table) -> None:
    writing.execute(sa.delete(table))  # of a try of which nobody knew whether it was kept
    for rows in reading.execute(sa.select(table).execution_options(yield_per=_ROWS)).mappings().partitions():
        writing.execute(sa.insert(table), [dict(row) for row in rows])
