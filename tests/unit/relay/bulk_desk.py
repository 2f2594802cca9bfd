"""A bulk service without sockets and threads: requests go in, answers come out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import blake3

from common.blobs import BlobStore
from joynexus.keys import KeyRegistry
from joynexus.wire import Buffer, Failure, Message, Packet, decode, decode_header, encode
from joynexus.wire.front import BlobBegin, BlobChunk, BlobOffset
from services.master.bulk import BulkService
from services.master.events import BlobServed, BlobStored, Peer
from services.master.gate import BlobMessage, BlobRequest
from tests.waiting import until


class Core:
    """What the core says: which blobs something refers to, and which may be read."""

    def __init__(self) -> None:
        self.referenced: set[str] = set()
        self.readable: set[tuple[str, str]] = set()
        self.asked_bytes = 0
        self.full: Failure | None = None

    def unreferenced(self, digests: Iterable[str]) -> list[str]:
        return [digest for digest in digests if digest not in self.referenced]

    def may_read(self, tenant: str, digest: str) -> bool:
        return (tenant, digest) in self.readable

    def refuse_upload(self, tenant: str, digest: str, nbytes: int) -> Failure | None:
        self.asked_bytes = nbytes
        return self.full


class _Line:
    """A socket's sending side."""

    def __init__(self) -> None:
        self.sent: list[list[Buffer]] = [[]]

    def send(self, frame: Buffer, flags: int, copy: bool = True, track: bool = False) -> None:
        self.sent[-1].append(bytes(frame))
        if not flags & 2:  # SNDMORE
            self.sent.append([])

    def close(self) -> None:
        pass


class Desk:
    """Asks a bulk service; its steps run here, one after another."""

    def __init__(self, folder: Path) -> None:
        self.core = Core()
        self.store = BlobStore(folder / "blobs")
        self.events: list[BlobStored | BlobServed] = []
        self.line = _Line()
        self._passed = 0.0
        self.service = BulkService(
            {"front_bulk": self.line, "back_bulk": self.line},  # type: ignore[dict-item]  # all that is used of them
            KeyRegistry(folder / "registry.json"),
            self.store,
            folder / "blobs" / "uploads",
            max_uploads=4,
            ask=lambda question: question(self.core),
            post=self.events.append,
            heard=lambda door, frames: None,
            failed=lambda: None,
        )

    def ask(self, message: BlobRequest, *buffers: Buffer, tenant: str = "") -> Message | None:
        """Ask, and return what is answered at once, if anything is."""
        header = decode_header(encode(message, id="q1", buffers=buffers))
        peer = Peer("front_bulk" if tenant else "back_bulk", b"peer")
        request = BlobMessage(peer=peer, tenant=tenant, header=header, message=message, buffers=buffers)
        self.line.sent = [[]]
        self.service._step(self.service._serve, request)
        self.work()
        answers = self.answers()
        assert len(answers) <= 1
        return answers[0].message if answers else None

    def work(self) -> None:
        """Do what waits to be done."""
        while self.service._jobs:
            self.service._jobs.popleft()()

    def wait(self, true: Callable[[], object]) -> None:
        """Do what comes up, until a condition holds."""

        def look() -> object:
            self.work()
            return true()

        until(look)

    def pass_time(self, seconds: float, *, steps: int = 2) -> None:
        """Let time pass that no clock on the wall shows, and what is due be done."""
        self._passed += seconds
        for _ in range(steps):
            self.service._removal.look(time.monotonic() + self._passed)
            self.work()

    def answers(self) -> list[Packet]:
        """Decode what was sent since the last question."""
        return [decode(frames[1:]) for frames in self.line.sent if frames]

    def begin(self, data: bytes, *, tenant: str) -> int:
        """Announce a blob; return how far it is."""
        answer = self.ask(BlobBegin(digest=blake3.blake3(data).hexdigest(), nbytes=len(data)), tenant=tenant)
        assert isinstance(answer, BlobOffset), answer
        return answer.offset

    def upload(self, data: bytes, *, tenant: str = "") -> Message | None:
        """Send a blob in one chunk."""
        digest = blake3.blake3(data).hexdigest()
        self.ask(BlobBegin(digest=digest, nbytes=len(data)), tenant=tenant)
        return self.ask(BlobChunk(digest=digest, offset=0), data, tenant=tenant)
