"""A master that does what a test says, on real encrypted sockets: for tests of one worker role.

    with FakeMaster(tmp_path) as master:
        runtime = WorkerRuntime(master.settings(TrainerSettings, "trainer"), signals=False)
        …
        master.give(TrainGroup(…), buffers)
        done = master.expect(TrainDone)

It answers registrations, beats and blob messages by itself, and keeps everything else for `expect`.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import zmq

from common.blobs import BlobStore
from common.settings import WorkerSettings
from common.transport import Authenticator, bind_router, bound_address
from joynexus.keyring import Addresses, Keyring
from joynexus.wire import Buffer, ErrorCode, Failure, Message, Packet, decode, encode, failure
from joynexus.wire.back import Beat, BeatAck, Gone, Leaving, Register, Registered
from joynexus.wire.front import BlobBegin, BlobChunk, BlobData, BlobOffset, BlobRead

M = TypeVar("M", bound=Message)
S = TypeVar("S", bound=WorkerSettings)


class FakeMaster:
    """The back domain of a master.

    Attributes:
        store: its blobs.
        registers: registrations so far.
        forgetful: answer the next message of a worker with NOT_REGISTERED, as after a restart.
        deaf: ignore everything.
        leave: tell it to leave, with each beat.
        lost: tasks to name in the next `Registered`.
        refuses: answer to whoever registers, instead of a welcome.
    """

    def __init__(self, folder: Path, *, beat_ms: int = 100) -> None:
        self.folder = folder
        self.store = BlobStore(folder / "master-blobs")
        self.registers: list[Register] = []
        self.beats: list[Beat] = []
        self.forgetful = self.deaf = self.leave = False
        self.lost: tuple[str, ...] = ()
        self.refuses: Failure | None = None
        self.left = threading.Event()
        self.gone = threading.Event()
        self._beat_ms = beat_ms
        self._known: set[bytes] = set()
        self._worker = b""
        self._ids = itertools.count(1)
        self._arrived: queue.Queue[Packet] = queue.Queue()
        self._held: list[Packet] = []
        self._outbox: queue.Queue[list[Any]] = queue.Queue()
        self._stop = threading.Event()

    def __enter__(self) -> FakeMaster:
        keyring = Keyring(self.folder / "keys")
        keyring.prepare(Addresses())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = Authenticator(self._context, keyring.registry)
        server = keyring.server_keys("back")
        self._control = bind_router(self._context, "tcp://127.0.0.1:*", server, "worker", bulk=False)
        self._bulk = bind_router(self._context, "tcp://127.0.0.1:*", server, "worker", bulk=True)
        addresses = Addresses(back_control=bound_address(self._control), back_bulk=bound_address(self._bulk))
        keyring.prepare(addresses)
        self.keyring = keyring
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._control.close(0)
        self._bulk.close(0)
        self._authenticator.stop()
        self._context.term()

    def settings(self, kind: type[S], role: str, *, shared: bool = False, **more: Any) -> S:
        """Settings for a worker; `shared`: it sees the master's blob folder."""
        return kind(
            cluster_file=self.keyring.cluster_file(role),
            state_dir=self.folder / role,
            cache_dir=self.folder / role / "cache",
            blobs_dir=self.folder / "master-blobs" if shared else None,
            **more,
        )

    def give(self, message: Message, buffers: Sequence[Buffer] = (), *, re: str = "") -> None:
        """Send a message to the worker that registered last."""
        self._outbox.put([self._worker, *encode(message, id=f"m{next(self._ids)}", re=re, buffers=buffers)])

    def expect(self, kind: type[M], *, timeout_s: float = 20.0) -> Packet:
        """Return the first message of a kind that came and was not returned yet."""
        deadline = time.monotonic() + timeout_s
        while True:
            for index, packet in enumerate(self._held):
                if isinstance(packet.message, kind):
                    return self._held.pop(index)
            try:
                self._held.append(self._arrived.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                kinds = [type(packet.message).__name__ for packet in self._held]
                raise AssertionError(f"no {kind.__name__} within {timeout_s} s; got {kinds}") from None

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._bulk, zmq.POLLIN)
        while not self._stop.is_set():
            ready = dict(poller.poll(5))
            for socket in (self._control, self._bulk):
                if socket in ready:
                    routing_id, *frames = socket.recv_multipart()
                    if not self.deaf:
                        self._take(socket, routing_id, decode(frames))
            while not self._outbox.empty():
                self._control.send_multipart(self._outbox.get())

    def _take(self, socket: zmq.Socket[bytes], routing_id: bytes, packet: Packet) -> None:
        answer: Message | None = None
        buffers: tuple[Buffer, ...] = ()
        match packet.message:
            case BlobBegin() | BlobChunk() | BlobRead():
                answer, buffers = self._blob(packet)
            case Register() if self.refuses is not None:
                answer = self.refuses
            case Register():
                self.registers.append(packet.message)
                self.forgetful = False
                self._known.add(routing_id)
                self._worker = routing_id
                answer = Registered(worker=f"{packet.message.role}-1", beat_ms=self._beat_ms, lost=self.lost)
            case _ if self.forgetful or routing_id not in self._known:
                self._known.discard(routing_id)
                answer = failure(ErrorCode.NOT_REGISTERED, "register first")
            case Beat():
                self.beats.append(packet.message)
                answer = BeatAck(leave=self.leave)
            case Leaving():
                self.left.set()
                answer = BeatAck()
            case Gone():
                self.gone.set()
                answer = BeatAck()
            case _:
                self._arrived.put(packet)
        if answer is not None:
            frames = encode(answer, id=f"m{next(self._ids)}", re=packet.header.id, buffers=buffers)
            socket.send_multipart([routing_id, *frames])

    def _blob(self, packet: Packet) -> tuple[Message, tuple[Buffer, ...]]:
        message = packet.message
        if isinstance(message, BlobRead):
            if not self.store.has(message.digest):
                return failure(ErrorCode.NOT_FOUND, f"there is no blob {message.digest}"), ()
            data = self.store.read(message.digest, message.offset, message.length)
            return BlobData(digest=message.digest, offset=message.offset, nbytes=self.store.size(message.digest)), (
                data,
            )
        assert isinstance(message, BlobBegin | BlobChunk)
        if isinstance(message, BlobBegin):
            self._nbytes = message.nbytes
            offset = self.store.begin(message.digest, message.nbytes)
        else:
            offset = self.store.append(message.digest, message.offset, packet.buffers[0])
            if offset == self._nbytes:
                self.store.finish(message.digest)
        return BlobOffset(digest=message.digest, offset=offset, complete=self.store.has(message.digest)), ()
