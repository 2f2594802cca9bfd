"""Where a journal lives: in a file (SQLite), or with a Postgres server.

In: its URL. Out: a `Backend`, open and of today's schema. Never: a password in a URL, or two masters in one journal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import sqlalchemy as sa

from common.journal.errors import JournalDamagedError

Write = Callable[[sa.Connection], None]


class Backend(Protocol):
    """What a journal needs of its database.

    Attributes:
        engine: gives connections for reading.
    """

    engine: sa.Engine

    def insert(self, table: sa.Table) -> Any:  # Any: each dialect has a class of its own
        """Return this dialect's INSERT, which has `on_conflict_do_update`."""
        ...

    def transact(self, write: Write) -> None:
        """Have `write` change rows in one transaction; when this returns it is on disk.

        `write` may be called again, if it cannot be known whether what it did was kept.

        Raises:
            JournalError: if nothing of it was kept.
            JournalTakenError: if this journal is somebody else's by now.
        """
        ...

    def count(self, connection: sa.Connection, table: sa.Table) -> int:
        """Return the rows of a table without asking an index."""
        ...

    def damaged(self, how: str) -> JournalDamagedError:
        """Return the error that says so."""
        ...

    def unreadable(self, error: sa.exc.DBAPIError) -> ValueError:
        """Return what an error of the database means while the journal is opened or loaded."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


def open_backend(url: str) -> Backend:
    """Open a journal, and make it if there is none.

    Raises:
        ValueError: if the URL is none, a newer release wrote the journal, it cannot be opened, or another process has
            it.
        JournalDamagedError: if it is no journal (any more).
    """
    kind = url.partition(":")[0].partition("+")[0]
    if kind == "sqlite":
        from common.journal.sqlite import SqliteBackend

        return SqliteBackend(url)
    if kind == "postgresql":
        from common.journal.postgres import PostgresBackend

        return PostgresBackend(url)
    raise ValueError(
        f"a journal lives in SQLite (sqlite:///path) or Postgres (postgresql://user@host/name), not {kind!r}"
    )
