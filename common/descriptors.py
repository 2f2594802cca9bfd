"""A process's file descriptors: as many as the system gives, and few of them for strangers.

In: the limit of this process; the bound sockets of a context. Out: the limit at its highest; connections hung up.
Never: a connection hung up on that has said something, or has been there longer than a handshake may take.

Whoever reaches a port is accepted, and holds a descriptor until its handshake is over or is given up (`HANDSHAKE_S`).
libzmq bounds neither how many do that nor what they leave for files (BACKLOG is a queue before that, MAX_SOCKETS counts
our own sockets). So the newest connections are watched, and if too many have not said anything yet, the oldest of them
goes: a peer with a key has spoken within milliseconds, and gets through however many others come.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable

import zmq

from common.telemetry import get_logger
from common.wakeup import Wakeup
from joynexus.transport import HANDSHAKE_S, Context, Socket

log = get_logger(__name__)

_HIGHEST = 2**20
_MOST_SILENT = 4096
"""About 4 KiB of memory each."""
_SILENT_SHARE = 4
"""At most one in so many descriptors is a stranger's."""
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


def most_silent(limit: int) -> int:
    """Return how many connections that have not said anything a process with so many descriptors may have."""
    return min(_MOST_SILENT, limit // _SILENT_SHARE)


class Doorkeeper:
    """Hang up on connections that say nothing, from a thread of its own.

    Args:
        context: of the sockets.
        sockets: bound ones; nobody else may monitor them.
        most: how many connections that are new and silent there may be.
        failed: called if the thread fails.
    """

    def __init__(self, context: Context, sockets: Iterable[Socket], *, most: int, failed: Callable[[], object]) -> None:
        self._most = most
        self._failed = failed
        self._lock = threading.Lock()
        self._silent: dict[int, float] = {}  # descriptor -> accepted when, oldest first
        # Descriptor -> inode: descriptors are used again, and a first word may come before the news of its connection.
        self._spoke: dict[int, int] = {}
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
        self.hung_up = 0
        self._thread = threading.Thread(target=self._guarded, name="doorkeeper", daemon=True)
        self._thread.start()

    @property
    def silent(self) -> int:
        """How many connections are new and have said nothing."""
        return len(self._silent)

    def heard(self, frame: zmq.Frame) -> None:
        """Note that the connection from which a frame came has said something."""
        if self._silent:
            try:
                descriptor = int(frame.get(zmq.SRCFD))
                inode = os.fstat(descriptor).st_ino
            except (zmq.ZMQError, OSError):  # it came otherwise than by TCP, or its connection has gone
                return
            with self._lock:
                self._silent.pop(descriptor, None)
                self._spoke[descriptor] = inode

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
        while not self._stopping:
            poller.poll(1000)
            for monitor in self._monitors:
                self._take(monitor)
            self._forget(time.monotonic() - HANDSHAKE_S - 1)
        for monitor in self._monitors:
            monitor.close(0)

    def _take(self, monitor: Socket) -> None:
        for _ in range(100):  # then it is the next one's turn
            try:
                what, _ = monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, descriptor = _EVENT.unpack(what)
            with self._lock:
                self._silent.pop(descriptor, None)
                if event == zmq.EVENT_ACCEPTED:
                    self._silent[descriptor] = time.monotonic()
                    if len(self._silent) > self._most:
                        self._hang_up(next(iter(self._silent)))

    def _hang_up(self, descriptor: int) -> None:
        del self._silent[descriptor]
        with contextlib.suppress(OSError):  # it has gone meanwhile
            if os.fstat(descriptor).st_ino == self._spoke.get(descriptor):
                return
            self.hung_up += 1
            if self.hung_up & (self.hung_up - 1) == 0:  # 1, 2, 4, 8, …: a flood must not fill the log
                log.warning("connections_hung_up", most=self._most, hung_up=self.hung_up)
            connection = socket.socket(fileno=descriptor)
            try:
                connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()  # libzmq closes it

    def _forget(self, before: float) -> None:
        """Whoever is still there after the time for a handshake has made one."""
        with self._lock:
            while self._silent:
                descriptor = next(iter(self._silent))
                if self._silent[descriptor] >= before:
                    return
                del self._silent[descriptor]
