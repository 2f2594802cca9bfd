"""The thread that serves blobs: the two bulk sockets and the blob store, apart from everything that must answer fast.

In: admitted blob requests. Out: chunks, offsets, and events for the core about what tenants stored and read. Never: a
blob given to a tenant without the core's yes, a tenant's upload that another tenant can see, resume or spoil, or an end
because the disk or the limit of open files is at fault: whoever asked is told to ask again, and housekeeping waits.

A tenant's upload grows in a folder of its own and enters the common store when it is complete and verified; so neither
"do you have it?" nor an upload tells anything about others.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from common.blobs import BlobStore, BlobStoreFullError, check_digest
from common.failpoints import failpoint
from common.refusals import Refusals
from common.telemetry import get_logger
from common.wakeup import Wakeup
from joynexus.keys import KeyRegistry
from joynexus.transport import Socket
from joynexus.wire import Buffer, ErrorCode, Failure, Message, encode, failure, limits
from joynexus.wire.front import BlobBegin, BlobChunk, BlobData, BlobOffset, BlobRead
from services.master import removal
from services.master.background import Background
from services.master.doors import receive, send
from services.master.events import BlobServed, BlobStored, Door, Peer
from services.master.gate import BlobMessage, Refused
from services.master.reception import Reception
from services.master.removal import DiskFaults, Removal
from services.master.unread import Unread
from services.master.uploads import AllUploads

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

AT_ONCE_BYTES = 4 * 1024 * 1024
"""The hash of larger uploads, and the wait until they are on disk, would hold up everybody else's blobs."""

MAX_READ_BYTES = 4 * 1024 * 1024
"""Largest chunk that may be asked for."""


class _Finishing(msgspec.Struct):
    """An upload that is being verified, and who asked last how it is."""

    nbytes: int
    asker: BlobMessage


class BulkService:
    """Serve blobs in a thread.

    Args:
        sockets: the bulk ROUTERs, by door; used in this thread only.
        registry: who is who.
        store: the common blob store.
        folder: where tenants' uploads grow, on the store's file system.
        max_uploads: how many uploads of one tenant may be unfinished.
        max_requests_per_s: of a tenant of which the operator says nothing.
        ask: has a question put to the core in the master's thread, and the answer told there.
        post: gives the core an event.
        heard: told of each message that came.
        failed: called if this thread fails.
    """

    def __init__(
        self,
        sockets: dict[Door, Socket],
        registry: KeyRegistry,
        store: BlobStore,
        folder: Path,
        *,
        max_uploads: int,
        max_requests_per_s: float = math.inf,
        ask: Callable[[Question], None],
        post: Callable[[BlobStored | BlobServed], None],
        heard: Callable[[Door, Sequence[zmq.Frame]], None],
        failed: Callable[[], object],
    ) -> None:
        self._sockets = sockets
        self._store = store
        self._unread: dict[Door, Unread] = {"front_bulk": Unread()}  # workers get no more than they have credit for
        self._ask = ask
        self._post = post
        self._heard = heard
        self._failed = failed
        self._uploads = AllUploads(store, folder, most=max_uploads)
        self._finishing: dict[tuple[str, str], _Finishing] = {}  # by tenant and digest
        self._background = Background(failed)
        self._arriving: Counter[str] = Counter()  # stored for a tenant, and not yet known to the core
        self._ids = itertools.count(1)
        self._jobs: deque[Job] = deque()
        self._wakeup = Wakeup()
        self._stopping = False
        self.counts: Counter[str] = Counter()
        self._reception = Reception(registry, max_requests_per_s, Refusals("blob_request_refused", self.counts))
        self._faults = DiskFaults(self.counts)
        self._removal = Removal(store, self._unreferenced, lambda digest: digest in self._arriving, self._faults)
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
        self._do(lambda: self._arrived(digest))

    def change(self, per_s: Mapping[str, int | None]) -> None:
        """The operator's limits of requests a second are these now."""
        self._do(lambda: self._reception.change(per_s))

    def delete(self, digests: tuple[str, ...]) -> None:
        """Delete blobs that nobody refers to, a while later; one that is referred to again by then stays."""
        self._do(lambda: self._removal.doom(digests, time.monotonic()))

    def _do(self, job: Job) -> None:
        self._jobs.append(job)
        self._wakeup.set()

    # In this thread

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception:
            log.critical("thread_failed", thread="blobs", exc_info=True)
            self._failed()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        for socket in self._sockets.values():
            poller.register(socket, zmq.POLLIN)
        sweep_at = 0.0
        while not self._stopping:
            if time.monotonic() >= sweep_at:
                with self._faults.outlived("unfinished uploads are not swept"):
                    self._uploads.sweep(removal.ABANDONED_S)
                sweep_at = time.monotonic() + removal.SWEEP_S
            self._removal.look(time.monotonic())
            if self._wakeup.fileno() in dict(poller.poll(1000)):
                self._wakeup.clear()
            while self._jobs:
                self._jobs.popleft()()
            for door, socket in self._sockets.items():
                for peer, frames, key in receive(socket, door, at_once=8, heard=self._heard):
                    self._take(peer, frames, key)
        for socket in self._sockets.values():
            socket.close()

    def _unreferenced(self, digests: Iterable[str], tell: Callable[[list[str]], None]) -> None:
        def question(rights: Rights) -> None:
            unreferenced = rights.unreferenced(digests)
            self._do(lambda: tell(unreferenced))

        self._ask(question)

    def _arrived(self, digest: str) -> None:
        self._arriving[digest] -= 1
        if self._arriving[digest] <= 0:
            del self._arriving[digest]

    def _take(self, peer: Peer, frames: list[Buffer], key: str) -> None:
        request = self._reception.take(peer, frames, key, time.monotonic())
        if isinstance(request, Refused):
            self._send(peer, request.failure, re=request.re)
        elif isinstance(request, BlobMessage):
            self._step(self._serve, request)

    def _step(self, step: Step, request: BlobMessage) -> None:
        try:
            step(request)
        except BlobStoreFullError as error:
            self._fail(request, failure(ErrorCode.UNAVAILABLE, str(error.strerror), retry_after_ms=5000))
        except OSError as error:
            self._faults.note(request.header.kind, error)
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
        begin = request.message if isinstance(request.message, BlobBegin) else None
        # Unfinished uploads count against the tenant's quota.
        nbytes = begin.nbytes + self._uploads.of(request.tenant).others(digest) if begin is not None else 0

        def question(rights: Rights) -> None:
            readable, refused = rights.may_read(request.tenant, digest), None
            if begin is not None and not readable:
                refused = rights.refuse_upload(request.tenant, digest, nbytes)
            self._do(lambda: self._step(partial(go_on, readable, refused), request))

        def go_on(readable: bool, refused: Failure | None, request: BlobMessage) -> None:
            if readable and self._store.has(digest):
                yes(request)
            elif refused is not None:
                self._fail(request, refused)
            else:
                no(request)

        self._ask(question)

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
        if self._waits_for_finish(request):
            return
        offset = self._uploads.of(request.tenant).begin(message.digest, message.nbytes, time.monotonic())
        if offset == message.nbytes and offset:
            self._finish(request, message.nbytes)
        else:
            self._send(request.peer, BlobOffset(digest=message.digest, offset=offset), re=request.header.id)

    def _chunk(self, request: BlobMessage) -> None:
        message = request.message
        assert isinstance(message, BlobChunk)
        if len(request.buffers) != 1:
            self._fail(request, failure(ErrorCode.INVALID, "a chunk of a blob is one buffer"))
            return
        if self._waits_for_finish(request):
            return
        uploads = self._uploads.of(request.tenant)
        upload = uploads.append(message.digest, message.offset, request.buffers[0], time.monotonic())
        if upload.offset == upload.nbytes:
            self._finish(request, upload.nbytes)
        else:
            self._send(request.peer, BlobOffset(digest=message.digest, offset=upload.offset), re=request.header.id)

    def _waits_for_finish(self, request: BlobMessage) -> bool:
        """Tell whether the blob is being verified already; then this request is seen to."""
        message = request.message
        finishing = self._finishing.get((request.tenant, message.digest))
        if finishing is None:
            return False
        if isinstance(message, BlobChunk) and message.offset + len(request.buffers[0]) < finishing.nbytes:
            # An earlier chunk again, whose answer nobody waits for; who sent the last one waits.
            self._send(request.peer, BlobOffset(digest=message.digest, offset=finishing.nbytes), re=request.header.id)
        else:
            finishing.asker = msgspec.structs.replace(request, buffers=())
        return True

    def _finish(self, request: BlobMessage, nbytes: int) -> None:
        """All bytes are there: verify them, a large upload's elsewhere."""
        key = tenant, digest = request.tenant, request.message.digest
        area = self._uploads.of(tenant).area
        self._finishing[key] = _Finishing(nbytes, msgspec.structs.replace(request, buffers=()))
        self._arriving[digest] += 1

        def verify() -> None:
            error: OSError | ValueError | None = None
            try:
                area.finish(digest, into=self._store)
            except (OSError, ValueError) as caught:
                error = caught
            self._do(lambda: self._finished(tenant, digest, error))

        if nbytes <= AT_ONCE_BYTES:
            verify()
        else:
            self._background.do(tenant or request.peer.routing_id.hex(), verify)

    def _finished(self, tenant: str, digest: str, error: OSError | ValueError | None) -> None:
        """An upload was verified; a tenant's blob becomes its own when the core has written that down."""
        finishing = self._finishing.pop((tenant, digest))
        asker, nbytes = finishing.asker, finishing.nbytes
        self._uploads.of(tenant).end(digest)
        if error is None and tenant:
            self._post(
                BlobStored(peer=asker.peer, tenant=tenant, request=asker.header.id, digest=digest, nbytes=nbytes)
            )
            return
        self._arrived(digest)
        if isinstance(error, ValueError):  # the bytes have another hash; they are gone
            self._fail(asker, failure(ErrorCode.BAD_DATA, str(error)))
        else:
            self._step(partial(self._answer_finished, error), asker)

    def _answer_finished(self, error: OSError | None, request: BlobMessage) -> None:
        if error is not None:
            raise error
        self._complete(request)

    def _fail(self, request: BlobMessage, answer: Failure) -> None:
        self._send(request.peer, answer, re=request.header.id)

    def _send(self, peer: Peer, message: Message, *, re: str, id: str = "", buffers: tuple[Buffer, ...] = ()) -> bool:
        frames = encode(message, id=id or f"b{next(self._ids)}", re=re, buffers=buffers)
        sent = send(self._sockets[peer.door], peer, frames, self._unread.get(peer.door))
        self.counts["undeliverable"] += not sent  # the asker asks again
        return sent
