"""Content-addressed files: payloads too large to travel or be journaled inline are named by their hash.

In: bytes, files, or the chunks of an upload. Out: files at `root/<first two hex digits>/<blake3, 64 hex digits>`, each
complete, verified and on disk before its name exists. Never: a path taken from outside (digests are 64 hex digits,
nothing else), a half-written blob under its final name, or a word about who may read what (that is the caller's).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import blake3

_DIGEST = re.compile(r"[0-9a-f]{64}")
_READ_BYTES = 1024 * 1024


class BlobStoreFullError(OSError):
    """The disk has no room for a blob; nothing of the failed write is left."""


class BlobStore:
    """A folder of immutable blobs, safe to share between the processes of one host.

    Args:
        root: folder of the store; made if it is missing. Partial uploads lie in `root/partial`, on the same file
            system, so that a finished one is moved into place atomically.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._partial = root / "partial"
        self._partial.mkdir(parents=True, exist_ok=True)
        self._announced: dict[str, int] = {}  # digest -> bytes, of the uploads begun in this process
        self._stale: dict[str, int] = {}  # partial files that the last sweep found old, with their stamps

    # Whole blobs

    def put_bytes(self, data: bytes | memoryview) -> str:
        """Store `data` and return its digest; storing the same again is cheap and changes nothing.

        Raises:
            BlobStoreFullError: if the disk is full.
        """
        digest = blake3.blake3(data).hexdigest()
        if not self.touch(digest):
            with self.new_file() as temporary:
                with temporary.open("wb") as file:
                    file.write(data)
                self._publish(temporary, digest)
        return digest

    def put_file(self, path: Path, *, move: bool = False) -> tuple[str, int]:
        """Store the content of a file.

        Args:
            path: the file; it must not change meanwhile.
            move: give the file itself to the store (no copy where both lie on one file system).

        Returns:
            The digest and the number of bytes.

        Raises:
            BlobStoreFullError: if the disk is full.
        """
        digest, nbytes = digest_file(path), path.stat().st_size
        if not self.touch(digest):
            with self.new_file() as temporary:
                if move:
                    shutil.move(path, temporary)
                else:
                    shutil.copyfile(path, temporary)
                self._publish(temporary, digest)
        elif move:
            path.unlink()
        return digest, nbytes

    def has(self, digest: str) -> bool:
        """Return whether the complete blob is here."""
        return self._place(digest).is_file()

    def touch(self, digest: str) -> bool:
        """Note that somebody needs this blob now, and return whether it is here: `delete` leaves it for a while."""
        try:
            os.utime(self._place(digest))
        except FileNotFoundError:
            return False
        return True

    def path(self, digest: str) -> Path:
        """Return the blob's file, to be read only.

        Raises:
            KeyError: if the blob is not here.
        """
        place = self._place(digest)
        if not place.is_file():
            raise KeyError(f"blob {digest} is not in this store; send it again")
        return place

    def size(self, digest: str) -> int:
        """Return the blob's length in bytes; KeyError if it is not here."""
        return self.path(digest).stat().st_size

    def read(self, digest: str, offset: int, length: int) -> bytes:
        """Return at most `length` bytes from `offset` on, fewer at the end; KeyError if the blob is not here."""
        with self.path(digest).open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def stamp(self, digest: str) -> int | None:
        """Return what changes whenever somebody stores or touches the blob; None if it is not here.

        It is no time: clocks jump.
        """
        try:
            return self._place(digest).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def delete(self, digest: str, *, stamp: int | None = None) -> bool:
        """Remove a blob, unless somebody stored or touched it since `stamp` was taken; return whether that was done."""
        place = self._place(digest)
        if stamp is not None and self.stamp(digest) != stamp:
            return False
        doomed = self._partial / f"gone-{uuid.uuid4().hex}"
        try:
            # Away first: whoever stores it from now on writes it anew, and whoever touched it before is seen below.
            place.rename(doomed)
        except FileNotFoundError:
            return False
        if stamp is not None and doomed.stat().st_mtime_ns != stamp:
            doomed.replace(place)
            return False
        doomed.unlink()
        return True

    def untouched(self, first: str, older_than_s: float) -> list[str]:
        """Return the blobs whose digests begin with two hex digits, and that nobody stored or touched for so long."""
        folder, limit = self._root / first, time.time() - older_than_s
        if not folder.is_dir():
            return []
        return [path.name for path in folder.iterdir() if _DIGEST.fullmatch(path.name) and path.stat().st_mtime < limit]

    @contextmanager
    def new_file(self) -> Iterator[Path]:
        """Give a path on the store's file system to write a blob to, for `put_file(path, move=True)`.

        Whatever is left there afterwards is removed; a full disk is raised as BlobStoreFullError.
        """
        path = self._partial / f"new-{uuid.uuid4().hex}"
        try:
            with _full_disk_is_clean():
                yield path
        finally:
            path.unlink(missing_ok=True)

    # Uploads in chunks, resumable after a restart of either side

    def begin(self, digest: str, nbytes: int) -> int:
        """Announce an upload, or ask how far it came.

        Returns:
            The offset from which bytes are missing: `nbytes` if the blob is complete already.

        Raises:
            ValueError: if the digest or the length is none.
            BlobStoreFullError: if the disk has no room for the rest.
        """
        if nbytes < 0:
            raise ValueError(f"a blob of {nbytes} bytes cannot be uploaded: the length must be 0 or more")
        if self.touch(digest):
            return nbytes
        upload = self._upload(digest)
        there = upload.stat().st_size if upload.exists() else 0
        if there > nbytes:  # an earlier announcement gave another length: one of the two is wrong, so start anew
            upload.unlink()
            there = 0
        if nbytes - there > shutil.disk_usage(self._partial).free:
            raise BlobStoreFullError(
                errno.ENOSPC, f"the disk has no room for the {nbytes - there} missing bytes of blob {digest}"
            )
        self._announced[digest] = nbytes
        return there

    def append(self, digest: str, offset: int, data: bytes | memoryview) -> int:
        """Write a chunk of an upload; the same chunk again changes nothing.

        Returns:
            The offset from which bytes are missing now.

        Raises:
            ValueError: if the upload was not begun, or the chunk leaves a hole or goes past the announced length.
            BlobStoreFullError: if the disk is full; the upload stays as it was before this chunk.
        """
        if self.has(digest):
            return self.size(digest)
        nbytes = self._announced.get(digest)
        if nbytes is None:
            raise ValueError(f"the upload of blob {digest} was not begun here: begin it again to learn its offset")
        upload = self._upload(digest)
        there = upload.stat().st_size if upload.exists() else 0
        if not 0 <= offset <= there:
            raise ValueError(f"a chunk of blob {digest} starts at byte {offset}, but the next missing byte is {there}")
        if offset + len(data) > nbytes:
            raise ValueError(f"a chunk of blob {digest} goes past the announced {nbytes} bytes")
        with _full_disk_is_clean():
            try:
                with upload.open("r+b" if there else "wb") as file:
                    file.seek(offset)
                    file.write(data)
            except OSError:
                if upload.exists():
                    os.truncate(upload, there)
                raise
        return max(there, offset + len(data))

    def finish(self, digest: str, *, into: BlobStore | None = None) -> None:
        """Verify an upload and give it its name, durably.

        Args:
            digest: of the upload.
            into: another store on this file system, to have the blob there instead; other threads may use both.

        Raises:
            ValueError: if bytes are missing, or the content has another hash (the upload is removed then).
        """
        store = self if into is None else into
        if store is self and self.has(digest):
            self.abandon(digest)
            return
        upload = self._upload(digest)
        there = upload.stat().st_size if upload.exists() else 0
        nbytes = self._announced.get(digest)
        if nbytes is None or there < nbytes:
            raise ValueError(
                f"the upload of blob {digest} is not complete: {there} of {nbytes or 'unknown'} bytes came"
            )
        if nbytes == 0:
            upload.touch()
        actual = digest_file(upload)
        if actual != digest:
            self.abandon(digest)
            raise ValueError(f"the uploaded bytes have digest {actual}, not {digest}: send the blob again")
        # Also if it is there already: how long this takes is not to tell whether somebody else has the same bytes.
        try:
            store._publish(upload, digest)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                # After a failed fsync, Linux takes pages for written that are not: only sending them again helps.
                self.abandon(digest)
            raise
        self._announced.pop(digest, None)

    def abandon(self, digest: str) -> None:
        """Forget an upload and what came of it."""
        self._announced.pop(digest, None)
        self._upload(digest).unlink(missing_ok=True)

    def partial(self) -> Iterator[tuple[str, int]]:
        """Give the uploads that are not finished, also those from before a restart, with the bytes that came."""
        for path in self._partial.iterdir():
            if _DIGEST.fullmatch(path.name):
                yield path.name, path.stat().st_size

    def sweep(self, older_than_s: float = 86_400.0) -> int:
        """Remove partial uploads and temporary files that nobody wrote to for a while; return how many.

        Two sweeps have to find a file old and unchanged: at the first, the clock may just have jumped.
        """
        limit, removed = time.time() - older_than_s, 0
        before, self._stale = self._stale, {}
        for path in self._partial.iterdir():
            try:
                status = path.stat()
            except FileNotFoundError:  # somebody has just finished with it
                continue
            if status.st_mtime >= limit:
                continue
            if before.get(path.name) != status.st_mtime_ns:
                self._stale[path.name] = status.st_mtime_ns
                continue
            path.unlink(missing_ok=True)
            self._announced.pop(path.name, None)
            removed += 1
        return removed

    # Where things lie

    def _place(self, digest: str) -> Path:
        return self._root / check_digest(digest)[:2] / digest

    def _upload(self, digest: str) -> Path:
        return self._partial / check_digest(digest)

    def _publish(self, source: Path, digest: str) -> None:
        """Make `source` durable, then visible under its digest, in this order."""
        place = self._place(digest)
        if not place.parent.exists():
            place.parent.mkdir(exist_ok=True)
            _sync(self._root)
        os.utime(source)  # it is stored now, whenever it was written
        _sync(source)
        source.replace(place)
        _sync(place.parent)


def check_digest(digest: str) -> str:
    """Return `digest` if it is one; ValueError otherwise (so that no path can be smuggled in)."""
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"'{digest[:80]}' is no blob digest: a digest is 64 lower-case hex digits")
    return digest


def digest_file(path: Path, moved: Callable[[], object] = lambda: None) -> str:
    """Return the blake3 hash of a file's content, 64 hex digits.

    It is read, not mapped: of a file that is cut meanwhile, or a disk that fails, a map is the end of the process.

    Args:
        path: the file.
        moved: called again and again, so that a large file on a slow disk is known to move on.
    """
    hasher, buffer = blake3.blake3(), memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while nbytes := file.readinto(buffer):
            hasher.update(buffer[:nbytes])
            moved()
    return hasher.hexdigest()


@contextmanager
def _full_disk_is_clean() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BlobStoreFullError(
                error.errno, "the disk is full: free some space and send the blob again"
            ) from error
        raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
