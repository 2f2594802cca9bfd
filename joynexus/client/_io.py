"""The client's I/O thread: it alone touches the sockets, and does what the core says.

In: questions and ops from any thread. Out: futures. Never: a decision (that is the core's), a callback of the caller
under a lock, or an array that the caller may still change (buffers are copied when they are handed over).
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import zmq

from joynexus.client._core import ClientCore
from joynexus.client._events import (
    Answer,
    Ask,
    Channel,
    Command,
    Connected,
    Event,
    Fail,
    Op,
    Received,
    Refused,
    Release,
    Send,
    Tick,
    Unsent,
)
from joynexus.keys import ClusterFile
from joynexus.transport import Context, Line, Link
from joynexus.wire import (
    Buffer,
    ErrorCode,
    Header,
    JoyNexusError,
    Message,
    Packet,
    WireError,
    decode,
    encode,
    failure,
    kind_of,
)

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Convert = Callable[[Packet], T]

log = logging.getLogger(__name__)

_CHANNELS: tuple[Channel, ...] = ("control", "bulk")
_TEND_S = 0.5


def answer_of(type_: type[M]) -> Convert[M]:
    """Return what turns an answer into its message, if that has the expected type."""

    def convert(packet: Packet) -> M:
        if not isinstance(packet.message, type_):
            raise WireError(f"the service answered {packet.header.kind!r} where {type_.__name__} was expected")
        return packet.message

    return convert


class Connection:
    """Questions in, futures out, over one control and (once it is needed) one bulk socket.

    Args:
        cluster: where to dial.

    Raises:
        ValueError: if the key file cannot be read or an address is none.
    """

    def __init__(self, cluster: ClusterFile) -> None:
        self._cluster, self._keys = cluster, cluster.keys()
        self._prefix = secrets.token_hex(6)
        self._count = 0
        self._lock = threading.Lock()
        self._inbox: deque[Event] = deque()
        self._futures: dict[str, tuple[Future[Any], Convert[Any]]] = {}
        self._closed = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._context: Context = zmq.Context()
        self._lines: dict[Channel, Line] = {}
        self._ups = dict.fromkeys(_CHANNELS, 0)
        self._links: dict[Channel, Link] = {}
        self.core = ClientCore(address=cluster.control, holder=f"c{secrets.token_hex(8)}", jitter=random.random)
        self._open("control")
        self._thread = threading.Thread(target=self._run, name="joynexus-io", daemon=True)
        self._thread.start()

    # From any thread

    def ask(
        self,
        message: Message,
        convert: Convert[T],
        *,
        buffers: Sequence[Buffer] = (),
        channel: Channel = "control",
        patience_s: float = 30.0,
        resend_s: float = 3.0,
    ) -> Future[T]:
        """Ask something that has one answer; the future gives `convert(answer)`.

        Raises:
            ValueError: if the message holds a value that cannot be sent.
        """
        check_sendable(message)
        return self._submit(
            lambda id_, copies: Ask(
                id=id_, message=message, buffers=copies, channel=channel, patience_s=patience_s, resend_s=resend_s
            ),
            convert,
            buffers,
        )

    def op(self, policy: str, message: Message, convert: Convert[T], *, buffers: Sequence[Buffer] = ()) -> Future[T]:
        """Order an op. Ops of one policy are applied in the order of these calls.

        Raises:
            ValueError: if the message holds a value that cannot be sent.
        """
        check_sendable(message)
        return self._submit(
            lambda id_, copies: Op(id=id_, policy=policy, message=message, buffers=copies), convert, buffers
        )

    def release(self, policy: str, *, patience_s: float = 30.0) -> Future[None]:
        """Stop driving a policy; fails while ops of it are under way."""
        return self._submit(lambda id_, _: Release(id=id_, policy=policy, patience_s=patience_s), lambda _: None, ())

    def new_key(self) -> str:
        """Return a name that nobody used before."""
        return secrets.token_hex(12)

    def close(self) -> None:
        """Close the sockets; what still waits fails."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _submit(
        self, make: Callable[[str, tuple[Buffer, ...]], Event], convert: Convert[T], buffers: Sequence[Buffer]
    ) -> Future[T]:
        copies = tuple(bytes(buffer) for buffer in buffers)
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # an op on its way cannot be called back
        with self._lock:
            if self._closed:
                raise ValueError("this client is closed: connect again")
            self._count += 1
            id_ = f"{self._prefix}-{self._count}"
            self._futures[id_] = (future, convert)
            self._inbox.append(make(id_, copies))  # under the lock: ops keep the order of the calls
        self._wake()
        return future

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: it is gone
            self._wake_in.send(b"x")

    # In the I/O thread

    def _open(self, channel: Channel) -> None:
        address = self._cluster.control if channel == "control" else self._cluster.bulk
        self._lines[channel] = Line(
            self._context, address, self._cluster.server_public, self._keys, bulk=channel == "bulk"
        )

    def _run(self) -> None:
        try:
            poller = self._poller()
            while not self._closed:
                if self._turn(poller):
                    poller = self._poller()
        except Exception as error:  # whatever it was, nobody may wait for ever on this thread
            log.exception("the client's I/O thread stopped")
            self._stop(failure(ErrorCode.INTERNAL, f"the client stopped working ({error}): connect again"))
        else:
            self._stop(failure(ErrorCode.UNAVAILABLE, "the client was closed before the answer came"))

    def _poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._wake_out.fileno(), zmq.POLLIN)
        for line in self._lines.values():
            poller.register(line.socket, zmq.POLLIN)
            poller.register(line.monitor, zmq.POLLIN)
        return poller

    def _turn(self, poller: zmq.Poller) -> bool:
        """Wait for something, take it in; return whether the sockets changed."""
        now, wait = time.monotonic(), _TEND_S
        if (deadline := self.core.next_deadline()) is not None:
            wait = min(wait, max(0.0, deadline - now))
        ready = dict(poller.poll(int(wait * 1000) + 1))
        lines = len(self._lines)
        if self._wake_out.fileno() in ready:
            self._drain_wake()
        while self._inbox:
            self._handle(self._inbox.popleft())
        changed = False
        for channel, line in list(self._lines.items()):
            if line.socket in ready:
                self._receive(line)
            if line.monitor in ready or line.link is not Link.UP:
                changed |= self._tend(channel, line)
        if (deadline := self.core.next_deadline()) is not None and deadline <= time.monotonic():
            self._handle(Tick())
        return changed or len(self._lines) != lines

    def _drain_wake(self) -> None:
        try:
            while self._wake_out.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _tend(self, channel: Channel, line: Line) -> bool:
        changed = line.tend()
        if line.ups != self._ups[channel]:
            self._ups[channel] = line.ups
            self._handle(Connected(channel=channel))
        elif line.link in (Link.REFUSED, Link.WRONG_SERVER) and line.link is not self._links.get(channel):
            self._handle(Refused(channel=channel, why=line.link.sentence(line.address)))
        self._links[channel] = line.link
        return changed

    def _receive(self, line: Line) -> None:
        for _ in range(64):  # then look at the rest of the world again
            try:
                frames = line.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                packet = decode(frames)
            except WireError as error:
                log.warning("an answer could not be read: %s", error)
                continue
            self._handle(Received(packet=packet))

    def _handle(self, event: Event) -> None:
        for command in self.core.handle(event, time.monotonic()):
            self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case Send():
                self._send(command)
            case Answer(id=id_, packet=packet):
                future, convert = self._futures.pop(id_, (None, None))
                if future is None or convert is None:
                    return
                try:
                    result = convert(packet) if packet is not None else None
                except Exception as error:  # an answer of an unexpected form is the asker's to see
                    future.set_exception(error)
                else:
                    future.set_result(result)
            case Fail(id=id_, error=error):
                future, _ = self._futures.pop(id_, (None, None))
                if future is not None:
                    future.set_exception(error)

    def _send(self, send: Send) -> None:
        if send.channel not in self._lines:
            self._open(send.channel)
        try:
            frames = encode(send.message, id=send.id, deadline_ms=send.deadline_ms, buffers=send.buffers)
            self._lines[send.channel].socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._handle(Unsent(id=send.id))
        except ValueError as error:  # a part is larger than the service takes: as if it had said so itself
            refusal = failure(ErrorCode.TOO_LARGE, str(error))
            self._handle(Received(packet=Packet(header=Header(kind="failure", id="", re=send.id), message=refusal)))

    def _stop(self, reason: Any) -> None:
        with self._lock:
            self._closed = True
            waiting = list(self._futures.values())
            self._futures.clear()
        for line in self._lines.values():
            line.close()
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()
        for future, _ in waiting:
            future.set_exception(JoyNexusError(reason))


def check_sendable(message: Message) -> None:
    """Refuse in the caller's thread what would not encode in the I/O thread (a numpy number, an int above 64 bits).

    Raises:
        ValueError: saying what cannot be sent.
    """
    what = kind_of(message).replace("_", " ")
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))
    except UnicodeEncodeError as error:
        start = error.object[max(0, error.start - 20) : error.start]
        raise ValueError(
            f"this {what} cannot be sent: after {start!r} comes {error.object[error.start]!r}, which is half a "
            "character: decode the text again, as UTF-8"
        ) from error
    except (TypeError, OverflowError, msgspec.MsgspecError) as error:
        raise ValueError(f"this {what} cannot be sent: {error}; use plain numbers, strings and tuples") from error
