"""A journal with a Postgres server.

In: its URL, without a password (libpq reads that from PGPASSFILE or ~/.pgpass). Out: transactions that are on the
server's disk when they return. Never: a password in a log or a sentence, a second master in one journal, or "not kept"
said of a transaction of which nobody knows: it is done again until that is known.

The connection that writes holds a lock of the server's. When it is lost, the lock is too; so whoever opens the journal
counts up a number there, and a writer that comes back goes on only if nobody has.
"""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from common.journal.engine import Write
from common.journal.errors import JournalDamagedError, JournalError, JournalTakenError
from common.journal.opening import NEWEST_SCHEMA, migrate
from common.journal.tables import metadata
from common.telemetry import get_logger

log = get_logger(__name__)

RETRY_S = 1.0
"""Pause between two tries to connect anew."""
_CONNECT = {
    "connect_timeout": 5,
    # A server that is gone without a word is noticed within about ten seconds.
    "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000,
}  # fmt: skip
_SESSION = "SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 2; SET tcp_keepalives_count = 3"
"""The server notices likewise that a master is gone, and frees its lock."""
_LOCK = "hashtextextended('the journal in schema ' || current_schema(), 0)"
_DAMAGE = frozenset({"XX001", "XX002"})
"""Data and indexes that are not as they were written (Postgres' documentation, "Error Codes")."""

_openings = sa.Table("openings", sa.MetaData(), sa.Column("number", sa.BigInteger, nullable=False))
_version = sa.Table("alembic_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True))


class PostgresBackend:
    """See `Backend`.

    Args:
        url: e.g. `postgresql://joynexus@db.example:5432/joynexus`; in a schema of its own with
            `?options=-csearch_path%3DNAME`, so that several journals share a database.
    """

    def __init__(self, url: str) -> None:
        where = checked(url)
        self._name = name_of(where)
        self._writer_name = f"joynexus journal {uuid.uuid4().hex}"
        self.engine = engine_of(where, pool_pre_ping=True)
        self._writers = engine_of(where, poolclass=sa.NullPool, name=self._writer_name)
        self._writer: sa.Connection | None = None
        self._number = 0  # of this opening
        self._not_before = 0.0
        try:
            self._writer = writer_now = self._connect()
            if not lock(writer_now):
                raise ValueError(f"another process has the journal {self._name}: end it first (a master?)")
            self._make_tables(writer_now)
            migrate(self.engine)
            counted = sa.update(_openings).values(number=_openings.c.number + 1).returning(_openings.c.number)
            self._number = int(writer_now.execute(counted).scalar_one())
            writer_now.commit()
        except sa.exc.DBAPIError as error:
            self.close()
            raise self.unreadable(error) from error
        except ValueError:
            self.close()
            raise

    def insert(self, table: sa.Table) -> Any:  # Any: see `Backend`
        """Return Postgres' own INSERT."""
        return insert(table)

    def transact(self, write: Write) -> None:
        """Change rows in one transaction; JournalError if the server is away, or does not take it."""
        writer = self._get_writer()
        try:
            write(writer)
        except sa.exc.DBAPIError as error:
            self._leave(writer, error)
            raise JournalError(_reason(error)) from error
        except BaseException:
            self._lose(writer)
            raise
        try:
            writer.commit()
        except sa.exc.DBAPIError as error:
            self._lose(writer)
            self._settle(write, error)

    def count(self, connection: sa.Connection, table: sa.Table) -> int:
        """Return the rows of a table without asking an index."""
        for way in ("indexscan", "indexonlyscan", "bitmapscan"):
            connection.exec_driver_sql(f"SET LOCAL enable_{way} = off")
        count = int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())
        for way in ("indexscan", "indexonlyscan", "bitmapscan"):
            connection.exec_driver_sql(f"SET LOCAL enable_{way} = on")
        return count

    def damaged(self, how: str) -> JournalDamagedError:
        """Return the error that says so."""
        return JournalDamagedError(self._name, how, "bring its database back from a copy")

    def unreadable(self, error: sa.exc.DBAPIError) -> ValueError:
        """Return what an error means: damage, or a server that does not let us in."""
        if getattr(error.orig, "sqlstate", None) in _DAMAGE:
            return self.damaged(first_line(error))
        return ValueError(f"the journal {self._name} cannot be opened: {first_line(error)}")

    def close(self) -> None:
        """End the connections, and with them the lock."""
        if self._writer is not None:
            self._lose(self._writer)
        self._writers.dispose()
        self.engine.dispose()

    # The connection that writes

    def _connect(self) -> sa.Connection:
        """Return a connection whose commits are on disk when they return."""
        connection = self._writers.connect()
        try:
            if connection.exec_driver_sql("SHOW fsync").scalar_one() != "on":
                raise ValueError(f"the server of the journal {self._name} has fsync = off: a power cut would lose it")
            if connection.exec_driver_sql("SHOW synchronous_commit").scalar_one() == "off":
                connection.exec_driver_sql("SET synchronous_commit = on")
            for statement in _SESSION.split("; "):
                connection.exec_driver_sql(statement)
            connection.commit()
        except BaseException:
            connection.close()
            raise
        return connection

    def _get_writer(self) -> sa.Connection:
        """Return the connection that writes, a new one if it was lost.

        Raises:
            JournalError: if there is none now.
            JournalTakenError: if somebody else has opened the journal since.
        """
        if self._writer is not None:
            return self._writer
        if time.monotonic() < self._not_before:
            raise JournalError("its server does not answer")
        self._not_before = time.monotonic() + RETRY_S
        connection = None
        try:
            connection = self._connect()
            self._check_number(connection)  # before the lock, which whoever has opened it since may hold
            if not lock(connection):  # the server has not noticed yet that the connection before is lost
                end = sa.text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE application_name = :name AND pid <> pg_backend_pid()"
                )
                ended = connection.execute(end, {"name": self._writer_name}).all()
                raise JournalError("its lock is not free yet" if ended else "another process has its lock")
            self._check_number(connection)
        except (sa.exc.SQLAlchemyError, ValueError, JournalError) as error:
            if connection is not None:
                self._lose(connection)
            why = first_line(error) if isinstance(error, sa.exc.DBAPIError) else str(error)
            log.warning("journal_away", why=why)
            raise JournalError("its server does not answer") from error
        except JournalTakenError:
            if connection is not None:
                self._lose(connection)
            raise
        self._writer = connection
        return connection

    def _check_number(self, connection: sa.Connection) -> None:
        """Raise JournalTakenError if the journal was opened by somebody else since."""
        number = connection.execute(sa.select(_openings.c.number)).scalar_one()
        connection.commit()
        if number != self._number:
            raise JournalTakenError(f"another master has opened the journal {self._name} meanwhile: this one must end")

    def _leave(self, writer: sa.Connection, error: sa.exc.DBAPIError) -> None:
        """Undo what was begun; let go of a connection that is of no use any more."""
        try:
            writer.rollback()
        except sa.exc.DBAPIError:
            self._lose(writer)
            return
        if error.connection_invalidated or writer.invalidated:  # it would connect anew by itself, without the lock
            self._lose(writer)

    def _lose(self, connection: sa.Connection) -> None:
        if connection is self._writer:
            self._writer = None
        with suppress(sa.exc.DBAPIError):
            connection.invalidate()
        with suppress(sa.exc.DBAPIError):
            connection.close()

    def _settle(self, write: Write, error: sa.exc.DBAPIError) -> None:
        """Do a transaction again of which nobody knows whether it was kept: records replace equal ones."""
        log.warning("journal_in_doubt", why=first_line(error))
        while True:
            try:
                writer = self._get_writer()
                write(writer)
                writer.commit()
                return
            except JournalError:
                time.sleep(RETRY_S)
            except sa.exc.DBAPIError as again:
                log.warning("journal_in_doubt", why=first_line(again))
                if self._writer is not None:
                    self._lose(self._writer)
                time.sleep(RETRY_S)

    # Tables

    def _make_tables(self, connection: sa.Connection) -> None:
        """Make a journal in a schema that has none, as a whole."""
        there = set(sa.inspect(connection).get_table_names())
        if _version.name not in there:
            if there & set(metadata.tables):
                raise self.damaged("its tables are not those of a journal")
            metadata.create_all(connection, checkfirst=False)
            _openings.create(connection)
            _version.create(connection)
            connection.execute(sa.insert(_version).values(version_num=NEWEST_SCHEMA))
            connection.execute(sa.insert(_openings).values(number=0))
        connection.commit()


def engine_of(where: sa.URL, *, name: str = "joynexus", **options: Any) -> sa.Engine:  # Any: SQLAlchemy's options
    """Return an engine whose connections have this name at the server; ValueError if there is no driver."""
    try:
        return sa.create_engine(where, connect_args={**_CONNECT, "application_name": name}, **options)
    except ModuleNotFoundError as error:
        raise ValueError("a journal in Postgres needs its driver: pip install 'joynexus[postgres]'") from error


def name_of(where: sa.URL) -> str:
    """Return what people call the journal there."""
    return where.set(drivername="postgresql", query={}).render_as_string()


def checked(url: str) -> sa.URL:
    """Read a URL; ValueError if it is none, or has a password."""
    try:
        where = sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise ValueError("the journal's URL cannot be read: write postgresql://user@host:5432/database") from error
    if where.password is not None or any("password" in name for name in where.query):
        raise ValueError(
            "the journal's URL has a password, which others can see there: take it out, and name a file in PGPASSFILE "
            "that has the line host:port:database:user:password"
        )
    if where.drivername not in ("postgresql", "postgresql+psycopg"):
        raise ValueError(
            f"the journal's URL begins with {where.drivername}: write postgresql://user@host:5432/database"
        )
    return where.set(drivername="postgresql+psycopg")


def lock(connection: sa.Connection) -> bool:
    """Take the journal's lock for this connection; false if another one has it."""
    locked = connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_LOCK})").scalar_one()
    connection.commit()
    return bool(locked)


def _reason(error: sa.exc.DBAPIError) -> str:
    """Return why a statement failed; tenants are told, so it names no server."""
    primary = getattr(getattr(error.orig, "diag", None), "message_primary", None)
    return str(primary) if primary else "the connection to its server is lost"


def first_line(error: sa.exc.DBAPIError) -> str:
    """Return what an operator is told of why a statement failed; it may name the server."""
    return next(iter(str(error.orig).splitlines()), "no reason is given")
