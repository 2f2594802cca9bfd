"""The dashboard's shell: a connection to the master, and a web server.

In: settings. Out: pages on `listen`. Never: a port open to others than those it was set to, or a loop that hangs and
goes on looking alive: the watchdog looks at the loop itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.descriptors import raise_limit
from common.runtime import WorkerRuntime
from common.settings import DashboardSettings
from common.telemetry import get_logger
from joynexus.wire.back import Register
from services.health.dashboard.source import MasterSource
from services.health.dashboard.web import Web

log = get_logger(__name__)

TURN_S = 0.2
HUNG_S = 20.0
"""A loop that stood still for so long ends the process."""
REQUEST_S = 10.0
"""How long a connection may be without a whole request; it is ended within twice that."""
STUCK_S = 30.0
"""How long what is sent may wait for a browser that does not read."""
CONNECTIONS = 1024
"""Connections at once; for one that comes then, the one goes that has let itself be waited for longest."""
BACKLOG = 128
"""Connections that are taken in at once, before any of them is looked at."""
SILENT = logging.CRITICAL + 1
BYE_S = 2.0
"""How long open streams may take to end."""


def run(settings: DashboardSettings) -> None:
    """Serve until SIGTERM.

    Raises:
        ValueError: if it cannot listen where it should.
    """
    url = settings.dashboard_url or default_url(settings.listen)
    parts = urlsplit(url)
    hosts = tuple(filter(None, (parts.hostname or "", *settings.dashboard_hosts.replace(",", " ").split())))
    listener = listen(settings.listen)
    raise_limit()
    runtime = WorkerRuntime(settings)
    web = Web(
        MasterSource(runtime),
        hosts=hosts,
        https=parts.scheme == "https",
        cookie=f"joynexus-{parts.port or listener.getsockname()[1]}",
        unready=runtime.unready,
    )
    with listener, runtime:
        runtime.register(
            Register(role="dashboard", incarnation=runtime.incarnation, pid=os.getpid(), credit={}, detail={"url": url})
        )
        log.info("listening", at=settings.listen, url=url)
        asyncio.run(serve(web, listener, runtime))


class Brief(H11Protocol):
    """A connection that asks for something soon and reads the answer, or is ended: uvicorn itself waits without end.

    Nor are there ever too many: one that asks for nothing, or does not read, makes room for the next that comes.
    uvicorn's own bound (`limit_concurrency`) would refuse whoever comes, health checks too, while strangers stay.
    """

    _stuck: asyncio.TimerHandle | None = None
    _since = 0.0  # when it last had nothing to be answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as its base has it
        """Begin to look, and make room."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._check(None)
        if len(self.connections) > CONNECTIONS:
            waited_for = [each for each in self.connections if isinstance(each, Brief) and each._is_waited_for]
            min(waited_for, key=lambda each: each._since)._hang_up()  # if there is none beside it: this one

    def connection_lost(self, exc: Exception | None) -> None:
        """Look no more."""
        self._timer.cancel()
        self._unstick()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """It has its answer: the next request is its own affair."""
        self._since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Give the browser some time to read; to close would be to wait until it has."""
        super().pause_writing()
        self._stuck = self.loop.call_later(STUCK_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        self._unstick()
        super().resume_writing()

    def _unstick(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    @property
    def _asks_nothing(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_waited_for(self) -> bool:
        return self._asks_nothing or self._stuck is not None

    def _hang_up(self) -> None:
        """End at once, and be counted no more."""
        self.connections.discard(self)
        self.transport.abort()

    def _check(self, before: object) -> None:
        """End the connection if no request has come since the last look."""
        idle = self._asks_nothing
        now: object = self if self.cycle is None else self.cycle
        if idle and now is before:
            self.transport.abort()
        self._timer = self.loop.call_later(REQUEST_S, self._check, now if idle else None)


class _Server(uvicorn.Server):
    """Leaves signals to the runtime."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def config(web: Web) -> uvicorn.Config:
    """Return how the web server is to be.

    It logs nothing: that a stranger sent no HTTP is none of an operator's business (and a log that strangers fill), and
    of a page that fails we say `page_failed` ourselves.
    """
    return uvicorn.Config(
        web.app,
        http=Brief,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        log_level=SILENT,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=int(BYE_S),
    )


async def serve(web: Web, listener: socket.socket, runtime: WorkerRuntime) -> None:
    """Run the web server until the runtime is told to leave."""
    server = _Server(config(web))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    with runtime.progress.phase("serving", deadline_s=HUNG_S):
        while not runtime.finished and not serving.done():
            runtime.progress.advance()
            await asyncio.sleep(TURN_S)
    await web.hub.close()
    server.should_exit = True
    await serving


def listen(where: str) -> socket.socket:
    """Return a socket that listens at `host:port`; ValueError if that is not possible."""
    host, _, port = where.rpartition(":")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host.strip("[]"), int(port)), family=family, backlog=BACKLOG)
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(f"the dashboard cannot listen at '{where}': {error}; set JOYNEXUS_LISTEN=HOST:PORT") from error


def default_url(listen: str) -> str:
    """Return by which address this machine's browsers reach who listens at `host:port`."""
    host, _, port = listen.rpartition(":")
    everywhere = host in ("", "0.0.0.0", "[::]", "::")
    return f"http://{'127.0.0.1' if everywhere else host}:{port}"
