"""The thread that serves blobs: the two bulk sockets and the blob store, apart from everything that must answer fast.

In: admitted blob requests. Out: chunks, offsets, and events for the core about what tenants stored and read. Never: a
blob given to a tenant without the core's yes, a tenant's upload that another tenant can see, resume or spoil, or an end
because the disk or the limit of open files is at fault: whoever asked is told to ask again, and housekeeping waits.

A tenant's upload grows in a folder of its own and enters the common store when it is complete and verified; so neither
"do you have it?" nor an upload tells anything about others.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from common.blobs import BlobStore, BlobStoreFullError, check_digest
from common.failpoints import failpoint
from common.telemetry import get_logger
from common.wakeup import Wakeup
from joynexus.keys import KeyRegistry
from joynexus.transport import Socket
from joynexus.wire import Buffer, ErrorCode, Failure, Message, encode, failure, limits
from joynexus.wire.front import BlobBegin, BlobChunk, BlobData, BlobOffset, BlobRead
from services.master.doors import look_up, receive, send
from services.master.events import BlobServed, BlobStored, Door, Peer
from services.master.gate import BlobMessage, Refused, admit

log = get_logger(__name__)

Job = Callable[[], object]
Step = Callable[[BlobMessage], None]


class Rights(Protocol):
    """What the core is asked: see `MasterCore`."""

    def may_read(self, tenant: str, digest: str) -> bool:
        """Tell whether a tenant may read this blob."""
        ...

    def refuse_upload(self, tenant: str, digest: str, nbytes: int) -> Failure | None:
        """Say why a tenant may not upload so much; None if it may."""
        ...

    def unreferenced(self, digests: Iterable[str]) -> list[str]:
        """Return those of these blobs to which nothing refers."""
        ...


Question = Callable[[Rights], None]


class _Begun(msgspec.Struct):
    """An upload that is under way: bytes here, bytes in all, and when it was last gone on with."""

    offset: int
    nbytes: int
    touched: float


ABANDONED_S = 86_400.0
"""Unfinished uploads are removed after this."""
SWEEP_S = 3600.0
FOLDERS = 256
"""The store is looked through folder by folder, all of it in the time between two sweeps."""
LINGER_S = 60.0
"""A blob to which nothing refers any more is deleted after this, unless somebody stores an equal one meanwhile: between
a worker that finds it there and the report that refers to it lies less."""

MAX_READ_BYTES = 4 * 1024 * 1024
"""Largest chunk that may be asked for."""


class BulkService:
    """Serve blobs in a thread.

    Args:
        sockets: the bulk ROUTERs, by door; used in this thread only.
        registry: who is who.
        store: the common blob store.
        folder: where tenants' uploads grow, on the store's file system.
        ask: has a question put to the core in the master's thread, and the answer told there.
        post: gives the core an event.
        heard: told of each frame that came.
        failed: called if this thread fails.
    """

    def __init__(
        self,
        sockets: dict[Door, Socket],
        registry: KeyRegistry,
        store: BlobStore,
        folder: Path,
        *,
        ask: Callable[[Question], None],
        post: Callable[[BlobStored | BlobServed], None],
        heard: Callable[[zmq.Frame], None],
        failed: Callable[[], object],
    ) -> None:
        self._sockets = sockets
        self._registry = registry
        self._store = store
        self._folder = folder
        self._ask = ask
        self._post = post
        self._heard = heard
        self._failed = failed
        self._areas: dict[str, BlobStore] = {}
        self._begun: dict[tuple[str, str], _Begun] = {}  # by tenant and digest
        self._arriving: Counter[str] = Counter()  # stored for a tenant, and not yet known to the core
        self._ids = itertools.count(1)
        self._doomed: deque[tuple[float, tuple[str, ...]]] = deque()  # when to delete what
        self._jobs: deque[Job] = deque()
        self._wakeup = Wakeup()
        self._stopping = False
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._guarded, name="bulk", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        self._wakeup.set()
        self._thread.join()

    # Called from the master's thread

    def reply(self, peer: Peer, message: Message, *, id: str, re: str) -> None:
        """Send a message of the core to a bulk connection."""
        self._do(lambda: self._send(peer, message, re=re, id=id))

    def taken(self, digest: str) -> None:
        """The core has seen `BlobStored` for this digest."""

        def take() -> None:
            self._arriving[digest] -= 1
            if self._arriving[digest] <= 0:
                del self._arriving[digest]

        self._do(take)

    def delete(self, digests: tuple[str, ...]) -> None:
        """Delete blobs that nobody refers to, a while later; one that is referred to again by then stays."""
        self._do(lambda: self._doomed.append((time.monotonic() + LINGER_S, digests)))

    def _do(self, job: Job) -> None:
        self._jobs.append(job)
        self._wakeup.set()

    # In this thread

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception:
            log.critical("the thread that serves blobs fails", exc_info=True)
            self._failed()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        for socket in self._sockets.values():
            poller.register(socket, zmq.POLLIN)
        sweep_at, folder, folder_at = 0.0, 0, 0.0
        while not self._stopping:
            if time.monotonic() >= sweep_at:
                self._sweep()
                sweep_at = time.monotonic() + SWEEP_S
            if time.monotonic() >= folder_at:
                with self._outlived("blobs that nothing refers to are not looked for"):
                    self._remove(self._store.untouched(f"{folder:02x}", ABANDONED_S), ABANDONED_S)
                folder, folder_at = (folder + 1) % FOLDERS, time.monotonic() + SWEEP_S / FOLDERS
            while self._doomed and self._doomed[0][0] <= time.monotonic():
                self._remove(self._doomed.popleft()[1], LINGER_S)
            if self._wakeup.fileno() in dict(poller.poll(1000)):
                self._wakeup.clear()
            while self._jobs:
                self._jobs.popleft()()
            for door, socket in self._sockets.items():
                for peer, frames, key in receive(socket, door, at_once=8, heard=self._heard):
                    self._take(peer, frames, key)
        for socket in self._sockets.values():
            socket.close()

    @contextmanager
    def _outlived(self, what: str) -> Iterator[None]:
        """Log an error of the disk or of the limit of open files, and go on: it may pass."""
        try:
            yield
        except OSError as error:
            self._count(what, error)

    def _count(self, what: str, error: OSError) -> None:
        self.counts["disk"] += 1
        count = self.counts["disk"]
        if count & (count - 1) == 0:  # 1, 2, 4, 8, …: it may last
            log.error("blob store is at fault", what=what, why=error.strerror, count=count)

    def _remove(self, digests: Sequence[str], untouched_s: float) -> None:
        """Remove those of these blobs to which nothing refers, and that nobody stored or touched for so long."""

        def question(rights: Rights) -> None:
            unreferenced = rights.unreferenced(digests)
            self._do(lambda: go_on(unreferenced))

        def go_on(unreferenced: list[str]) -> None:
            for digest in unreferenced:
                with self._outlived("a blob is not removed"):
                    if digest not in self._arriving and self._store.delete(digest, untouched_s=untouched_s):
                        self.counts["removed"] += 1

        if digests:
            self._ask(question)

    def _sweep(self) -> None:
        """Remove uploads that nobody has gone on with for a day, also those from before a restart."""
        with self._outlived("unfinished uploads are not swept"):
            areas = [self._area(folder.name) for folder in self._folder.iterdir()] if self._folder.is_dir() else []
            for store in (self._store, *areas):
                store.sweep(ABANDONED_S)
        limit = time.monotonic() - ABANDONED_S
        self._begun = {key: begun for key, begun in self._begun.items() if begun.touched > limit}

    def _take(self, peer: Peer, frames: list[Buffer], key: str) -> None:
        request = admit(peer, frames, look_up(self._registry, key))
        if isinstance(request, Refused):
            self.counts[request.reason] += 1
            self._send(peer, request.failure, re=request.re)
        elif isinstance(request, BlobMessage):
            self._step(self._serve, request)

    def _step(self, step: Step, request: BlobMessage) -> None:
        try:
            step(request)
        except BlobStoreFullError as error:
            self._fail(request, failure(ErrorCode.UNAVAILABLE, str(error.strerror), retry_after_ms=5000))
        except OSError as error:
            self._count(request.header.kind, error)
            sentence = f"the service cannot use its disk just now ({error.strerror}): try again soon"
            self._fail(request, failure(ErrorCode.UNAVAILABLE, sentence, retry_after_ms=1000))
        except KeyError:  # it has gone since it was looked for
            self._absent(request)
        except ValueError as error:  # a digest that is none, a chunk that does not fit, a wrong hash
            self._fail(request, failure(ErrorCode.INVALID, str(error)))

    def _serve(self, request: BlobMessage) -> None:
        failpoint("master.serve_blob")
        check_digest(request.message.digest)
        match request.message:
            case BlobRead():
                self._if_readable(request, self._read, self._absent)
            case BlobBegin():
                self._if_readable(request, self._complete, self._begin)
            case BlobChunk():
                self._chunk(request)

    def _if_readable(self, request: BlobMessage, yes: Step, no: Step) -> None:
        """Go on with `yes` if the asker may read the blob, and it is here; else with `no`, if there is room for it."""
        digest = request.message.digest
        if not request.tenant:
            self._step(yes if self._store.has(digest) else no, request)
            return
        nbytes = request.message.nbytes + self._growing(request) if isinstance(request.message, BlobBegin) else 0

        def question(rights: Rights) -> None:
            readable = rights.may_read(request.tenant, digest)
            refused = None if readable else rights.refuse_upload(request.tenant, digest, nbytes)
            self._do(lambda: self._step(partial(go_on, readable, refused), request))

        def go_on(readable: bool, refused: Failure | None, request: BlobMessage) -> None:
            if readable and self._store.has(digest):
                yes(request)
            elif refused is not None:
                self._fail(request, refused)
            else:
                no(request)

        self._ask(question)

    def _growing(self, request: BlobMessage) -> int:
        """Return the bytes that the tenant's other unfinished uploads will have: they count against its quota."""
        mine = request.tenant, request.message.digest
        return sum(begun.nbytes for key, begun in self._begun.items() if key[0] == request.tenant and key != mine)

    def _read(self, request: BlobMessage) -> None:
        message = request.message
        assert isinstance(message, BlobRead)
        if message.offset < 0 or not 0 <= message.length <= MAX_READ_BYTES:
            self._fail(request, failure(ErrorCode.INVALID, f"read 0 to {MAX_READ_BYTES} bytes of a blob at once"))
            return
        data = self._store.read(message.digest, message.offset, message.length)
        answer = BlobData(digest=message.digest, offset=message.offset, nbytes=self._store.size(message.digest))
        if self._send(request.peer, answer, re=request.header.id, buffers=(data,)) and request.tenant:
            self._post(BlobServed(tenant=request.tenant, nbytes=len(data)))

    def _absent(self, request: BlobMessage) -> None:
        digest = request.message.digest
        self._fail(request, failure(ErrorCode.NOT_FOUND, f"there is no blob {digest}"))

    def _complete(self, request: BlobMessage) -> None:
        digest = request.message.digest
        self._store.touch(digest)
        answer = BlobOffset(digest=digest, offset=self._store.size(digest), complete=True)
        self._send(request.peer, answer, re=request.header.id)

    def _begin(self, request: BlobMessage) -> None:
        message = request.message
        assert isinstance(message, BlobBegin)
        if message.nbytes > limits.MAX_BLOB_BYTES:
            self._fail(request, failure(ErrorCode.TOO_LARGE, f"a blob has at most {limits.MAX_BLOB_BYTES} bytes"))
            return
        offset = self._area(request.tenant).begin(message.digest, message.nbytes)
        self._begun[request.tenant, message.digest] = _Begun(offset, message.nbytes, time.monotonic())
        if offset == message.nbytes and offset:
            self._finish(request)
        else:
            self._send(request.peer, BlobOffset(digest=message.digest, offset=offset), re=request.header.id)

    def _chunk(self, request: BlobMessage) -> None:
        message = request.message
        assert isinstance(message, BlobChunk)
        if len(request.buffers) != 1:
            self._fail(request, failure(ErrorCode.INVALID, "a chunk of a blob is one buffer"))
            return
        begun = self._begun.get((request.tenant, message.digest))
        if begun is None:
            sentence = f"the upload of blob {message.digest} was not begun here: begin it to learn how far it came"
            self._fail(request, failure(ErrorCode.INVALID, sentence))
            return
        if message.offset <= begun.offset:  # else a chunk before it was lost: the answer says where to go on
            begun.offset = self._area(request.tenant).append(message.digest, message.offset, request.buffers[0])
            begun.touched = time.monotonic()
        if begun.offset == begun.nbytes:
            self._finish(request)
        else:
            self._send(request.peer, BlobOffset(digest=message.digest, offset=begun.offset), re=request.header.id)

    def _finish(self, request: BlobMessage) -> None:
        """All bytes are there: verify them; a tenant's blob becomes its own when the core has written that down."""
        digest, area = request.message.digest, self._area(request.tenant)
        self._begun.pop((request.tenant, digest), None)
        try:
            area.finish(digest)
        except ValueError as error:  # the bytes have another hash; they are gone
            self._fail(request, failure(ErrorCode.BAD_DATA, str(error)))
            return
        if not request.tenant:
            self._complete(request)
            return
        self._store.put_file(area.path(digest), move=True)
        self._arriving[digest] += 1
        self._post(
            BlobStored(
                peer=request.peer,
                tenant=request.tenant,
                request=request.header.id,
                digest=digest,
                nbytes=self._store.size(digest),
            )
        )

    def _area(self, tenant: str) -> BlobStore:
        """Return where uploads grow: workers' in the common store, each tenant's in a folder of its own."""
        if not tenant:
            return self._store
        area = self._areas.get(tenant)
        if area is None:
            area = self._areas[tenant] = BlobStore(self._folder / tenant)
        return area

    def _fail(self, request: BlobMessage, answer: Failure) -> None:
        self._send(request.peer, answer, re=request.header.id)

    def _send(self, peer: Peer, message: Message, *, re: str, id: str = "", buffers: tuple[Buffer, ...] = ()) -> bool:
        frames = encode(message, id=id or f"b{next(self._ids)}", re=re, buffers=buffers)
        sent = send(self._sockets[peer.door], peer, frames)
        self.counts["undeliverable"] += not sent  # the asker asks again
        return sent
