"""What can still be read of a journal, however damaged its file is.

In: a journal's file that nobody else has open, and that this may change (a copy). Out: its sound records; for all else
what is lost and why. Never: a record that was not written, or a lost one that is passed over in silence.

A record is believed if its checksum fits, wherever it was found. Rows are read in the order of the file, from both ends
where a page in the middle cannot be read; the index then tells which ones are missing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from common.journal import records as r
from common.journal import rows
from common.journal.consequences import Key
from common.journal.tables import SHELVES, ops, place

_MISSES = 1000
"""So many rows in a row that cannot be read are looked for one by one."""
_DONE = rows.Reader.of(r.OpDone)


class Found(msgspec.Struct):
    """What is in a journal.

    Attributes:
        sound: records by key; those of ops last, by policy in order of seq, with their payloads left out.
        lost: keys of records that are damaged, and why.
        unknown: damage that cannot be traced to records, in sentences.
        payloads: row of the payload of each op that needs one.
    """

    sound: dict[Key, r.Base] = {}
    lost: dict[Key, str] = {}
    unknown: list[str] = []
    payloads: dict[Key, int] = {}

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged."""
        return not (self.lost or self.unknown)


class Examination:
    """Reads one journal.

    Args:
        path: its file, of today's schema.
    """

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        # Names are shown to people, whatever has become of them.
        self._database.text_factory = lambda data: data.decode("utf-8", "backslashreplace")
        self.found = Found()

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def schema(self) -> str:
        """Return the schema that the file says it has; nothing if that cannot be read."""
        try:
            row = self._database.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.DatabaseError:
            return ""
        return str(row[0]) if row else ""

    def run(self) -> Found:
        """Read all tables.

        Raises:
            ValueError: if the file is no database any more, in a clause.
        """
        try:
            self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.DatabaseError as error:
            raise ValueError(str(error)) from error
        for kind, shelf in SHELVES.items():
            self._table(kind, shelf.table)
        self._table(r.OpRecord, ops)
        self._look_at_payloads()
        self._look_at_pages()
        return self.found

    def payload(self, rowid: int) -> bytes:
        """Return a payload that `found.payloads` names.

        Raises:
            ValueError: if it is not as it was written, in a clause.
        """
        try:
            row = self._database.execute("SELECT payload FROM ops WHERE rowid = ?", (rowid,)).fetchone()
        except sqlite3.DatabaseError as error:
            raise ValueError(f"its payload cannot be read: {error}") from error
        if row is None or row[0] is None:
            raise ValueError("its payload is missing")
        try:
            return rows.unseal(row[0])
        except ValueError as error:
            raise ValueError(f"its payload is damaged: {error}") from error

    def _table(self, kind: type[r.Base], table: sa.Table) -> None:
        """Sort the records of a table into sound and lost."""
        reader, key_columns = rows.Reader.of(kind), [column.name for column in table.primary_key]
        columns = [*key_columns, "record", *(("done",) if table is ops else ())]
        read, complete = self._scan(table.name, columns)
        named: set[tuple[object, ...]] = set()
        sound: list[tuple[Key, list[r.Base], int]] = []
        for rowid, values in read.items():
            key = tuple(values[: len(key_columns)])
            try:
                record = reader.decode(values[len(key_columns)])
            except ValueError as error:
                self.found.lost[(kind, *key)] = str(error)
                continue
            own = r.key_of(record)
            named.add(own[1:])
            together = [record]
            if table is ops and values[-1] is not None:
                try:
                    together.append(_DONE.read(own[1:], values[-1]))
                except ValueError as error:
                    self.found.lost[(r.OpDone, *own[1:])] = str(error)
            sound.append((own, together, rowid))
        for own, together, rowid in sorted(sound, key=lambda entry: entry[0][1:]):
            self.found.sound.update((r.key_of(record), record) for record in together)
            if table is ops:
                self.found.payloads[own] = rowid
        if complete:
            return
        keys, all_keys = self._keys(table.name, key_columns)
        for key in keys - named:
            self.found.lost.setdefault((kind, *key), "its page cannot be read")
        if not all_keys:
            self.found.unknown.append(f"of table '{table.name}', an unknown number of records cannot be read")

    def _look_at_payloads(self) -> None:
        """An op above the checkpoint is of no use without its payload."""
        covered = {key[1:]: getattr(record, "seq", 0) for key, record in self.found.sound.items()
                   if key[0] is r.CheckpointRecord}  # fmt: skip
        for key, rowid in list(self.found.payloads.items()):
            record = self.found.sound[key]
            assert isinstance(record, r.OpRecord)
            needed = record.payload_nbytes > 0 and record.seq > covered.get((record.tenant, record.policy), 0)
            if not needed:
                del self.found.payloads[key]
                continue
            try:
                self.payload(rowid)
            except ValueError as error:
                del self.found.payloads[key], self.found.sound[key]
                self.found.sound.pop((r.OpDone, *key[1:]), None)
                self.found.lost[key] = str(error)

    def _look_at_pages(self) -> None:
        """Damage that hurt no record is damage too: an index, a page that is free."""
        if not self.found.is_sound:
            return
        try:
            problems = [row[0] for row in self._database.execute("PRAGMA integrity_check(3)")]
        except sqlite3.DatabaseError as error:
            problems = [str(error)]
        self.found.unknown += [f"no record is hurt, but the file is: {text}" for text in problems if text != "ok"]

    def _scan(self, table: str, columns: list[str]) -> tuple[dict[int, list[Any]], bool]:
        """Return the rows that can be read, and whether those are all."""
        selected = ", ".join(("rowid", *columns))
        read: dict[int, list[Any]] = {}

        def take(where: str, *values: int) -> bool:
            query = f"SELECT {selected} FROM {table} NOT INDEXED {where}"
            try:
                with closing(self._database.execute(query, values)) as found:
                    for rowid, *row in found:
                        read[rowid] = row
            except (sqlite3.DatabaseError, OverflowError):
                return False
            return True

        if take("ORDER BY rowid"):
            return read, True
        last = max(read, default=0)
        take("WHERE rowid > ? ORDER BY rowid DESC", last)
        behind = min((rowid for rowid in read if rowid > last), default=0)
        rowid, missing = last, 0
        while missing < _MISSES and (rowid := rowid + 1) != behind:
            take("WHERE rowid = ?", rowid)
            missing = 0 if rowid in read else missing + 1
        return read, False

    def _keys(self, table: str, columns: list[str]) -> tuple[set[tuple[object, ...]], bool]:
        """Return the keys that the index of a table knows, and whether those are all."""
        names, keys = ", ".join(columns), set()

        def take(order: str) -> bool:
            query = f"SELECT {names} FROM {table} INDEXED BY sqlite_autoindex_{table}_1 ORDER BY " + ", ".join(
                f"{name} {order}" for name in columns
            )
            try:
                for key in self._database.execute(query):
                    keys.add(tuple(key))
            except sqlite3.DatabaseError:
                return False
            return True

        return keys, take("ASC") or take("DESC")


def findings(reasons: dict[Key, str]) -> Iterator[str]:
    """Say of each record where it is and what is the matter."""
    for (kind, *key), why in reasons.items():
        table = ops if kind in (r.OpRecord, r.OpDone) else SHELVES[kind].table  # type: ignore[index]
        what = "the outcome in " if kind is r.OpDone else ""
        yield f"{what}{place(table, key)}: {why}"
