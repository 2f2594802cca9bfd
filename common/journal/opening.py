"""A journal's file: its lock, how it comes into being, its pragmas, its schema.

In: a path. Out: an engine on a database of today's schema. Never: a half-made or half-migrated file under a journal's
name, or two processes at once in one journal.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa

NEWEST_SCHEMA = "0003"
"""The last migration's revision."""
COMPANIONS = ("-wal", "-shm")
"""What SQLite puts beside the file; the first belongs to its content."""
_MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"


def engine_of(url: str) -> sa.Engine:
    """Return an engine whose commits are on disk when they return."""
    engine = sa.create_engine(url)
    sa.event.listen(engine, "connect", _set_pragmas)
    return engine


def only_one(path: Path) -> IO[bytes]:
    """Hold the lock of the journal until the returned file is closed; ValueError if another process has it."""
    lock = path.with_name(f"{path.name}.lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ValueError(f"another process has the journal {path}: end it first (a master?)") from error
    return lock


def create(path: Path) -> None:
    """Make a journal; it gets its name when it is complete, so that an empty file is never one."""
    new = path.with_name(f"{path.name}.new")
    for end in ("", *COMPANIONS):
        new.with_name(new.name + end).unlink(missing_ok=True)
    engine = engine_of(f"sqlite:///{new}")
    try:
        migrate(engine)
    finally:
        engine.dispose()  # the last connection writes everything into the file itself
    new.rename(path)
    sync_folder(path.parent)


def read_wal(path: Path) -> bytes:
    """Return the bytes of the journal's -wal file, none if there is none; they are on disk then.

    A process that was killed may have left a transaction there that is not: once it was read, it counts.
    """
    try:
        with path.with_name(f"{path.name}-wal").open("rb") as file:
            os.fsync(file.fileno())
            return file.read()
    except FileNotFoundError:
        return b""


def sync_folder(folder: Path) -> None:
    """Have names in a folder on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def migrate(engine: sa.Engine) -> None:
    """Bring the schema up to date, as a whole or not at all; one that is needs no more than a look.

    Raises:
        ValueError: if a newer release wrote it.
    """
    with engine.connect() as connection:
        if sa.inspect(connection).has_table("alembic_version"):
            found = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
            if found == NEWEST_SCHEMA:
                return
    # Only now: importing it takes longer than all else that a start does here.
    import alembic.command
    import alembic.config
    import alembic.migration
    import alembic.script

    config = alembic.config.Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    known = {script.revision for script in alembic.script.ScriptDirectory.from_config(config).walk_revisions()}
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql(
                "BEGIN IMMEDIATE"
            )  # the driver begins only before changes of rows, not of tables
        found = alembic.migration.MigrationContext.configure(connection).get_current_revision()
        if found is not None and found not in known:
            raise ValueError(
                f"the journal has schema {found}, which this release does not know (its newest is {max(known)}): "
                "run the newer release that wrote it"
            )
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "head")


def _set_pragmas(connection: Any, _record: object) -> None:  # Any: the driver's connection
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=5000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
