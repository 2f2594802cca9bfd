"""The thread that owns a worker's two sockets: it moves frames between them and the session.

In: things to do from any thread (`do`), frames of the master. Out: frames, and events handed to the runtime. Never: a
decision (the session makes them), or a socket touched by another thread.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from common.session import Event, WorkerSession
from common.telemetry import get_logger
from common.wakeup import Wakeup
from joynexus.keys import ClusterFile
from joynexus.transport import Context, Line, Link, Socket, receive_frames, send_frames
from joynexus.wire import WireError, decode

log = get_logger(__name__)

Job = Callable[[float], None]

EXIT_THREAD = 70
"""Exit code when the I/O thread failed: a process without it is of no use and is better started anew."""

_AT_ONCE = 64
"""Messages taken from one socket before the others get their turn."""


class WorkerIO:
    """Runs a session on real sockets.

    Args:
        cluster: where to dial, with which key.
        session: what to say; used in this thread only.
        happened: takes the session's events, in this thread.
        exit: ends the process if this thread fails.
    """

    def __init__(
        self,
        cluster: ClusterFile,
        session: WorkerSession,
        happened: Callable[[list[Event]], None],
        *,
        exit: Callable[[int], object] = os._exit,
    ) -> None:
        self._cluster = cluster
        self._session = session
        self._happened = happened
        self._exit = exit
        self._jobs: deque[Job] = deque()
        self._wakeup = Wakeup()
        self._stopping = False
        self._flushed: threading.Event | None = None
        self._poller = zmq.Poller()
        self._watched: list[tuple[Socket, bool]] = []  # what the poller was made for
        self._thread = threading.Thread(target=self._guarded, name="worker-io", daemon=True)

    def start(self) -> None:
        """Connect, in the background."""
        self._thread.start()

    def do(self, job: Job) -> None:
        """Have something done with the session in its thread, soon; `job` gets the time."""
        self._jobs.append(job)
        self._wakeup.set()

    def flush(self, timeout_s: float) -> None:
        """Wait until the master has confirmed all results that were given to `do` before, or has gone."""
        flushed = threading.Event()
        self.do(lambda now: self._start_flush(flushed))
        flushed.wait(timeout_s)

    def stop(self) -> None:
        """Hang up and end the thread."""
        self._stopping = True
        self._wakeup.set()
        self._thread.join(timeout=5.0)
        self._wakeup.close()

    def _start_flush(self, flushed: threading.Event) -> None:
        self._flushed = flushed
        self._session.hurry()

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception:
            # Whatever it is: without this thread the worker is deaf, so it ends and is started anew.
            log.critical("thread_failed", thread="io", exc_info=True)
            self._exit(EXIT_THREAD)

    def _run(self) -> None:
        context: Context = zmq.Context()
        keys = self._cluster.keys()
        lines = [
            _Tended(Line(context, address, self._cluster.server_public, keys, bulk=bulk), bulk)
            for bulk, address in ((False, self._cluster.control), (True, self._cluster.bulk))
        ]
        try:
            while not self._stopping:
                now = time.monotonic()
                self._do_jobs(now)
                for tended in lines:
                    tended.blocked = not self._send(tended)
                ready = self._wait(lines)
                if self._wakeup.fileno() in ready:
                    self._wakeup.clear()
                for tended in lines:
                    if tended.line.monitor in ready or tended.line.link is not Link.UP:
                        self._tend(tended)
                    if tended.line.socket in ready:
                        self._receive(tended.line)
        finally:
            for tended in lines:
                tended.line.close()
            context.term()

    def _wait(self, lines: list[_Tended]) -> dict[object, int]:
        watched = [(tended.line.socket, tended.blocked and tended.line.link is Link.UP) for tended in lines]
        if watched != self._watched:
            self._watched, self._poller = watched, zmq.Poller()
            self._poller.register(self._wakeup, zmq.POLLIN)
            for tended, (opened, blocked) in zip(lines, watched, strict=True):
                self._poller.register(opened, zmq.POLLIN | (zmq.POLLOUT if blocked else 0))
                self._poller.register(tended.line.monitor, zmq.POLLIN)
        now = time.monotonic()
        wait_s = 0.0 if self._jobs else self._session.next_at(now) - now
        if any(tended.blocked for tended in lines):
            # What is due cannot be sent, so its time says nothing; a line that was refused wants to be made anew.
            wait_s = min(max(wait_s, 0.05), 0.25)
        return dict(self._poller.poll(max(0, math.ceil(1000 * wait_s))))

    def _tend(self, tended: _Tended) -> None:
        line, now = tended.line, time.monotonic()
        line.tend(now)
        if line.link is not tended.link:
            tended.link = line.link
            if line.link is Link.UP:
                log.info("connected", to=line.address)
            else:
                log.warning("not_connected", why=line.link.sentence(line.address))
        if line.ups != tended.ups:
            tended.ups = line.ups
            self._session.came_up(bulk=tended.bulk, now=now)

    def _do_jobs(self, now: float) -> None:
        while self._jobs:
            self._jobs.popleft()(now)
        if self._flushed is not None and (not self._session.undelivered or not self._session.registered):
            self._flushed.set()
        events = self._session.expire(now)
        if events:
            self._happened(events)

    def _send(self, tended: _Tended) -> bool:
        """Send what there is to send; return False if the socket takes no more now."""
        if tended.line.link is not Link.UP:
            return False
        while (send := self._session.next_send(time.monotonic(), bulk=tended.bulk)) is not None:
            try:
                send_frames(tended.line.socket, send.frames)
            except zmq.Again:
                return False
            self._session.sent(send, time.monotonic())
        return True

    def _receive(self, line: Line) -> None:
        events: list[Event] = []
        for _ in range(_AT_ONCE):
            try:
                frames = receive_frames(line.socket)
            except zmq.Again:
                break
            try:
                packet = decode([frame.buffer for frame in frames])
            except WireError as error:
                log.error("message_unreadable", why=str(error))
                continue
            events += self._session.received(packet, time.monotonic())
        if events:
            self._happened(events)


class _Tended:
    """A line, and what this thread last knew of it."""

    def __init__(self, line: Line, bulk: bool) -> None:
        self.line = line
        self.bulk = bulk
        self.link = Link.CONNECTING
        self.ups = 0
        self.blocked = False
