"""A process's file descriptors: as many as the system gives, and bounds for who holds them.

In: the limit of this process; the bound sockets of a context. Out: the limit at its highest; connections hung up.
Never: a connection hung up on for saying nothing that has spoken, or whose handshake may still come.

Whoever reaches a port is accepted, and holds a descriptor until its handshake is over or is given up (`HANDSHAKE_S`);
whoever has a key holds as many as it likes. libzmq bounds neither (BACKLOG is a queue before that, MAX_SOCKETS counts
our own sockets), nor what it gathers of a message whose end never comes. So all connections are watched: by its
monitors, by the descriptor that each received frame tells, and by what the kernel has received for each.
`common.connections` says which must go.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import zmq

from common.connections import Bounds, Connections, Ending, Place, on_the_line
from common.refusals import Refusals
from common.telemetry import get_logger
from common.wakeup import Wakeup
from joynexus.transport import HANDSHAKE_S, Context, Socket

log = get_logger(__name__)

_HIGHEST = 2**20
_MOST_SILENT = 4096
"""About 4 KiB of memory each."""
_SILENT_SHARE = 4
_MUTE_SHARE = 8
_SPOKEN_SHARE = 2
"""One in so many descriptors may be a new connection's, one that says nothing, any other; the rest is for files."""
MAX_BACKLOG_BYTES = 256 * 1024**2
"""Four of the largest messages."""
_LOOK_S = 0.5
_BYTES_RECEIVED = struct.Struct("=Q")
_BYTES_RECEIVED_AT = 128
"""In Linux's `struct tcp_info`."""
_EVENT = struct.Struct("=Hi")
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_numbers = itertools.count(1)


def raise_limit() -> int:
    """Let this process open as many files as it may, and return how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _HIGHEST if hard == resource.RLIM_INFINITY else min(hard, _HIGHEST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems have a limit above which they do not go
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _HIGHEST if soft == resource.RLIM_INFINITY else soft


def bounds(limit: int, *, of_one: int) -> Bounds:
    """Return how many connections a process with so many descriptors may have, and of them one owner."""
    spoken = max(1, limit // _SPOKEN_SHARE)
    return Bounds(
        new=min(_MOST_SILENT, limit // _SILENT_SHARE),
        mute=min(_MOST_SILENT, limit // _MUTE_SHARE),
        spoken=spoken,
        of_one=min(of_one, spoken),
        backlog_bytes=MAX_BACKLOG_BYTES,
    )


class Doorkeeper:
    """Watch connections, and hang up on those that must go, from a thread of its own.

    Args:
        context: of the sockets.
        sockets: bound ones; nobody else may monitor them.
        bounds: how many connections there may be.
        owner_of: names whose key this is.
        failed: called if the thread fails.
    """

    def __init__(
        self,
        context: Context,
        sockets: Iterable[Socket],
        *,
        bounds: Bounds,
        owner_of: Callable[[str], str],
        failed: Callable[[], object],
    ) -> None:
        self._owner_of = owner_of
        self._failed = failed
        self._lock = threading.Lock()
        self._connections = Connections(bounds)
        self._refusals = Refusals("connections_hung_up")
        self.counts = self._refusals.counts
        self._monitors: list[Socket] = []
        for bound in sockets:
            address = f"inproc://doorkeeper-{next(_numbers)}"
            bound.monitor(address, _EVENTS)
            monitor = context.socket(zmq.PAIR)
            monitor.setsockopt(zmq.RCVHWM, 0)  # else libzmq's thread, and all connections, wait for this one
            monitor.connect(address)
            self._monitors.append(monitor)
        self._wakeup = Wakeup()
        self._stopping = False
        self._thread = threading.Thread(target=self._guarded, name="doorkeeper", daemon=True)
        self._thread.start()

    @property
    def silent(self) -> int:
        """How many connections are new and have said nothing."""
        return len(self._connections.new)

    @property
    def mute(self) -> int:
        """How many connections have said nothing although their handshake is over."""
        return len(self._connections.mute)

    @property
    def spoken(self) -> int:
        """How many connections have said something, of those that may still be there."""
        return len(self._connections.spoken)

    @property
    def hung_up(self) -> int:
        """How many connections were hung up on."""
        return self.counts.total()

    def heard(self, door: str, frames: Sequence[zmq.Frame]) -> None:
        """Note that a message came, its routing id first; from any thread."""

        def who() -> tuple[Place, str] | None:
            try:
                place = _place(int(frames[-1].get(zmq.SRCFD)))
            except zmq.ZMQError:  # it came otherwise than by TCP
                return None
            return None if place is None else (place, self._owner_of(str(frames[-1]["User-Id"])))

        nbytes = sum(on_the_line(len(frame)) for frame in frames[1:])
        with self._lock:
            for ending in self._connections.heard((door, frames[0].bytes), nbytes, time.monotonic(), who):
                self._hang_up(ending)

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        self._wakeup.set()
        self._thread.join()

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception:
            log.critical("thread_failed", thread="doorkeeper", exc_info=True)
            self._failed()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        for monitor in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        look_at = 0.0
        try:
            while not self._stopping:
                poller.poll(int(1000 * _LOOK_S))
                for monitor in self._monitors:
                    self._take(monitor)
                now = time.monotonic()
                if now >= look_at:
                    look_at = now + _LOOK_S
                    self._look(now)
        finally:  # the context's end waits for every socket
            for monitor in self._monitors:
                monitor.close(0)

    def _look(self, now: float) -> None:
        with self._lock:
            for ending in self._connections.settled(now - HANDSHAKE_S - 1):
                self._hang_up(ending)
            places = self._connections.mark()
        received = {place: _received(place) for place in places}  # this takes long, and messages are noted meanwhile
        with self._lock:
            for ending in self._connections.measured(received, now):
                self._hang_up(ending)

    def _take(self, monitor: Socket) -> None:
        for _ in range(100):  # then it is the next one's turn
            try:
                what, _ = monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, descriptor = _EVENT.unpack(what)
            with self._lock:
                if event != zmq.EVENT_ACCEPTED:
                    self._connections.closed(descriptor, _place(descriptor))
                elif (place := _place(descriptor)) is not None:
                    for ending in self._connections.accepted(place, time.monotonic()):
                        self._hang_up(ending)

    def _hang_up(self, ending: Ending) -> None:
        descriptor = ending.place[0]
        if _place(descriptor) != ending.place:  # it has gone meanwhile
            return
        self._refusals.note(ending.reason, ending.owner or "strangers", ending.why)
        with contextlib.suppress(OSError):  # it goes just now, maybe before we have it
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
            try:
                connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()  # libzmq closes it


def _place(descriptor: int) -> Place | None:
    """Return which socket is at a descriptor now; None if none is."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return (descriptor, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None  # it may be a file's by now


def _received(place: Place) -> int | None:
    """Return how many bytes have come over a connection; None if it has gone, 0 on systems that do not say."""
    if _place(place[0]) != place:
        return None
    if sys.platform != "linux":
        return 0
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=place[0])
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED_AT + 8)
        finally:
            connection.detach()
        return int(_BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)[0])
    except (OSError, struct.error):  # it has gone meanwhile; an old kernel
        return 0
