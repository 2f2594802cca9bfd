"""Backups: a copy of journal, blobs and keys, from which a cluster goes on elsewhere.

In: a cluster's places, or a backup. Out: a folder that has its name only when it is complete; a cluster's places,
filled. Never: a journal that refers to blobs which the copy has not (unless they were lost before: then it is said), a
backup taken for one that is not whole, or a file of a cluster that is there already overwritten.

    backup.json    written last: what is in it           journal.db    the journal, as of one moment
    blobs/         as in the store                       keys/         the folder of keys, if it is to be there

The journal is copied first and the blobs after it, so all that it refers to is there: while the master runs, it is
asked to delete none meanwhile (`BackupBegin`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib.metadata import version
from pathlib import Path

import blake3
import msgspec

from common.blobs import BlobStore, check_digest, digest_file
from common.journal.errors import JournalDamagedError
from common.journal.journal import Journal, journal_url
from common.journal.opening import NEWEST_SCHEMA, only_one, sync_folder
from common.journal.references import references
from common.journal.repair import check
from joynexus.keys import write_private
from joynexus.unreadable import UNREADABLE

_CONTENTS = "backup.json"
_UNFINISHED = b"a restore is under way, or ended before its time: do it again"
"""Stands in `journal.db-wal` meanwhile: a master does not begin a new journal beside one."""
_MARKER = "journal.db-wal"
_LOCK = ".lock"
_CHUNK = 1024 * 1024


class BusyError(ValueError):
    """A master has the journal: it has to be asked to keep its blobs."""


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """Where a cluster has what must survive.

    Attributes:
        state: the master's state folder, which has the journal.
        journal_url: or the journal with a Postgres server.
        blobs: the blob store.
        keys: the folder of keys; None: leave keys out.
    """

    state: Path
    blobs: Path
    keys: Path | None
    journal_url: str = ""


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """`backup.json`.

    Attributes:
        form: of the backup; another one is not read.
        made_s: when, in seconds since the Unix epoch.
        release, schema: what made it, and the journal's schema.
        records: of the journal.
        blobs, nbytes: number and bytes of the blobs.
        missing: blobs that the journal refers to and that were lost or damaged already.
        keys: whether keys are in it.
        digests: of the journal and each file of keys, by its path in the backup; a blob's is its name.
    """

    form: int
    made_s: float
    release: str
    schema: str
    records: int
    blobs: int
    nbytes: int
    missing: tuple[str, ...] = ()
    keys: bool = False
    digests: dict[str, str] = {}


def make(folder: Path, places: Places, *, live: bool) -> Contents:
    """Make a backup.

    Args:
        folder: that is to be made; empty if it is there.
        places: of the cluster.
        live: a master runs, and keeps its blobs meanwhile.

    Raises:
        BusyError: if a master has the journal and `live` is not said.
        ValueError: if there is no journal, it is damaged, the folder is not empty or within what is
            copied, or another process fills it now.
        OSError: if the copy cannot be written. Nothing is left then.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: name a folder that is to be made")
    for place in filter(None, (places.state, places.blobs, places.keys)):
        if folder.resolve().is_relative_to(
            place.resolve()
        ):  # it would be copied into itself, or taken for the cluster's
            raise ValueError(f"{folder} lies within {place}, which is to be copied: name a folder elsewhere")
    with _locked(places, live=live), _work_folder(folder.with_name(f"{folder.name}.partial")) as work:
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty: another process has made a backup there meanwhile")
        contents = _fill(work, places)
        os.sync()
        if folder.exists():
            folder.rmdir()
        work.rename(folder)
        (folder / _LOCK).unlink()
        sync_folder(folder.parent)
    return contents


def restore(folder: Path, places: Places) -> Contents:
    """Fill the places of a cluster that is not there yet from a backup; doing it again after an end before its time is
    fine.

    Raises:
        ValueError: if the backup is not whole or its journal is damaged, or there is a cluster already. Nothing is
            written then.
        OSError: if it cannot be written; no master starts with what there is then.
    """
    contents = verify(folder)
    if places.keys is not None and not contents.keys:
        raise ValueError(f"the backup {folder} has no keys: make new ones, with --no-keys")
    _check_empty(places)
    places.state.mkdir(parents=True, exist_ok=True)
    with _locked(places, live=bool(places.journal_url)):  # a server is locked by whoever writes to it, at the end
        marker = places.state / _MARKER
        marker.write_bytes(_UNFINISHED)
        sync_folder(places.state)
        store = BlobStore(places.blobs)
        for path in _blobs(folder / "blobs"):
            store.put_file(path)
        if places.keys is not None:
            _copy_keys(folder / "keys", places.keys)
        _put_journal(folder / "journal.db", places)
        marker.unlink()  # in between, no master takes the one for the other's log
        sync_folder(places.state)
    return contents


def verify(folder: Path) -> Contents:
    """Read all of a backup.

    Raises:
        ValueError: if it is none, not whole, or damaged: what is wrong, in a sentence.
    """
    try:
        contents = msgspec.json.decode((folder / _CONTENTS).read_bytes(), type=Contents)
    except (OSError, *UNREADABLE) as error:
        raise ValueError(f"{folder} is no backup, or one that was not finished: it has no {_CONTENTS}") from error
    if contents.form != 1 or contents.schema > NEWEST_SCHEMA:
        raise ValueError(
            f"the backup {folder} was made by release {contents.release}: restore it with that or a newer one"
        )
    damaged = [path.name for path in _blobs(folder / "blobs") if digest_file(path) != path.name]
    if damaged:
        raise ValueError(f"the backup {folder} is damaged: {_some(damaged)} in it are not as they were written")
    there = {path.name for path in _blobs(folder / "blobs")}
    if len(there) != contents.blobs:
        raise ValueError(
            f"the backup {folder} is damaged: it has {len(there)} blobs, and {contents.blobs} were written"
        )
    if contents.keys and not (folder / "keys" / "registry.json").exists():
        raise ValueError(f"the backup {folder} is damaged: its keys are not there")
    absent = _absent(folder, there) - set(contents.missing)
    if absent:
        raise ValueError(f"the backup {folder} is damaged: {_some(sorted(absent))} are not in it")
    for name, digest in contents.digests.items():
        if not (folder / name).is_file() or digest_file(folder / name) != digest:
            raise ValueError(f"the backup {folder} is damaged: {name} in it is not as it was written")
    return contents


def _fill(work: Path, places: Places) -> Contents:
    if places.journal_url:
        from common.journal.transfer import to_file  # only with a server: its driver may not be installed

        to_file(places.journal_url, work / "journal.db")
    else:
        _copy_journal(places.state / "journal.db", work / "journal.db")
    report = check(work)
    if report.damaged:
        raise ValueError(
            f"the journal is damaged at {len(report.damaged)} places: `joynexus admin journal check "
            f"{places.journal_url or places.state}` names them"
        )
    blobs = nbytes = 0
    there = set()
    for path in _blobs(places.blobs):
        copied = _copy_blob(path, work / "blobs" / path.parent.name / path.name)
        if copied is not None:
            there.add(path.name)
            blobs, nbytes = blobs + 1, nbytes + copied
    missing = _absent(work, there)
    if places.keys is not None:
        _copy_keys(places.keys, work / "keys")
    for end in (".lock", "-wal", "-shm"):
        (work / f"journal.db{end}").unlink(missing_ok=True)
    others = (work / "journal.db", *(path for path in sorted((work / "keys").rglob("*")) if path.is_file()))
    contents = Contents(
        form=1,
        made_s=time.time(),
        release=version("joynexus"),
        schema=NEWEST_SCHEMA,
        records=report.kept,
        blobs=blobs,
        nbytes=nbytes,
        missing=tuple(sorted(missing)),
        keys=places.keys is not None,
        digests={str(path.relative_to(work)): digest_file(path) for path in others},
    )
    write_private(work / _CONTENTS, msgspec.json.format(msgspec.json.encode(contents)) + b"\n")
    return contents


@contextmanager
def _work_folder(work: Path) -> Iterator[Path]:
    """Give an empty folder to one process at a time, to be given its name; nothing of it is left on an error."""
    work.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (work / _LOCK).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process makes a backup in {work}: wait for it, or name another one") from error
        try:
            for left in work.iterdir():  # of one that was killed
                if left.is_dir():
                    shutil.rmtree(left)
                elif left.name != _LOCK:
                    left.unlink()
            yield work
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise


@contextmanager
def _locked(places: Places, *, live: bool) -> Iterator[None]:
    """Keep masters away meanwhile, unless one runs that knows."""
    if live:
        yield
        return
    with ExitStack() as stack:
        if places.journal_url:
            from common.journal.transfer import without_master

            if not stack.enter_context(without_master(places.journal_url)):
                raise BusyError("a master has the journal: end it first")
        elif not places.state.is_dir():
            raise ValueError(f"there is no journal in {places.state}")
        else:
            try:
                stack.enter_context(only_one(places.state / "journal.db"))
            except ValueError as error:
                raise BusyError(str(error)) from error
        yield


def _check_empty(places: Places) -> None:
    """Refuse to restore beside a cluster; what an unfinished restore left is none."""
    marker = places.state / _MARKER
    unfinished = marker.exists() and marker.read_bytes() == _UNFINISHED
    if places.journal_url:
        from common.journal.transfer import has_records

        if has_records(places.journal_url):
            raise ValueError("the server has a journal there already: name an empty database or schema")
    elif (places.state / "journal.db").exists() or (marker.exists() and not unfinished):
        raise ValueError(f"there is a journal in {places.state} already: restore into an empty folder")
    if places.keys is not None and (places.keys / "registry.json").exists() and not unfinished:
        raise ValueError(f"there are keys in {places.keys} already: with --no-keys they stay")


def _put_journal(copy: Path, places: Places) -> None:
    """Give the journal its place, as a whole."""
    if places.journal_url:
        from common.journal.transfer import to_server

        with tempfile.TemporaryDirectory(
            prefix="journal-", dir=places.state
        ) as work:  # it may get today's schema there
            shutil.copyfile(copy, Path(work) / "journal.db")
            to_server(Path(work) / "journal.db", places.journal_url)
        return
    new = places.state / "journal.db.restored"
    shutil.copyfile(copy, new)
    with new.open("rb") as file:
        os.fsync(file.fileno())
    new.rename(places.state / "journal.db")


def _copy_journal(source: Path, target: Path) -> None:
    """Copy a journal's file as it is at one moment, whoever writes to it."""
    if not source.is_file():
        raise ValueError(f"there is no journal in {source.parent}")
    try:
        with (
            closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True, timeout=60)) as live,
            closing(sqlite3.connect(target)) as copy,
        ):
            live.backup(copy)
    except sqlite3.Error as error:
        raise ValueError(f"the journal in {source.parent} cannot be copied: {error}") from error


def _copy_blob(source: Path, target: Path) -> int | None:
    """Copy a blob and return its bytes; None if it is gone, or not as it was written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    hasher, nbytes = blake3.blake3(), 0
    try:
        with source.open("rb") as reading, target.open("wb") as writing:
            while chunk := reading.read(_CHUNK):
                hasher.update(chunk)
                writing.write(chunk)
                nbytes += len(chunk)
    except FileNotFoundError:
        return None
    if hasher.hexdigest() != source.name:
        target.unlink()
        return None
    return nbytes


def _copy_keys(source: Path, target: Path) -> None:
    """Copy a folder of keys, readable for its owner alone; the registry last, which makes it one."""
    files = [path for path in sorted(source.rglob("*")) if path.is_file() and path.suffix not in (".lock", ".next")]
    for path in sorted(files, key=lambda path: path.name == "registry.json"):
        write_private(target / path.relative_to(source), path.read_bytes())


def _blobs(store: Path) -> Iterator[Path]:
    """Give the blobs of a store, and nothing else that lies there."""
    for folder in sorted(store.glob("[0-9a-f][0-9a-f]")):
        for path in sorted(folder.iterdir()):
            try:
                check_digest(path.name)
            except ValueError:
                continue
            yield path


def _absent(folder: Path, there: set[str]) -> set[str]:
    """Return what the journal of a backup refers to and is not there; it is loaded from a copy that may be changed."""
    beside = folder if os.access(folder, os.W_OK) else None  # there is room for it; a container's /tmp may be small
    with tempfile.TemporaryDirectory(prefix="journal-", dir=beside) as work:
        copy = Path(work) / "journal.db"
        shutil.copyfile(folder / "journal.db", copy)
        try:
            with closing(Journal(journal_url(copy))) as journal:
                return references(journal.load()) - there
        except JournalDamagedError as error:
            raise ValueError(f"the journal in the backup {folder} is damaged: {error.how}") from error


def _some(digests: Sequence[str]) -> str:
    return f"{len(digests)} blobs ({', '.join(digest[:12] for digest in digests[:3])}{', …' * (len(digests) > 3)})"
