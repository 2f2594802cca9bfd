"""Append-only in spirit: records go in by transaction, and come back all at once when the master starts.

In: batches of records. Out: the same records after any crash, once `append` has returned. Where they lie: `engine.py`.
Never: an answer before the fsync, a decision, a schema that this code does not know, or a record that was not written.

One thread appends; `payload` may be called from another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from common.journal import records as r
from common.journal import rows
from common.journal.engine import open_backend
from common.journal.errors import JournalError
from common.journal.tables import SHELVES, ops, place

_OP_KEY = r.KEYS[r.OpRecord]
_NO_PAYLOAD = {"payload": b""}
_KINDS: tuple[type[r.Base], ...] = (*SHELVES, r.OpRecord, r.OpDone)
_READERS = {kind: rows.Reader.of(kind) for kind in _KINDS}

# Any: column values differ by column.
_Row = dict[str, Any]


class Journal:
    """The master's durable memory.

    Args:
        url: SQLAlchemy URL of a SQLite database, e.g. `sqlite:////var/lib/joynexus/journal.db`, or of a Postgres one,
            `postgresql://joynexus@host/joynexus`.

    Raises:
        ValueError: if it was written by a newer release, cannot be opened, or another process has it.
        JournalDamagedError: if it is no journal (any more).
    """

    def __init__(self, url: str) -> None:
        self._backend = backend = open_backend(url)
        self._engine = backend.engine
        insert = backend.insert
        self._upserts = {
            type_: _upsert(insert, shelf.table, shelf.key, ("record",)) for type_, shelf in SHELVES.items()
        }
        self._deletes = {type_: _delete(shelf.table, shelf.key) for type_, shelf in SHELVES.items()}
        self._upsert_op = _upsert(insert, ops, _OP_KEY, ("record", "payload", "done"))
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
            JournalError: if they could not be stored (the disk is full, the file system is read-only, somebody has
                removed or replaced the file, the server is away).
            JournalTakenError: if this journal is another master's by now.
        """
        by_type: dict[type[r.Base], list[Any]] = {}  # Any: mypy cannot follow type -> list of that type
        for record in records:
            by_type.setdefault(type(record), []).append(record)

        def write(connection: sa.Connection) -> None:
            for type_ in SHELVES:
                if type_ in by_type:
                    self._store(connection, type_, by_type[type_])
            self._store_ops(connection, by_type)

        self._backend.transact(write)

    def load(self) -> Iterator[r.Record]:
        """Give every record back: those of ops last, by policy in order of seq, without payloads.

        Raises:
            JournalDamagedError: at the first that is not as it was written.
            ValueError: if the file cannot be read.
        """
        try:
            with self._engine.connect() as connection:
                for type_, shelf in SHELVES.items():
                    for key, record in self._rows(connection, shelf.table, "record"):
                        yield self._read(_READERS[type_], shelf.table, key, record)
                for key, record, done in self._rows(connection, ops, "record", "done"):
                    yield self._read(_READERS[r.OpRecord], ops, key, record)
                    if done is not None:
                        yield self._read(_READERS[r.OpDone], ops, key, done)
        except sa.exc.DBAPIError as error:
            raise self._backend.unreadable(error) from error

    def payload(self, tenant: str, policy: str, seq: int) -> bytes:
        """Return the inline payload of an op.

        Raises:
            KeyError: if there is none: it was covered by a checkpoint, or never written.
            JournalError: if it cannot be read, or is not as it was written.
        """
        try:
            with self._engine.connect() as connection:
                row = connection.execute(self._payload, {"k_tenant": tenant, "k_policy": policy, "k_seq": seq}).first()
            if row is None or row.payload is None:
                raise KeyError(f"the journal has no payload of op {seq} of policy '{policy}'")
            return rows.unseal(row.payload)
        except sa.exc.DBAPIError as error:
            raise JournalError(f"the journal cannot be read: {error.orig}") from error
        except ValueError as error:
            raise JournalError(f"the payload in the journal is damaged: {error}") from error

    def close(self) -> None:
        """Let go of it."""
        self._backend.close()

    def _rows(self, connection: sa.Connection, table: sa.Table, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Give key and columns of all rows of a table in the order of keys."""
        keys = tuple(table.primary_key)
        query = sa.select(*keys, *(table.c[name] for name in columns)).order_by(*keys).execution_options(yield_per=1000)
        count = 0
        for row in connection.execute(query):
            count += 1
            yield (tuple(row[: len(keys)]), *row[len(keys) :])
        # Rows are found by an index: one that has lost some of them would go unnoticed.
        if count != self._backend.count(connection, table):
            raise self._backend.damaged(f"the index of table '{table.name}' has lost rows")

    def _read(self, reader: rows.Reader, table: sa.Table, key: tuple[object, ...], data: object) -> Any:
        try:
            return reader.read(key, data)
        except ValueError as error:
            raise self._backend.damaged(f"{place(table, key)} is not as it was written ({error})") from error

    def _store(self, connection: sa.Connection, type_: type[r.Base], records: Iterable[Any]) -> None:
        _, key = SHELVES[type_]
        newest = {tuple(getattr(record, field) for field in key): record for record in records}
        gone = [k for k, record in newest.items() if getattr(record, "gone", False)]
        kept: list[_Row] = [
            {**dict(zip(key, k, strict=True)), "record": rows.write(record)}
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
            outcomes = [{**_named(_OP_KEY, (d.tenant, d.policy, d.seq)), "b_done": rows.write(d)} for d in done]
            connection.execute(self._op_done, outcomes)
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
        "record": rows.write(slim),
        "payload": rows.seal(record.payload) if record.payload else None,
        "done": None,
    }


def _named(key: Iterable[str], values: Iterable[object]) -> _Row:
    return {f"k_{field}": value for field, value in zip(key, values, strict=True)}


def _upsert(
    insert: Callable[[sa.Table], Any], table: sa.Table, key: Iterable[str], columns: Iterable[str]
) -> sa.Insert:
    statement = insert(table)
    names = itertools.chain(key, columns)
    statement = statement.values({name: sa.bindparam(name) for name in names})
    changed = {column: statement.excluded[column] for column in columns}
    upsert: sa.Insert = statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=changed)
    return upsert


def _delete(table: sa.Table, key: Iterable[str]) -> sa.Delete:
    return sa.delete(table).where(*(table.c[field] == sa.bindparam(f"k_{field}") for field in key))
