"""A small HTTP port for those who look after a process: `/healthz`, `/readyz`, `/metrics`.

In: GET requests without a body. Out: short texts that callables make. Never: more connections, bytes or seconds than
stated below, whatever a client does or leaves undone; a thread a client; a request that changes anything.

One thread serves all connections as they become readable or writable, so a client that sends a byte a minute costs a
socket for `PATIENCE_S` and keeps nobody waiting. The standard library's servers give a thread to each connection, and
their time limit begins anew with every byte.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

MOST_CONNECTIONS = 32
"""With one more, the oldest is ended."""
MOST_BYTES = 8192
"""Of a request, with its headers."""
PATIENCE_S = 5.0
"""A connection is ended after so long, whether or not it was answered."""

_AT_ONCE = 64 * 1024
_BREATH_S = 0.1


class Reply(NamedTuple):
    """What a path is answered with."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


class _Connection:
    def __init__(self, peer: socket.socket, deadline: float) -> None:
        self.peer = peer
        self.deadline = deadline
        self.request = b""
        self.reply: memoryview | None = None  # what of it is still to be sent; empty: only the client's end is awaited


class HttpPort:
    """Listens from the start; serves from `start` to `stop`.

    Args:
        listen: `host:port`; port 0 takes any that is free.
        paths: what to answer to a path, made anew for each request, in the port's thread.

    Raises:
        ValueError: if the address is not one, or cannot be listened on.

    Attributes:
        port: the one that is listened on.
    """

    def __init__(self, listen: str, paths: Mapping[str, Callable[[], Reply]]) -> None:
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, int(port)), family=family, backlog=MOST_CONNECTIONS)
        except (OSError, ValueError, OverflowError) as error:
            raise ValueError(f"cannot listen on '{listen}' (JOYNEXUS_METRICS, `host:port`): {error}") from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._paths = paths
        self._connections: dict[int, _Connection] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._woken, self._wake = os.pipe()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="http-port", daemon=True)

    def start(self) -> None:
        """Start serving."""
        self._thread.start()

    def stop(self) -> None:
        """Hang up, and listen no more."""
        self._stopping = True
        os.write(self._wake, b"x")
        if self._thread.is_alive():
            self._thread.join()
        for connection in list(self._connections.values()):
            self._end(connection)
        self._selector.close()
        self._listener.close()
        os.close(self._woken)
        os.close(self._wake)

    def _run(self) -> None:
        while not self._stopping:
            oldest = next(iter(self._connections.values()), None)
            timeout = None if oldest is None else max(0.0, oldest.deadline - time.monotonic())
            for key, _ in self._selector.select(timeout):
                if key.fileobj is self._listener:
                    self._accept()
                elif self._connections.get(key.fd) is key.data is not None:
                    self._go_on(key.data)
            now = time.monotonic()
            for connection in [each for each in self._connections.values() if each.deadline <= now]:
                self._end(connection)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:  # gone again, or no descriptor is left: then it stays readable, and would be tried without end
            time.sleep(_BREATH_S)
            return
        peer.setblocking(False)
        if len(self._connections) >= MOST_CONNECTIONS:
            self._end(next(iter(self._connections.values())))
        connection = _Connection(peer, time.monotonic() + PATIENCE_S)
        self._connections[peer.fileno()] = connection
        self._selector.register(peer, selectors.EVENT_READ, connection)

    def _go_on(self, connection: _Connection) -> None:
        try:
            if connection.reply is None:
                self._read(connection)
            elif connection.reply:
                self._write(connection)
            elif not connection.peer.recv(_AT_ONCE):  # what comes behind a request is not read, only taken away
                self._end(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._end(connection)

    def _read(self, connection: _Connection) -> None:
        more = connection.peer.recv(MOST_BYTES + 1 - len(connection.request))
        connection.request += more
        if b"\r\n\r\n" in connection.request:
            reply = self._answer(connection.request)
        elif len(connection.request) > MOST_BYTES:
            reply = Reply(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"the request is too long\n")
        elif not more:
            self._end(connection)
            return
        else:
            return
        connection.reply = memoryview(_encoded(reply))
        self._selector.modify(connection.peer, selectors.EVENT_WRITE, connection)

    def _write(self, connection: _Connection) -> None:
        assert connection.reply is not None
        connection.reply = connection.reply[connection.peer.send(connection.reply[:_AT_ONCE]) :]
        if not connection.reply:
            # Closing with something unread would make the kernel cut off what was just sent.
            connection.peer.shutdown(socket.SHUT_WR)
            self._selector.modify(connection.peer, selectors.EVENT_READ, connection)

    def _answer(self, request: bytes) -> Reply:
        words = request.partition(b"\r\n")[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return Reply(HTTPStatus.BAD_REQUEST, b"not a request of HTTP/1.1\n")
        if words[0] != b"GET":
            return Reply(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET\n")
        make = self._paths.get(words[1].partition(b"?")[0].decode("latin-1"))
        if make is None:
            return Reply(HTTPStatus.NOT_FOUND, (" ".join(sorted(self._paths)) + "\n").encode())
        try:
            return make()
        except Exception as error:  # this port is for looking: what it cannot show may not end the process
            return Reply(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}\n".encode())

    def _end(self, connection: _Connection) -> None:
        del self._connections[connection.peer.fileno()]
        self._selector.unregister(connection.peer)
        connection.peer.close()


def _encoded(reply: Reply) -> bytes:
    head = (
        f"HTTP/1.1 {reply.status.value} {reply.status.phrase}\r\n"
        f"Content-Type: {reply.content_type}\r\n"
        f"Content-Length: {len(reply.body)}\r\n"
        "Cache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\n"
        "Allow: GET\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + reply.body


def probe_port(
    listen: str, *, alive: Callable[[], str], ready: Callable[[], str], metrics: Callable[[], bytes]
) -> HttpPort:
    """Make the port that every role has if its settings ask for one.

    Args:
        listen: `host:port`.
        alive, ready: give an empty string, or the sentence that says what is wrong.
        metrics: gives the text for Prometheus.

    Raises:
        ValueError: if the address cannot be listened on.
    """

    def said(sentence: str) -> Reply:
        status = HTTPStatus.SERVICE_UNAVAILABLE if sentence else HTTPStatus.OK
        return Reply(status, f"{sentence or 'ok'}\n".encode())

    return HttpPort(
        listen,
        {
            "/healthz": lambda: said(alive()),
            "/readyz": lambda: said(ready()),
            "/metrics": lambda: Reply(HTTPStatus.OK, metrics(), "text/plain; version=0.0.4; charset=utf-8"),
        },
    )
