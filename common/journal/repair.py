"""Look at a journal that a master does not start with, and make one of it that it does start with.

In: the folder of a journal that no master has open. Out: what is damaged; from `repair` a journal of what is sound, and
beside it the file as it was found. Never: a change before that copy is on disk, a loss that is not said, or, whenever
this ends, a file that a master would take for a journal and that is none.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgspec

from common.journal import records as r
from common.journal import wal
from common.journal.consequences import Key, consequences
from common.journal.errors import JournalDamagedError
from common.journal.examine import Examination, Found, findings
from common.journal.journal import Journal, journal_url
from common.journal.opening import COMPANIONS, NEWEST_SCHEMA, only_one, read_wal, sync_folder

_BATCH = 200
_HEADER = 100
"""Bytes of a SQLite file's header: the size of a page is in bytes 16 and 17, their number in 28 to 31, big-endian."""
_HOPELESS = "put it back from a copy, or move it away to begin with an empty cluster"


class Report(msgspec.Struct, frozen=True):
    """What was found.

    Attributes:
        damaged: places and what is wrong with them.
        besides: places of sound records that mean nothing without the damaged ones, and why.
        kept: number of records that stay.
        copy: the file as it was found, if this repaired it.
    """

    damaged: tuple[str, ...]
    besides: tuple[str, ...]
    kept: int
    copy: Path | None = None


def check(folder: Path) -> Report:
    """Look at a journal without changing it.

    Raises:
        ValueError: if there is none, a master has it open, or nothing can be read of it.
    """
    with _opened(folder) as (_, examination):
        return _report(examination.found, _without(examination.found))


def repair(folder: Path) -> Report:
    """Set aside what is damaged; a journal that is sound stays as it is.

    Raises:
        ValueError: as `check`.
        OSError: if the copy or the new file cannot be written; the journal is as it was.
    """
    with _opened(folder) as (path, examination):
        found = examination.found
        without = _without(found)
        report = _report(found, without)
        if found.is_sound:
            return report
        copy = _copy(path)
        new = path.with_name(f"{path.name}.repaired")
        _remove(new)
        _write(new, found, without, examination)
        # From here on the file is an empty one, which no master takes for a journal, until the new one is in its place.
        os.truncate(path, 0)
        for end in COMPANIONS:
            path.with_name(path.name + end).unlink(missing_ok=True)
        new.rename(path)
        sync_folder(folder)
        return msgspec.structs.replace(report, copy=copy)


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[Path, Examination]]:
    """Keep masters away, and examine a copy that may be changed."""
    path = folder / "journal.db"
    if not path.is_file():
        raise ValueError(f"there is no journal in {folder}: name the master's state folder, which holds journal.db")
    with ExitStack() as stack:
        stack.enter_context(only_one(path))
        if path.stat().st_size == 0:
            raise ValueError(f"the journal {path} is empty: {_HOPELESS}")
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="journal-", dir=folder))) / path.name
        shutil.copyfile(path, work)
        log = read_wal(path)
        cut = wal.damage(log)
        if log:
            log = wal.mended(log, _page_bytes(work)) if cut else log
            work.with_name(f"{work.name}-wal").write_bytes(log)
        objection = _objection(work)
        _mend_header(work)
        examination = stack.enter_context(closing(Examination(work)))
        try:
            schema = examination.schema()
            if schema.isdigit() and schema < NEWEST_SCHEMA:
                raise ValueError(f"it has schema {schema}: repair it with the release that wrote it")
            examination.run()
        except ValueError as error:
            raise ValueError(f"nothing can be read of the journal {path} ({error}): {_HOPELESS}") from error
        if cut:
            examination.found.unknown.append(f"{cut}; of records that were changed there, older ones may be here")
        if objection and examination.found.is_sound:
            examination.found.unknown.append(f"no record is hurt, but the file is: {objection}")
        yield path, examination


def _objection(path: Path) -> str:
    """Bring a journal to today's schema and load it, as a master would; say why that is not possible."""
    try:
        journal = Journal(journal_url(path))
        try:
            for _ in journal.load():
                pass
        finally:
            journal.close()
    except JournalDamagedError as error:
        return error.how
    return ""


def _mend_header(path: Path) -> None:
    """Have as many pages as the header says, or it say how many there are: else SQLite gives none of them."""
    with path.open("r+b") as file:
        head = file.read(_HEADER)
        page, said = int.from_bytes(head[16:18], "big"), int.from_bytes(head[28:32], "big")
        if len(head) < _HEADER or page < 512:
            return
        there = path.stat().st_size // page
        if there < said <= 1000 + 100 * there:
            file.truncate(said * page)  # the file lost its end
        else:
            file.seek(28)
            file.write(there.to_bytes(4, "big"))


def _page_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return int.from_bytes(file.read(18)[16:], "big")


def _without(found: Found) -> dict[Key, str]:
    return {} if found.is_sound else consequences(list(found.sound.values()), found.lost, unknown=bool(found.unknown))


def _report(found: Found, without: dict[Key, str]) -> Report:
    return Report(
        damaged=(*findings(found.lost), *found.unknown),
        besides=tuple(findings(without)),
        kept=len(found.sound) - len(without),
    )


def _copy(path: Path) -> Path:
    """Keep the file as it is under a name that is free, on disk."""
    number = 1
    while (copy := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    for end in ("-wal", ""):  # the file last: with it the copy is complete
        source = path.with_name(path.name + end)
        if source.exists():
            target = copy.with_name(copy.name + end)
            shutil.copyfile(source, target)
            with target.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(path.parent)
    return copy


def _write(path: Path, found: Found, without: dict[Key, str], examination: Examination) -> None:
    """Write a journal of what stays."""
    journal = Journal(journal_url(path))
    try:
        batch: list[r.Base] = []
        for key, record in found.sound.items():
            if key in without:
                continue
            if key in found.payloads:
                record = msgspec.structs.replace(record, payload=examination.payload(found.payloads[key]))
            batch.append(record)
            if len(batch) == _BATCH:
                journal.append(batch)  # type: ignore[arg-type]  # every record that was read is one
                batch = []
        journal.append(batch)  # type: ignore[arg-type]
    finally:
        journal.close()
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)


def _remove(path: Path) -> None:
    for end in ("", *COMPANIONS, ".lock", ".new"):
        path.with_name(path.name + end).unlink(missing_ok=True)
