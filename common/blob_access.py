"""A worker's blobs: through the folder that the host's roles share where there is one, over the bulk socket elsewhere.

In: digests, bytes, files. Out: verified files, digests. Never: a blob that is used before its digest was checked, or
more than a window of chunks in flight.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import blake3

from common.blobs import BlobStore, digest_file
from common.failpoints import failpoint
from common.progress import Progress
from joynexus.wire import Buffer, ErrorCode, JoyNexusError, Message, Packet, failure, limits
from joynexus.wire.front import BlobBegin, BlobChunk, BlobData, BlobOffset, BlobRead

WINDOW = 4
"""Chunks asked for or sent before the first is answered: the credit of one transfer."""

TIMEOUT_S = 60.0
"""For each chunk."""

_KNOWN = 100_000
"""Blobs known to be whole, before all of them are verified again."""

PUSHES = 8
"""How often an upload is begun again before it is given up."""


class Ask(Protocol):
    """`WorkerRuntime.ask`: a request whose answer comes later."""

    def __call__(self, message: Message, buffers: Sequence[Buffer] = (), *, timeout_s: float = 30.0) -> Future[Packet]:
        """Send a request."""
        ...


class BlobAccess:
    """Read and write blobs; any thread may.

    Args:
        ask: how to ask the master.
        progress: advances with each chunk, so that a long transfer does not look like a hang.
        shared: folder of blobs that the master and this worker both see, if there is one.
        cache: folder for fetched blobs, where there is none.
        cache_budget_bytes: what may lie there; the blobs read longest ago go first.
    """

    def __init__(
        self, ask: Ask, progress: Progress, *, shared: Path | None, cache: Path, cache_budget_bytes: int
    ) -> None:
        self._ask = ask
        self._progress = progress
        self._shared = BlobStore(shared) if shared is not None else None
        self._cache = BlobStore(cache)
        self._cache_folder = cache
        self._budget = cache_budget_bytes
        self._lock = threading.Lock()  # two threads that want one blob fetch it once
        self._whole: dict[str, tuple[int, int, int]] = {}  # digest -> the file that was found to hold it

    def fetch(self, digest: str) -> Path:
        """Return a file with the blob's content, to be read only; its hash was checked since the file last changed.

        Raises:
            JoyNexusError: `BAD_DATA` if it is damaged; if the master does not have it, or does not answer.
            ValueError: if `digest` is none.
        """
        if self._shared is not None and self._shared.has(digest):
            path = self._shared.path(digest)
            if not self._is_whole(path, digest):
                sentence = f"blob {digest} is damaged on the shared disk: restore it, or remove it and push it again"
                raise JoyNexusError(failure(ErrorCode.BAD_DATA, sentence))
            return path
        with self._lock:
            if self._cache.has(digest) and not self._is_whole(self._cache.path(digest), digest):
                self._cache.delete(digest)
            if not self._cache.has(digest):
                self._pull(digest)
            path = self._cache.path(digest)
            path.touch()
            self._whole[digest] = _file(path)
            return path

    def read(self, digest: str) -> bytes:
        """Return a blob's content; raises like `fetch`."""
        return self.fetch(digest).read_bytes()

    def put_bytes(self, data: bytes | memoryview) -> str:
        """Store bytes where the master finds them, and return their digest.

        Raises:
            JoyNexusError: if the master refuses them or does not answer.
            BlobStoreFullError: if the shared disk is full.
        """
        if self._shared is not None:
            return self._shared.put_bytes(data)
        digest = blake3.blake3(data).hexdigest()
        view = memoryview(data)
        self._push(digest, view.nbytes, lambda offset, length: view[offset : offset + length])
        return digest

    def put_file(self, path: Path, *, move: bool = True) -> tuple[str, int]:
        """Store a file where the master finds it; with `move` the file itself is given away.

        Returns:
            Digest and size.

        Raises:
            JoyNexusError: if the master refuses it or does not answer.
            BlobStoreFullError: if the shared disk is full.
        """
        if self._shared is not None:
            return self._shared.put_file(path, move=move)
        digest, nbytes = digest_file(path, self._progress.advance), path.stat().st_size
        with path.open("rb") as file:

            def part(offset: int, length: int) -> bytes:
                file.seek(offset)
                return file.read(length)

            self._push(digest, nbytes, part)
        if move:
            path.unlink()
        return digest, nbytes

    def _is_whole(self, path: Path, digest: str) -> bool:
        """Tell whether a file holds what its name says; it is read only if it is not the one that was read before."""
        file = _file(path)
        if self._whole.get(digest) == file:
            return True
        if digest_file(path, self._progress.advance) != digest:
            self._whole.pop(digest, None)
            return False
        if len(self._whole) >= _KNOWN:
            self._whole.clear()
        self._whole[digest] = file
        return True

    def _pull(self, digest: str) -> None:
        """Fetch a blob into the cache."""
        first = self._answer(
            self._ask(BlobRead(digest=digest, offset=0, length=limits.CHUNK_BYTES), timeout_s=TIMEOUT_S)
        )
        nbytes = _data(first).nbytes
        self._make_room(nbytes)
        for _ in range(2):  # twice: the rest of an interrupted fetch may be damaged, and is thrown away then
            self._cache.begin(digest, nbytes)
            self._pull_from(digest, self._cache.append(digest, 0, first.buffers[0]), nbytes)
            try:
                return self._cache.finish(digest)
            except ValueError as error:
                wrong = error
        sentence = f"blob {digest} is damaged where the master has it: restore it, or remove it and push it again"
        raise JoyNexusError(failure(ErrorCode.BAD_DATA, sentence)) from wrong

    def _pull_from(self, digest: str, offset: int, nbytes: int) -> None:
        """Fetch what lies above `offset`, a window of chunks in flight."""
        asked: deque[Future[Packet]] = deque()
        starts = iter(range(offset, nbytes, limits.CHUNK_BYTES))
        while offset < nbytes:
            for start in itertools.islice(starts, WINDOW - len(asked)):
                message = BlobRead(digest=digest, offset=start, length=min(limits.CHUNK_BYTES, nbytes - start))
                asked.append(self._ask(message, timeout_s=TIMEOUT_S))
            answer = self._answer(asked.popleft())
            there = self._cache.append(digest, _data(answer).offset, answer.buffers[0])
            if there <= offset:
                raise JoyNexusError(failure(ErrorCode.INTERNAL, f"the master sent less of blob {digest} than it has"))
            offset = there

    def _push(self, digest: str, nbytes: int, part: _Part) -> None:
        """Send a blob; what the master has already, also from before its restart, is not sent again."""
        for _ in range(PUSHES):
            state = _offset(self._answer(self._ask(BlobBegin(digest=digest, nbytes=nbytes), timeout_s=TIMEOUT_S)))
            if state.complete or self._push_from(digest, state.offset, nbytes, part):
                return
        raise JoyNexusError(failure(ErrorCode.UNAVAILABLE, f"the master did not complete the upload of blob {digest}"))

    def _push_from(self, digest: str, offset: int, nbytes: int, part: _Part) -> bool:
        """Send what lies above `offset`, a window of chunks in flight; False if the upload must begin again."""
        asked: deque[Future[Packet]] = deque()
        # An empty blob has one empty chunk: the last chunk is what completes an upload.
        starts = iter(range(offset, nbytes, limits.CHUNK_BYTES) or [offset])
        while True:
            for start in itertools.islice(starts, WINDOW - len(asked)):
                chunk = part(start, min(limits.CHUNK_BYTES, nbytes - start))
                asked.append(self._ask(BlobChunk(digest=digest, offset=start), (chunk,), timeout_s=TIMEOUT_S))
                failpoint("worker.push_blob")
            if not asked:
                return False
            try:
                state = _offset(self._answer(asked.popleft()))
            except JoyNexusError as error:
                if error.code is not ErrorCode.INVALID:  # that is: not begun, the master was restarted
                    raise
                return False
            if state.complete:
                return True
            if state.offset <= offset:
                return False  # a chunk before was lost
            offset = state.offset

    def _answer(self, future: Future[Packet]) -> Packet:
        packet = future.result()
        self._progress.advance()
        return packet

    def _make_room(self, nbytes: int) -> None:
        """Delete the cached blobs that were read longest ago until `nbytes` fit into the budget."""
        files = [(path.stat(), path.name) for path in self._cache_folder.glob("[0-9a-f][0-9a-f]/*")]
        total = sum(status.st_size for status, _ in files) + nbytes
        for status, name in sorted(files, key=lambda file: file[0].st_mtime):
            if total <= self._budget:
                return
            self._cache.delete(name)
            total -= status.st_size


def _file(path: Path) -> tuple[int, int, int]:
    """Return what is another after a file has changed or was replaced."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


class _Part(Protocol):
    def __call__(self, offset: int, length: int, /) -> bytes | memoryview: ...


def _data(packet: Packet) -> BlobData:
    if not isinstance(packet.message, BlobData) or len(packet.buffers) != 1:
        raise JoyNexusError(failure(ErrorCode.INTERNAL, "the master answered a blob read with something else"))
    return packet.message


def _offset(packet: Packet) -> BlobOffset:
    if not isinstance(packet.message, BlobOffset):
        raise JoyNexusError(failure(ErrorCode.INTERNAL, "the master answered a blob upload with something else"))
    return packet.message
