"""After a power cut every acknowledged record is there: what counts as written is only what was synced.

`PowerCut` stands between SQLite and the disk (a VFS around the usual one) and keeps each file as it was when it
was synced last. A cut leaves those; where the disk had gone on writing by itself, it leaves a file as it is now.
"""

from __future__ import annotations

import ctypes
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from common.journal.journal import Journal, journal_url
from common.journal.records import OpDone, OpRecord, Record, key_of
from joynexus.wire.front import OpResult

LIBRARY = "libsqlite3.so.0"
_ALIVE: list[PowerCut] = []
"""Callbacks live as long as SQLite may call them: through a connection that a failed test leaves open, to the end."""
_POINTER = ctypes.c_void_p
_SYNC = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.c_int)
_OPEN = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER, _POINTER, ctypes.c_int, _POINTER)


class _Vfs(ctypes.Structure):
    """`sqlite3_vfs`, version 3."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("file_bytes", ctypes.c_int),
        ("longest_path", ctypes.c_int),
        ("next", _POINTER),
        ("name", ctypes.c_char_p),
        ("data", _POINTER),
        ("open", _POINTER),
        ("others", _POINTER * 15),
    )


class _Methods(ctypes.Structure):
    """`sqlite3_io_methods`, version 3."""

    _fields_ = (("version", ctypes.c_int), ("before", _POINTER * 4), ("sync", _POINTER), ("behind", _POINTER * 13))


class PowerCut:
    """Keeps what is on disk for certain.

    Attributes:
        synced: content of files as of their last sync, by name.
    """

    def __init__(self) -> None:
        self.synced: dict[str, bytes] = {}
        self._library = ctypes.CDLL(LIBRARY)
        self._library.sqlite3_vfs_find.restype = _POINTER
        self._library.sqlite3_libversion.restype = ctypes.c_char_p
        assert self._library.sqlite3_libversion().decode() == sqlite3.sqlite_version
        self._usual = self._library.sqlite3_vfs_find(None)
        self._vfs = _Vfs.from_buffer_copy(ctypes.string_at(self._usual, ctypes.sizeof(_Vfs)))
        self._really_open = _OPEN(self._vfs.open)
        self._open = _OPEN(self._opened)
        self._vfs.name, self._vfs.open = b"power-cut", ctypes.cast(self._open, _POINTER)
        self._methods: dict[int, _Methods] = {}
        self._alive: list[Any] = []
        self._names: dict[int, str] = {}
        _ALIVE.append(self)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch all databases that are opened meanwhile."""
        assert self._library.sqlite3_vfs_register(ctypes.byref(self._vfs), 1) == 0
        try:
            yield
        finally:
            self._library.sqlite3_vfs_register(_POINTER(self._usual), 1)
            self._library.sqlite3_vfs_unregister(ctypes.byref(self._vfs))

    def leave(self, folder: Path, now: Path, *, kept: tuple[str, ...] = ()) -> None:
        """Write what a cut leaves behind; of files in `kept` the disk happens to have everything."""
        folder.mkdir()
        for name, content in self.synced.items():
            current = now / Path(name).name
            if Path(name).parent == now and current.exists():
                (folder / current.name).write_bytes(current.read_bytes() if current.name in kept else content)

    def _opened(self, _vfs: int, name: int | None, file: int, flags: int, out: int) -> int:
        code: int = self._really_open(self._usual, name, file, flags, out)
        if code == 0 and name is not None:
            place = ctypes.cast(file, ctypes.POINTER(_POINTER))
            usual = place[0]
            assert usual is not None
            if usual not in self._methods:
                methods = _Methods.from_buffer_copy(ctypes.string_at(usual, ctypes.sizeof(_Methods)))
                really_sync = _SYNC(methods.sync)
                sync = _SYNC(lambda file, flags: self._sync(really_sync, file, flags))
                methods.sync = ctypes.cast(sync, _POINTER)
                self._alive += [really_sync, sync]
                self._methods[usual] = methods
            place[0] = ctypes.addressof(self._methods[usual])
            self._names[file] = ctypes.string_at(name).decode()
        return code

    def _sync(self, really_sync: Any, file: int, flags: int) -> int:
        code: int = really_sync(file, flags)
        name = self._names[file]
        self.synced[name] = Path(name).read_bytes()
        return code


@pytest.fixture
def cut() -> PowerCut:
    try:
        return PowerCut()
    except OSError:
        pytest.skip(f"this Python's SQLite is not {LIBRARY}: nothing can stand between it and the disk")


def step(seq: int) -> list[Record]:
    payload = os.urandom(9000)
    return [
        OpRecord(tenant="a", policy="p", seq=seq, kind="train_step", payload=payload, payload_nbytes=len(payload)),
        OpDone(tenant="a", policy="p", seq=seq, result=OpResult(policy="p", seq=seq)),
    ]


def found(folder: Path) -> set[tuple[object, ...]]:
    journal = Journal(journal_url(folder / "journal.db"))
    try:
        return {key_of(record) for record in journal.load()}
    finally:
        journal.close()


@pytest.mark.parametrize("kept", [(), ("journal.db",), ("journal.db-wal",)], ids=["synced", "file", "log"])
def test_every_acknowledged_record_survives_a_power_cut(cut: PowerCut, tmp_path: Path, kept: tuple[str, ...]) -> None:
    lived = tmp_path / "lived"
    lived.mkdir()
    Journal(journal_url(lived / "journal.db")).close()
    empty = cut.synced[str(lived / "journal.db")] = (lived / "journal.db").read_bytes()
    acknowledged: set[tuple[object, ...]] = set()
    with cut.watching():
        journal = Journal(journal_url(lived / "journal.db"))
        for seq in range(1, 401):  # long enough for SQLite to move the log into the file
            records = step(seq)
            journal.append(records)
            acknowledged.update(map(key_of, records))
            if seq % 97 == 0:
                cut.leave(tmp_path / f"cut{seq}", lived, kept=kept)
                assert found(tmp_path / f"cut{seq}") == acknowledged
        journal.close()
    assert cut.synced[str(lived / "journal.db")] != empty
    assert found(lived) == acknowledged


def test_a_journal_that_does_not_wait_for_the_disk_would_be_caught(cut: PowerCut, tmp_path: Path) -> None:
    lived = tmp_path / "lived"
    lived.mkdir()
    Journal(journal_url(lived / "journal.db")).close()
    cut.synced[str(lived / "journal.db")] = (lived / "journal.db").read_bytes()
    with cut.watching():
        journal = Journal(journal_url(lived / "journal.db"))

        def hasty(connection: Any, _record: object) -> None:
            connection.execute("PRAGMA synchronous=NORMAL")

        sa.event.listen(journal._engine, "connect", hasty)
        journal._engine.dispose()
        journal.append(step(1))
        cut.leave(tmp_path / "cut", lived)
        journal.close()
    assert found(tmp_path / "cut") == set()


def test_a_new_journal_has_its_name_only_when_it_is_on_disk(cut: PowerCut, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    with cut.watching():
        journal = Journal(journal_url(folder / "journal.db"))
        made = cut.synced[str(folder / "journal.db.new")]
        journal.close()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "journal.db").write_bytes(made)
    assert found(tmp_path / "cut") == set()
