"""The faulty network itself: what it does to bytes, and that it loses none."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.chaos.proxy import Proxy
from tests.waiting import until


@pytest.fixture
def echo() -> Iterator[str]:
    """Somebody who says back what he hears, to each connection."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                end, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(end,), daemon=True).start()

    def answer(end: socket.socket) -> None:
        with closing(end):
            try:
                while data := end.recv(65_536):
                    end.sendall(data)
            except OSError:
                return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(5)


def dial(proxy: Proxy) -> socket.socket:
    host, _, port = proxy.address.removeprefix("tcp://").rpartition(":")
    end = socket.create_connection((host, int(port)), timeout=20)
    end.settimeout(20)
    return end


def exchange(end: socket.socket, data: bytes) -> tuple[bytes, float]:
    """Send, and hear it back; the seconds that took."""
    started = time.monotonic()
    threading.Thread(target=end.sendall, args=(data,), daemon=True).start()
    heard = b""
    while len(heard) < len(data):
        heard += end.recv(65_536)
    return heard, time.monotonic() - started


DATA = bytes(range(256)) * 400  # 100 kB


def test_carries_every_byte(echo: str) -> None:
    with Proxy(echo) as proxy, closing(dial(proxy)) as end:
        assert exchange(end, DATA)[0] == DATA


def test_latency_and_bandwidth_delay_and_slices_cut_but_nothing_is_lost(echo: str) -> None:
    with Proxy(echo) as proxy, closing(dial(proxy)) as end:
        proxy.faults.latency_s = 0.2
        heard, seconds = exchange(end, b"x")
        assert (heard, seconds > 0.39) == (b"x", True)
        proxy.faults.latency_s, proxy.faults.bandwidth = 0.0, 500_000.0
        heard, seconds = exchange(end, DATA)
        assert (heard == DATA, seconds > 0.15) == (True, True)
        proxy.faults.bandwidth, proxy.faults.slice_bytes = 0.0, 7
        assert exchange(end, DATA[:5000])[0] == DATA[:5000]


def test_a_silent_network_delivers_when_it_is_back(echo: str) -> None:
    with Proxy(echo) as proxy, closing(dial(proxy)) as end:
        assert exchange(end, b"before")[0] == b"before"
        proxy.faults.blackhole = True
        end.sendall(b"into the dark")
        end.settimeout(0.3)
        with pytest.raises(TimeoutError):
            end.recv(1)
        end.settimeout(20)
        proxy.faults.blackhole = False
        assert end.recv(100) == b"into the dark"


def test_a_reset_is_heard_at_both_ends_at_once(echo: str) -> None:
    with Proxy(echo) as proxy, closing(dial(proxy)) as end:
        exchange(end, b"x")
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            end.recv(1)
        until(lambda: proxy.connections == 0)
        with closing(dial(proxy)) as again:
            assert exchange(again, b"y")[0] == b"y"


def test_who_ends_a_connection_ends_it_at_the_other_side_too(echo: str) -> None:
    with Proxy(echo) as proxy:
        with closing(dial(proxy)) as end:
            exchange(end, b"x")
            until(lambda: proxy.connections == 1)
        until(lambda: proxy.connections == 0)
