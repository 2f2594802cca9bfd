"""Append-only in spirit: records go in by transaction, and come back all at once when the master starts.

In: batches of records. Out: the same records after any crash, once `append` has returned (WAL, `synchronous=FULL`).
Never: an answer before the fsync, a decision, or a schema that this code does not know.

One thread appends; `payload` may be called from another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert

from common.journal import records as r
from common.journal.tables import SHELVES, ops

NEWEST_SCHEMA = "0001"
"""The last migration's revision."""
_MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"
_OP_KEY = r.KEYS[r.OpRecord]
_NO_PAYLOAD = {"payload": b""}
_encode = msgspec.msgpack.Encoder().encode

# Any: column values differ by column.
_Row = dict[str, Any]


class JournalError(OSError):
    """Records could not be made durable; the message says why in one clause. Nothing of the batch was kept."""


class Journal:
    """The master's durable memory.

    Args:
        url: SQLAlchemy URL of a SQLite database, e.g. `sqlite:////var/lib/joynexus/journal.db`.

    Raises:
        ValueError: if the file was written by a newer release, or is not a journal.
    """

    def __init__(self, url: str) -> None:
        if not url.startswith("sqlite:"):
            raise ValueError(f"the journal lives in SQLite (sqlite:///path), not in {url.split(':', 1)[0]!r}")
        self._engine = sa.create_engine(url)
        sa.event.listen(self._engine, "connect", _set_pragmas)
        try:
            self._migrate()
        except sa.exc.DatabaseError as error:
            self._engine.dispose()
            raise ValueError(f"the journal at {self._engine.url.database} cannot be opened: {error.orig}") from error
        except ValueError:
            self._engine.dispose()
            raise
        self._upserts = {type_: _upsert(shelf.table, shelf.key, ("record",)) for type_, shelf in SHELVES.items()}
        self._deletes = {type_: _delete(shelf.table, shelf.key) for type_, shelf in SHELVES.items()}
        self._upsert_op = _upsert(ops, _OP_KEY, ("record", "payload", "done"))
        self._op_done = sa.update(ops).where(*(ops.c[key] == sa.bindparam(f"k_{key}") for key in _OP_KEY))
        self._op_done = self._op_done.values(done=sa.bindparam("b_done"))
        of_policy = (ops.c.tenant == sa.bindparam("k_tenant"), ops.c.policy == sa.bindparam("k_policy"))
        covered = (*of_policy, ops.c.seq <= sa.bindparam("k_seq"), ops.c.payload.is_not(None))
        self._drop_payloads = sa.update(ops).where(*covered).values(payload=None)
        self._forget = sa.delete(ops).where(*of_policy, ops.c.seq <= sa.bindparam("k_seq"))
        self._payload = sa.select(ops.c.payload).where(*(ops.c[key] == sa.bindparam(f"k_{key}") for key in _OP_KEY))

    def append(self, records: Sequence[r.Record]) -> None:
        """Store records in one transaction; when it returns they are on disk.

        Raises:
            JournalError: if they could not be stored (the disk is full, the file system is read-only).
        """
        by_type: dict[type[r.Base], list[Any]] = {}  # Any: mypy cannot follow type -> list of that type
        for record in records:
            by_type.setdefault(type(record), []).append(record)
        try:
            with self._engine.begin() as connection:
                for type_ in SHELVES:
                    if type_ in by_type:
                        self._store(connection, type_, by_type[type_])
                self._store_ops(connection, by_type)
        except sa.exc.DatabaseError as error:
            raise JournalError(str(error.orig)) from error

    def load(self) -> Iterator[r.Record]:
        """Give every record back: those of ops last, by policy in order of seq, without payloads."""
        with self._engine.connect() as connection:
            for type_, shelf in SHELVES.items():
                decode = msgspec.msgpack.Decoder(type_).decode
                for (record,) in connection.execute(sa.select(shelf.table.c.record).order_by(*shelf.table.primary_key)):
                    yield decode(record)  # type: ignore[misc]  # every key of SHELVES is a Record
            decode_op = msgspec.msgpack.Decoder(r.OpRecord).decode
            decode_done = msgspec.msgpack.Decoder(r.OpDone).decode
            query = sa.select(ops.c.record, ops.c.done).order_by(ops.c.tenant, ops.c.policy, ops.c.seq)
            for record, done in connection.execution_options(yield_per=1000).execute(query):
                yield decode_op(record)
                if done is not None:
                    yield decode_done(done)

    def payload(self, tenant: str, policy: str, seq: int) -> bytes:
        """Return the inline payload of an op.

        Raises:
            KeyError: if there is none: it was covered by a checkpoint, or never written.
        """
        with self._engine.connect() as connection:
            row = connection.execute(self._payload, {"k_tenant": tenant, "k_policy": policy, "k_seq": seq}).first()
        if row is None or row.payload is None:
            raise KeyError(f"the journal has no payload of op {seq} of policy '{policy}'")
        payload: bytes = row.payload
        return payload

    def close(self) -> None:
        """Close the file."""
        self._engine.dispose()

    def _migrate(self) -> None:
        """Bring the schema up to date; one that is needs no more than a look."""
        with self._engine.connect() as connection:
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
        with self._engine.begin() as connection:
            found = alembic.migration.MigrationContext.configure(connection).get_current_revision()
            if found is not None and found not in known:
                raise ValueError(
                    f"the journal has schema {found}, which this release does not know (its newest is {max(known)}): "
                    "run the newer release that wrote it"
                )
            config.attributes["connection"] = connection
            alembic.command.upgrade(config, "head")

    def _store(self, connection: sa.Connection, type_: type[r.Base], records: Iterable[Any]) -> None:
        _, key = SHELVES[type_]
        newest = {tuple(getattr(record, field) for field in key): record for record in records}
        gone = [k for k, record in newest.items() if getattr(record, "gone", False)]
        kept: list[_Row] = [
            {**dict(zip(key, k, strict=True)), "record": _encode(record)}
            for k, record in newest.items()
            if not getattr(record, "gone", False)
        ]
        if gone:
            connection.execute(self._deletes[type_], [_named(key, k) for k in gone])
        if kept:
            connection.execute(self._upserts[type_], kept)

    def _store_ops(self, connection: sa.Connection, by_type: Mapping[type[r.Base], Sequence[Any]]) -> None:
        accepted: Sequence[r.OpRecord] = by_type.get(r.OpRecord, ())
        done: Sequence[r.OpDone] = by_type.get(r.OpDone, ())
        covered: Sequence[r.OpsCovered] = by_type.get(r.OpsCovered, ())
        if accepted:
            connection.execute(self._upsert_op, [_op_row(record) for record in accepted])
        if done:
            rows = [{**_named(_OP_KEY, (d.tenant, d.policy, d.seq)), "b_done": _encode(d)} for d in done]
            connection.execute(self._op_done, rows)
        if covered:
            policies = [(c.tenant, c.policy, c.covered, c.forget) for c in covered]
            connection.execute(self._drop_payloads, [_named(_OP_KEY, (t, p, seq)) for t, p, seq, _ in policies])
            connection.execute(self._forget, [_named(_OP_KEY, (t, p, seq)) for t, p, _, seq in policies])


def journal_url(path: Path) -> str:
    """Return the URL of the journal in this file."""
    return f"sqlite:///{path}"


def _op_row(record: r.OpRecord) -> _Row:
    slim = msgspec.structs.replace(record, **_NO_PAYLOAD) if record.payload else record
    return {
        "tenant": record.tenant,
        "policy": record.policy,
        "seq": record.seq,
        "record": _encode(slim),
        "payload": record.payload or None,
        "done": None,
    }


def _named(key: Iterable[str], values: Iterable[object]) -> _Row:
    return {f"k_{field}": value for field, value in zip(key, values, strict=True)}


def _upsert(table: sa.Table, key: Iterable[str], columns: Iterable[str]) -> sa.Insert:
    statement = insert(table)
    names = itertools.chain(key, columns)
    statement = statement.values({name: sa.bindparam(name) for name in names})
    return statement.on_conflict_do_update(
        index_elements=list(table.primary_key), set_={column: statement.excluded[column] for column in columns}
    )


def _delete(table: sa.Table, key: Iterable[str]) -> sa.Delete:
    return sa.delete(table).where(*(table.c[field] == sa.bindparam(f"k_{field}") for field in key))


def _set_pragmas(connection: Any, _record: object) -> None:  # Any: the driver's connection
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=5000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
