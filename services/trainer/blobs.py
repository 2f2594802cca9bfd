"""Blobs as the trainer sees them: files to read, files to give away.

In: digests, or a way to write a file. Out: paths, or digest and size. Never: a scratch file left behind, or a fault of
the service that looks like a fault of somebody's op.
"""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from common.scratch import open_scratch
from joynexus.wire.errors import ErrorCode, JoyNexusError, failure

OpenBlob = Callable[[str], Path]
"""Gives a blob's file; KeyError, OSError or JoyNexusError if it cannot be had."""
PutBlob = Callable[[Path], tuple[str, int]]
"""Takes a file into the blob store; returns digest and bytes."""


class Unreachable(Exception):  # noqa: N818 - a state of the world, which a retry may change
    """Something the service itself should have at hand is not there; nobody's op is at fault, and none was done.

    Attributes:
        code: `UNAVAILABLE`, or `BAD_DATA` if it is there and damaged: until somebody restores it, no retry helps.
    """

    def __init__(self, sentence: str, code: ErrorCode = ErrorCode.UNAVAILABLE) -> None:
        super().__init__(sentence)
        self.code = code


class Blobs:
    """Reads and writes blobs.

    Args:
        open_blob, put_blob: the role's way to the blob store.
        scratch: folder for files on their way there, of trainers alone (`common.scratch`).
    """

    def __init__(self, open_blob: OpenBlob, put_blob: PutBlob, scratch: Path) -> None:
        self._open_blob = open_blob
        self._put_blob = put_blob
        self._scratch = open_scratch(scratch)

    def path(self, digest: str) -> Path:
        """Return a blob's file.

        Raises:
            Unreachable: if it cannot be had now, or is damaged.
        """
        try:
            return self._open_blob(digest)
        except (KeyError, OSError, JoyNexusError) as error:
            if isinstance(error, JoyNexusError) and error.code is ErrorCode.BAD_DATA:
                raise Unreachable(str(error), error.code) from error
            raise Unreachable(f"blob {digest} cannot be had: {_reason(error)}") from error

    def read(self, digest: str) -> bytes:
        """Return a blob's bytes; errors as `path`."""
        try:
            return self.path(digest).read_bytes()
        except OSError as error:
            raise Unreachable(f"blob {digest} cannot be read: {_reason(error)}") from error

    def view(self, digest: str) -> memoryview:
        """Return a blob's bytes as a view on its file, of which only what is looked at is read; errors as `path`."""
        try:
            with self.path(digest).open("rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    return memoryview(b"")  # which cannot be mapped
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise Unreachable(f"blob {digest} cannot be read: {_reason(error)}") from error

    def put(self, write: Callable[[Path], object]) -> tuple[str, int]:
        """Store what `write` writes to the path that it is given; return digest and bytes.

        Raises:
            JoyNexusError: `UNAVAILABLE` if it cannot be stored now (a full disk, no connection).
        """
        path = self._scratch / uuid.uuid4().hex
        try:
            write(path)
            return self._put_blob(path)
        except OSError as error:
            sentence = f"the blob store takes no file now ({_reason(error)}): try again once it does"
            raise JoyNexusError(failure(ErrorCode.UNAVAILABLE, sentence, retry_after_ms=1000)) from error
        finally:
            path.unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    """Say what went wrong; an OSError would name a path of the service."""
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error)
