"""Where the dashboard listens, and how it is reached."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress

import pytest
import uvicorn

from common.descriptors import raise_limit
from services.health.dashboard import service
from services.health.dashboard.service import default_url, listen
from services.health.dashboard.stream import Stream
from services.health.dashboard.web import Web
from tests.unit.health.dashboard.pictures import FakeSource


def test_port_that_is_taken_is_told_in_a_sentence() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ValueError, match=r"the dashboard cannot listen at '127.0.0.1:\d+': .*; set JOYNEXUS_LISTEN"),
    ):
        listen(f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize("where", ["nowhere", "127.0.0.1:", "127.0.0.1:99999999", "127.0.0.1", ":-1"])
def test_address_without_sense_is_told_in_a_sentence(where: str) -> None:
    with pytest.raises(ValueError, match=r"set JOYNEXUS_LISTEN=HOST:PORT"):
        listen(where)


def test_who_listens_everywhere_is_reached_by_the_loopback() -> None:
    assert default_url("0.0.0.0:5714") == "http://127.0.0.1:5714"
    assert default_url("[::]:5714") == "http://127.0.0.1:5714"
    assert default_url("10.0.0.7:80") == "http://10.0.0.7:80"


def serve(test: Callable[[Web, uvicorn.Server, tuple[str, int]], Awaitable[None]]) -> None:
    """Have a test talk to a whole dashboard over a port."""

    async def main() -> None:
        web = Web(FakeSource(), cookie="test")
        listener = listen("127.0.0.1:0")
        server = uvicorn.Server(service.config(web))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with asyncio.timeout(60):
            await test(web, server, listener.getsockname()[:2])
        server.should_exit = True
        await serving
        await web.hub.close()

    asyncio.run(main())


ASK = b"GET /events?page=jobs HTTP/1.1\r\nHost: localhost\r\nCookie: test=operator\r\n\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


def test_connection_that_never_asks_is_ended_and_one_that_waits_for_its_answer_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "REQUEST_S", 0.05)

    async def test(web: Web, server: uvicorn.Server, at: tuple[str, int]) -> None:
        for begun in (b"", b"GET / HTTP/1.1\r\nHost: 127"):
            reader, writer = await asyncio.open_connection(*at)
            writer.write(begun)
            with suppress(ConnectionResetError):
                assert await reader.read() == b""  # ended, and nothing was said
            writer.close()
        reader, writer = await asyncio.open_connection(*at)
        writer.write(ASK)
        await reader.readuntil(b"s-jobs")
        scope = web.hub.knows("operator")
        assert scope is not None
        shots = scope.shots
        while scope.shots < shots + 2:  # some seconds of a stream: longer than a connection may be silent
            await asyncio.sleep(0.01)
        assert web.hub.watchers == 1
        writer.close()

    serve(test)


def test_viewer_that_does_not_read_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STUCK_S", 0.05)
    monkeypatch.setattr(Stream, "events", lambda _: "data: much\n\n" * 1_000_000)

    async def test(web: Web, server: uvicorn.Server, at: tuple[str, int]) -> None:
        with socket.create_connection(at) as viewer:
            viewer.sendall(ASK)
            viewer.setblocking(False)
            await asyncio.get_running_loop().sock_recv(viewer, 1)
            scope = web.hub.knows("operator")
            assert scope is not None
            while scope.watching or server.server_state.connections or server.server_state.tasks:
                await asyncio.sleep(0.01)

    serve(test)


async def asked(at: tuple[str, int], request: bytes) -> bytes:
    """Ask on a connection of its own, and return the answer's first line."""
    reader, writer = await asyncio.open_connection(*at)
    writer.write(request)
    line = await reader.readline()
    writer.close()
    return line


def test_strangers_who_hold_all_connections_shut_out_neither_probes_nor_viewers() -> None:
    raise_limit()

    async def test(web: Web, server: uvicorn.Server, at: tuple[str, int]) -> None:
        reader, writer = await asyncio.open_connection(*at)
        writer.write(ASK)
        await reader.readuntil(b"s-jobs")
        scope = web.hub.knows("operator")
        assert scope is not None
        loop = asyncio.get_running_loop()
        with ExitStack() as ended:
            strangers = [ended.enter_context(socket.socket()) for _ in range(service.CONNECTIONS + 76)]
            for number, stranger in enumerate(strangers):
                stranger.setblocking(False)
                await loop.sock_connect(stranger, at)
                await loop.sock_sendall(stranger, b"GET / HTTP/1.1\r\n" * (number % 2))
            assert await asked(at, HEALTH) == b"HTTP/1.1 200 OK\r\n"
            page = b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nCookie: test=operator\r\n\r\n"
            assert await asked(at, page) == b"HTTP/1.1 200 OK\r\n"
            assert len(server.server_state.connections) <= service.CONNECTIONS
            with suppress(ConnectionResetError):
                assert await loop.sock_recv(strangers[0], 1) == b"", "who was waited for longest made room"
        assert web.hub.watchers == 1, "a viewer that reads is nobody's room"
        writer.close()

    serve(test)


def test_viewer_that_does_not_read_makes_room_and_one_that_reads_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "CONNECTIONS", 1)
    events = Stream.events

    async def test(web: Web, server: uvicorn.Server, at: tuple[str, int]) -> None:
        reader, writer = await asyncio.open_connection(*at)
        writer.write(ASK)
        await reader.readuntil(b"s-jobs")
        with suppress(ConnectionResetError):
            assert await asked(at, HEALTH) == b"", "there is nobody else to hang up on"
        writer.close()
        while web.hub.watchers or server.server_state.connections:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(Stream, "events", lambda _: "data: much\n\n" * 1_000_000)
        with socket.create_connection(at) as viewer:
            viewer.sendall(ASK)
            viewer.setblocking(False)
            await asyncio.get_running_loop().sock_recv(viewer, 1)
            monkeypatch.setattr(Stream, "events", events)
            assert await asked(at, HEALTH) == b"HTTP/1.1 200 OK\r\n"

    serve(test)


def test_who_speaks_no_http_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test(web: Web, server: uvicorn.Server, at: tuple[str, int]) -> None:
        assert (await asked(at, b"\x16\x03\x01 no HTTP\r\n\r\n")).startswith(b"HTTP/1.1 400")
        upgrade = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
        assert (await asked(at, upgrade)).startswith(b"HTTP/1.1 200")

    with caplog.at_level(logging.DEBUG, "asyncio"):
        serve(test)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
