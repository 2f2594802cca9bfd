"""A journal in a SQLite file.

In: its URL. Out: transactions that are on disk when they return (WAL, `synchronous=FULL`). Never: a file taken for a
journal that no release left behind, or a word written to a file that has lost its name.
"""

from __future__ import annotations

import sqlite3
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert

from common.journal import wal
from common.journal.engine import Write
from common.journal.errors import JournalDamagedError, JournalError
from common.journal.names import Names
from common.journal.opening import create, engine_of, migrate, only_one, read_wal

_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR})
"""What SQLite says of a file that is not as it was written; errors without a code are of names that are no text."""


class SqliteBackend:
    """See `Backend`.

    Args:
        url: e.g. `sqlite:////var/lib/joynexus/journal.db`.
    """

    def __init__(self, url: str) -> None:
        self.engine = engine_of(url)
        self._path = Path(self.engine.url.database or "")
        self._open = ExitStack()
        self._open.enter_context(only_one(self._path))
        self._open.callback(self.engine.dispose)
        try:
            if self._path.exists():
                self._check_file()
            elif self._path.with_name(f"{self._path.name}-wal").exists():
                raise self.damaged("it is gone, but its -wal file is there")
            else:
                create(self._path)
            migrate(self.engine)
            held = self._open.enter_context(self.engine.connect())  # SQLite removes the -wal file with the last one
            held.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar_one()
            self._names = Names(self._path)
        except sa.exc.DatabaseError as error:
            self.close()
            raise self.unreadable(error) from error
        except (ValueError, OSError):
            self.close()
            raise

    def insert(self, table: sa.Table) -> Any:  # Any: see `Backend`
        """Return SQLite's own INSERT."""
        return insert(table)

    def transact(self, write: Write) -> None:
        """Change rows in one transaction; JournalError if the disk is full, say, or somebody has replaced the file."""
        try:
            with self.engine.begin() as connection:
                write(connection)
                if how := self._names.lost():
                    raise JournalError(how)
        except sa.exc.DatabaseError as error:
            raise JournalError(str(error.orig)) from error

    def count(self, connection: sa.Connection, table: sa.Table) -> int:
        """Return the rows of a table without asking an index."""
        return int(connection.exec_driver_sql(f"SELECT count(*) FROM {table.name} NOT INDEXED").scalar_one())

    def damaged(self, how: str) -> JournalDamagedError:
        """Return the error that says so."""
        check = f"joynexus admin journal check {self._path.parent}"
        return JournalDamagedError(self._path, how, f"put it back from a copy, or run `{check}` and then `repair`")

    def unreadable(self, error: sa.exc.DBAPIError) -> ValueError:
        """Return what an error means: damage, or a file that cannot be opened."""
        code = getattr(error.orig, "sqlite_errorcode", None)
        if code is None or code & 0xFF in _DAMAGE:
            return self.damaged(str(error.orig))
        return ValueError(f"the journal at {self._path} cannot be opened: {error.orig}")

    def close(self) -> None:
        """Close the file."""
        self._open.close()

    def _check_file(self) -> None:
        """Refuse a file that no release left behind: a new journal gets its name when it is complete."""
        if self._path.stat().st_size == 0:
            raise self.damaged("it is empty")
        if how := wal.damage(read_wal(self._path)):  # before SQLite opens it, and drops what it cannot read
            raise self.damaged(how)
        with self.engine.connect() as connection:
            if not sa.inspect(connection).has_table("alembic_version"):
                raise self.damaged("it has not the tables of a journal")
