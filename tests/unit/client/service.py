"""A service in the test's own process: real sockets and keys, answers as the test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from common.blobs import BlobStore
from common.transport import Authenticator, bind_router, bound_address
from joynexus.keys import ClusterFile, KeyEntry, KeyPair, KeyRegistry
from joynexus.wire import ErrorCode, Message, Packet, decode, encode, failure
from joynexus.wire.front import (
    Accepted,
    AcquireLease,
    BlobBegin,
    BlobChunk,
    BlobData,
    BlobOffset,
    BlobRead,
    Done,
    Hello,
    Lease,
    OpResult,
    Ping,
    Pong,
    ReleaseLease,
    Welcome,
)

Reply = tuple[Message, tuple[bytes, ...]]
Answerer = Callable[[Packet], list[Message | Reply]]


@dataclass
class FakeService:
    """What the service heard, and where it is."""

    cluster: ClusterFile
    registry: KeyRegistry
    blobs: BlobStore
    authenticator: Authenticator
    answer: Answerer
    heard: list[Packet] = field(default_factory=list)
    lost_chunks: set[int] = field(default_factory=set)
    keeps_nothing: bool = False

    def ordinary(self, packet: Packet) -> list[Message | Reply]:
        """Answers to what every test needs."""
        message = packet.message
        match message:
            case Hello():
                return [Welcome(protocol=1, server="s", tenant="t", scope="all", inline_bytes=4096, max_inflight_ops=8)]
            case Ping():
                return [Pong()]
            case AcquireLease():
                return [Lease(policy=message.policy, lease="L", next_seq=1)]
            case ReleaseLease():
                return [Done()]
            case BlobBegin():
                offset = self.blobs.begin(message.digest, message.nbytes)
                complete = self.blobs.has(message.digest)
                return [BlobOffset(digest=message.digest, offset=offset, complete=complete)]
            case BlobChunk():
                return [self._chunk(message, bytes(packet.buffers[0]))]
            case BlobRead():
                if not self.blobs.has(message.digest):
                    return [failure(ErrorCode.NOT_FOUND, "no such blob")]
                data = self.blobs.read(message.digest, message.offset, message.length)
                size = self.blobs.size(message.digest)
                return [(BlobData(digest=message.digest, offset=message.offset, nbytes=size), (data,))]
        if hasattr(message, "seq"):
            return [Accepted(policy=message.policy, seq=message.seq), OpResult(policy=message.policy, seq=message.seq)]
        return [failure(ErrorCode.NOT_FOUND, "no such thing")]

    def _chunk(self, message: BlobChunk, data: bytes) -> Message:
        if self.keeps_nothing:
            return failure(ErrorCode.INVALID, "the upload was not begun here")
        if message.offset in self.lost_chunks:
            self.lost_chunks.remove(message.offset)
            return failure(ErrorCode.INVALID, "a chunk leaves a hole")
        try:
            offset = self.blobs.append(message.digest, message.offset, data)
        except ValueError as error:
            return failure(ErrorCode.INVALID, str(error))
        size = self.blobs._announced.get(message.digest, -1)
        if offset == size:
            self.blobs.finish(message.digest)
        return BlobOffset(digest=message.digest, offset=offset, complete=self.blobs.has(message.digest))


@contextmanager
def running(folder: Path, answer: Answerer | None = None, *, known: bool = True) -> Iterator[FakeService]:
    """Run a service on loopback until the block ends.

    Args:
        answer: what it answers; None for the ordinary answers.
        known: let the client's key in.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server, own = KeyPair.generate(), KeyPair.generate()
    own.save(folder / "key.toml")
    registry = KeyRegistry(folder / "registry.json")
    if known:
        registry.add(KeyEntry(name="me", public=own.public, domain="tenant", tenant="t"))
    authenticator = Authenticator(context, registry)
    routers = [bind_router(context, "tcp://127.0.0.1:*", server, "tenant", bulk=bulk) for bulk in (False, True)]
    control, bulk_address = (bound_address(router) for router in routers)
    cluster = ClusterFile(
        control=control, bulk=bulk_address, server_public=server.public, key_file=str(folder / "key.toml")
    )
    service = FakeService(cluster, registry, BlobStore(folder / "blobs"), authenticator, lambda packet: [])
    service.answer = answer or service.ordinary
    stop = threading.Event()

    def serve() -> None:
        poller = zmq.Poller()
        for router in routers:
            poller.register(router, zmq.POLLIN)
        while not stop.is_set():
            for router, _ in poller.poll(20):
                routing_id, *frames = router.recv_multipart()
                packet = decode(frames)
                service.heard.append(packet)
                for reply in service.answer(packet):
                    message, buffers = reply if isinstance(reply, tuple) else (reply, ())
                    router.send_multipart([routing_id, *encode(message, id="s", re=packet.header.id, buffers=buffers)])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield service
    finally:
        stop.set()
        thread.join()
        for router in routers:
            router.close(0)
        authenticator.stop()
        context.term()
