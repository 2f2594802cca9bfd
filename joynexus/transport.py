"""How a tenant or a worker reaches the master: one encrypted DEALER, and what is known about its connection.

In: an address, the server's public key, the own key pair. Out: a socket whose options are chosen so that nothing
blocks, nothing queues for a peer that is gone, and a dead peer is noticed within 6 s. Never: a routing id (two peers
with one id can steal each other's replies), an unencrypted connection, a thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from joynexus.keys import KeyPair
from joynexus.wire import Buffer, limits

CONTROL_HWM = 1000
"""Messages that may wait in a control socket, each way."""
BULK_HWM = 8
"""Messages that may wait in a bulk socket; the real bound is the credit of whoever asked for them."""

HANDSHAKE_S = 5
"""A connection whose handshake takes longer is given up."""

_COPY_BYTES = 4096
"""Smaller frames are copied, larger ones sent by reference."""

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


def common_options(socket: Socket, *, bulk: bool) -> None:
    """Set the options that every socket of the cluster shares.

    libzmq's defaults have no heartbeat, no limit on a frame and no back-off, and hang on exit.
    """
    hwm = BULK_HWM if bulk else CONTROL_HWM
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.setsockopt(zmq.RCVHWM, hwm)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_BULK_FRAME_BYTES if bulk else limits.MAX_CONTROL_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
    socket.setsockopt(zmq.HEARTBEAT_TTL, 6000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 1000 * HANDSHAKE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_MAXRT, 10000)


def dial(
    context: Context,
    address: str,
    server_public: str,
    keys: KeyPair,
    *,
    bulk: bool = False,
    prepare: Callable[[Socket], object] = lambda socket: None,
) -> Socket:
    """Open a DEALER to the master.

    It connects in the background. Nothing can be sent before it has connected (`zmq.Again` with NOBLOCK), so nothing
    waits in a queue for a server that is not there: who sends, retries.

    Args:
        context: of the socket.
        address: where the master listens.
        server_public: its key.
        keys: one's own.
        bulk: whether it is a bulk socket.
        prepare: called with the socket before it connects.

    Raises:
        ValueError: if the address is none.
    """
    socket = context.socket(zmq.DEALER)
    common_options(socket, bulk=bulk)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)  # a master that was restarted is found again soon
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_public.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    prepare(socket)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ValueError(f"'{address}' is no address to dial ({error}): it looks like tcp://host:port") from error
    return socket


def send_frames(socket: Socket, frames: Sequence[Buffer], *, mark: bool = False) -> zmq.MessageTracker | None:
    """Send one multipart without waiting; frames that were received are passed on by reference.

    A few times faster than `send_multipart` for the small frames that most messages consist of.

    Args:
        socket: where to.
        frames: the message.
        mark: return what tells when the last frame, and with it all before, has left or was dropped.

    Raises:
        zmq.Again: if the peer takes nothing now; nothing was sent then.
        zmq.ZMQError: EHOSTUNREACH from a ROUTER, if the peer is gone.
    """
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        flags = zmq.NOBLOCK if index == last else zmq.NOBLOCK | zmq.SNDMORE
        if mark and index == last:
            return socket.send(frame, flags, copy=False, track=True)
        if (frame.nbytes if isinstance(frame, memoryview) else len(frame)) <= _COPY_BYTES:
            socket.send(frame, flags)
        else:
            socket.send(_received(frame) or frame, flags, copy=False)
    return None


def receive_frames(socket: Socket) -> list[zmq.Frame]:
    """Take one multipart without waiting.

    Raises:
        zmq.Again: if none has come.
    """
    frame: zmq.Frame = socket.recv(zmq.NOBLOCK, copy=False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        frames.append(frame)
    return frames


def _received(buffer: Buffer) -> zmq.Frame | None:
    """Return the received frame that a buffer is a view of, if it is one."""
    whole = buffer.obj if isinstance(buffer, memoryview) else None
    return whole if isinstance(whole, zmq.Frame) and len(whole) == memoryview(buffer).nbytes else None


class Link(StrEnum):
    """What is known about a connection."""

    CONNECTING = "connecting"
    """Nothing has answered yet, or not any more: the server is not running, or not reachable."""
    UP = "up"
    """Both sides have accepted each other's key."""
    REFUSED = "refused"
    """The server is there and does not accept this key. libzmq does not try again by itself."""
    WRONG_SERVER = "wrong_server"
    """What listens there does not prove to have the server key of the cluster file: it is another one, or it hangs."""

    def sentence(self, address: str) -> str:
        """Say what this means and what to do."""
        return {
            Link.CONNECTING: f"nothing answers at {address}: is the cluster running (`joynexus up`)?",
            Link.UP: f"connected to {address}",
            Link.REFUSED: f"the server at {address} does not accept this key: ask the operator for a valid one",
            Link.WRONG_SERVER: f"whatever listens at {address} does not prove to be the server of this cluster file: "
            "it is starting, it hangs, or it is another one, for which the operator has another client.toml",
        }[self]


_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)


class AuthWatch:
    """Watch the connection of a socket that has not connected yet: of what was before, nothing is ever heard.

    `monitor` becomes readable when something has changed; `poll` then tells what.
    """

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self.monitor: Socket = socket.get_monitor_socket(_EVENTS)
        self.link = Link.CONNECTING
        self.ups = 0
        """How often the connection came up; a change means that messages in flight may be lost."""
        self._handshakes_cut = 0
        self._connected = False

    def poll(self) -> Link:
        """Take in what has happened, without waiting, and return the state of the connection."""
        while self.monitor.poll(0):
            event: Any = parse_monitor_message(self.monitor.recv_multipart())
            self._take(event["event"])
        return self.link

    def _take(self, event: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._connected = True
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.link, self._connected, self._handshakes_cut = Link.UP, False, 0
            self.ups += 1
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.link = Link.REFUSED
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
            # A server drops a peer that spoke with another server key in mind. Once can be a restart, so wait for two;
            # and one that has proven its key is starting anew behind a port (Docker's) that hangs up meanwhile.
            if self._connected:
                self._handshakes_cut += 1
            self._connected = False
            if self._handshakes_cut >= 2 and not self.ups:
                self.link = Link.WRONG_SERVER
        elif self.link is Link.UP:
            self.link = Link.CONNECTING

    def close(self) -> None:
        """Stop watching; do this before the socket is closed."""
        self._socket.disable_monitor()
        self.monitor.close(0)


class Line:
    """A DEALER to the master that is made anew when the server has refused it.

    Poll `socket` and `monitor` for input; call `tend` whenever the latter is readable and every now and then. Both
    change when the line is made anew (`tend` returns True). One thread uses it.
    """

    def __init__(
        self, context: Context, address: str, server_public: str, keys: KeyPair, *, bulk: bool = False
    ) -> None:
        self.address = address
        self._dial: Callable[[], Socket] = partial(
            dial, context, address, server_public, keys, bulk=bulk, prepare=self._look_after
        )
        self.socket = self._open()
        self._past_ups = 0
        self._refusals = 0
        self._again_at = 0.0

    @property
    def monitor(self) -> Socket:
        """Socket that becomes readable when the state of the connection may have changed."""
        return self._watch.monitor

    @property
    def link(self) -> Link:
        """State of the connection, as of the last `tend`."""
        return self._watch.link

    @property
    def ups(self) -> int:
        """How often the line came up; after each time, what was in flight before may be lost."""
        return self._past_ups + self._watch.ups

    def tend(self, now: float | None = None) -> bool:
        """Take in news of the connection; after a refusal, dial again with growing pauses of 0.25 to 5 s.

        Args:
            now: `time.monotonic()`, for tests.

        Returns:
            Whether the sockets are new ones.
        """
        now = time.monotonic() if now is None else now
        link = self._watch.poll()
        if link is Link.UP:
            self._refusals = 0
        if link is not Link.REFUSED:
            return False
        if self._again_at == 0.0:
            self._refusals += 1
            self._again_at = now + min(5.0, 0.125 * 2**self._refusals) * random.uniform(0.75, 1.0)
        if now < self._again_at:
            return False
        self._past_ups += self._watch.ups
        self.close()
        self.socket = self._open()
        self._watch.link = Link.REFUSED  # until the new one knows better
        self._again_at = 0.0
        return True

    def _open(self) -> Socket:
        try:
            return self._dial()
        except ValueError:  # the address is none, and the socket is closed
            self._watch.monitor.close(0)
            raise

    def _look_after(self, socket: Socket) -> None:
        self._watch = AuthWatch(socket)

    def close(self) -> None:
        """Close the sockets; what was not sent is dropped."""
        self._watch.close()
        self.socket.close(0)
