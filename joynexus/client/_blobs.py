"""Blobs over the bulk socket: content-addressed, in chunks, resumed where they stopped.

In: bytes, files, digests. Out: the blob on the other side, or a file here whose content has the digest. Never: a
partial file under its final name, or a second upload of what the service has already.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import blake3

from joynexus.client._flow import Flow, answered, worked
from joynexus.client._io import Connection, answer_of
from joynexus.wire import ErrorCode, JoyNexusError, Packet, failure
from joynexus.wire.front import BlobBegin, BlobChunk, BlobData, BlobOffset, BlobRead
from joynexus.wire.limits import CHUNK_BYTES

WINDOW = 4
"""Chunks under way at once."""
RESTARTS = 5
PATIENCE_S = 60.0

Progress = Callable[[int], None]
"""Called with the bytes that were moved since the last call."""


@dataclass(frozen=True)
class LocalBlob:
    """Bytes here that are to be there: a file, or bytes in memory."""

    digest: str
    nbytes: int
    source: Path | bytes

    @staticmethod
    def of(source: Path | bytes) -> LocalBlob:
        """Hash a file or bytes."""
        if isinstance(source, Path):
            return LocalBlob(blake3.blake3().update_mmap(source).hexdigest(), source.stat().st_size, source)
        return LocalBlob(blake3.blake3(source).hexdigest(), len(source), source)

    def read(self, start: int) -> bytes:
        """Return the chunk that begins at `start`."""
        if isinstance(self.source, bytes):
            return self.source[start : start + CHUNK_BYTES]
        with self.source.open("rb") as file:
            file.seek(start)
            return file.read(min(CHUNK_BYTES, self.nbytes - start))


def missing(connection: Connection, blobs: Sequence[LocalBlob]) -> Flow[list[tuple[LocalBlob, int]]]:
    """Ask which blobs the service lacks.

    Returns:
        Those blobs, each with the offset from which it is missing.
    """
    distinct = list({blob.digest: blob for blob in blobs}.values())
    asked: deque[tuple[LocalBlob, Future[BlobOffset]]] = deque()
    lacking: list[tuple[LocalBlob, int]] = []

    def take() -> Flow[None]:
        blob, future = asked.popleft()
        answer = yield from answered(future)
        if not answer.complete:
            lacking.append((blob, answer.offset))

    for blob in distinct:
        asked.append((blob, _begin(connection, blob)))
        if len(asked) > WINDOW:
            yield from take()
    while asked:
        yield from take()
    return lacking


def upload(connection: Connection, blob: LocalBlob, progress: Progress = lambda _: None) -> Flow[None]:
    """Send a blob, from where an earlier upload stopped; nothing is sent if the service has it.

    Raises:
        JoyNexusError: if the service refuses it (quota, disk full), or it changed while it was sent.
    """
    restarts = 0
    while True:
        begun = yield from answered(_begin(connection, blob))
        if begun.complete:
            return
        try:
            if (yield from _send_chunks(connection, blob, begun.offset, progress)):
                return
        except JoyNexusError as error:
            # INVALID: a chunk was lost on a broken connection and the next one left a hole; ask where to go on.
            # Or the last one was taken, the service could not write that down, and the whole is to be sent again.
            if error.code is not ErrorCode.INVALID:
                raise
        restarts += 1
        if restarts > RESTARTS:
            sentence = (
                f"blob {blob.digest[:12]} was sent {restarts} times and the service did not keep it: "
                "its disk may be full; try again later"
            )
            raise JoyNexusError(failure(ErrorCode.UNAVAILABLE, sentence))


def _send_chunks(connection: Connection, blob: LocalBlob, offset: int, progress: Progress) -> Flow[bool]:
    """Send everything from `offset` on; return whether the service has verified the whole."""
    under_way: deque[tuple[int, Future[BlobOffset]]] = deque()
    complete = False
    for start in range(offset, max(blob.nbytes, offset + 1), CHUNK_BYTES):
        data = yield from worked(functools.partial(blob.read, start))
        message = BlobChunk(digest=blob.digest, offset=start)
        future = connection.ask(
            message, answer_of(BlobOffset), buffers=(data,), channel="bulk", patience_s=PATIENCE_S, resend_s=10.0
        )
        under_way.append((len(data), future))
        if len(under_way) >= WINDOW:
            size, first = under_way.popleft()
            complete |= (yield from answered(first)).complete
            progress(size)
    for size, future in under_way:
        complete |= (yield from answered(future)).complete
        progress(size)
    return complete


def _begin(connection: Connection, blob: LocalBlob) -> Future[BlobOffset]:
    message = BlobBegin(digest=blob.digest, nbytes=blob.nbytes)
    return connection.ask(message, answer_of(BlobOffset), channel="bulk", patience_s=PATIENCE_S)


def download(connection: Connection, digest: str, target: Path, progress: Progress = lambda _: None) -> Flow[None]:
    """Fetch a blob into a file; a partial file of an earlier try is continued.

    Raises:
        JoyNexusError: if there is no such blob for this tenant, or it arrived with another digest.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{digest[:16]}.partial")
    with partial.open("ab") as file:

        def keep(data: bytes) -> None:
            file.write(data)
            progress(len(data))

        yield from _receive(connection, digest, file.tell(), keep)
    if (yield from worked(lambda: blake3.blake3().update_mmap(partial).hexdigest())) != digest:
        partial.unlink()
        raise _damaged(digest)
    partial.replace(target)


def fetch(connection: Connection, digest: str) -> Flow[bytes]:
    """Fetch a blob into memory; errors as for `download`."""
    pieces: list[bytes] = []
    yield from _receive(connection, digest, 0, pieces.append)
    data = b"".join(pieces)
    if (yield from worked(lambda: blake3.blake3(data).hexdigest())) != digest:
        raise _damaged(digest)
    return data


def _receive(connection: Connection, digest: str, offset: int, keep: Callable[[bytes], None]) -> Flow[None]:
    """Hand over a blob's bytes from `offset` on, reading ahead as soon as its size is known."""
    first, nbytes = yield from answered(_read(connection, digest, offset))
    yield from worked(lambda: keep(first))
    position = asked = offset + len(first)
    ahead: deque[Future[tuple[bytes, int]]] = deque()
    while position < nbytes:
        while asked < nbytes and len(ahead) < WINDOW:
            ahead.append(_read(connection, digest, asked))
            asked += CHUNK_BYTES
        data, _ = yield from answered(ahead.popleft())
        if len(data) != min(CHUNK_BYTES, nbytes - position):
            raise _damaged(digest)
        yield from worked(functools.partial(keep, data))
        position += len(data)


def _read(connection: Connection, digest: str, offset: int) -> Future[tuple[bytes, int]]:
    def convert(packet: Packet) -> tuple[bytes, int]:
        answer = answer_of(BlobData)(packet)
        return bytes(packet.buffers[0]), answer.nbytes

    message = BlobRead(digest=digest, offset=offset, length=CHUNK_BYTES)
    return connection.ask(message, convert, channel="bulk", patience_s=PATIENCE_S, resend_s=10.0)


def _damaged(digest: str) -> JoyNexusError:
    return JoyNexusError(failure(ErrorCode.BAD_DATA, f"blob {digest[:12]} arrived damaged: fetch it again"))
