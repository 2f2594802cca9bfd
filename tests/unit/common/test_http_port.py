"""The small HTTP port: what it answers, and whom it does not let hold it."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from common import http_port
from common.http_port import HttpPort, probe_port


@pytest.fixture
def said() -> dict[str, str]:
    return {"alive": "", "ready": "loading"}


@pytest.fixture
def port(said: dict[str, str]) -> Iterator[HttpPort]:
    made = probe_port(
        "127.0.0.1:0", alive=lambda: said["alive"], ready=lambda: said["ready"], metrics=lambda: b"x 1\n" * 100_000
    )
    made.start()
    yield made
    made.stop()


def get(port: HttpPort, path: str, *, method: str = "GET", data: bytes | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port.port}{path}", method=method, data=data)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def dial(port: HttpPort) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port.port), timeout=60)


def until_closed(peer: socket.socket) -> bytes:
    got = b""
    while more := peer.recv(1 << 16):
        got += more
    return got


def test_alive_is_not_ready_until_it_is(port: HttpPort, said: dict[str, str]) -> None:
    assert get(port, "/healthz") == (200, b"ok\n")
    assert get(port, "/readyz") == (503, b"loading\n")
    said["ready"] = ""
    assert get(port, "/readyz") == (200, b"ok\n")
    said["alive"] = "no progress"
    assert get(port, "/healthz") == (503, b"no progress\n")


def test_long_text_arrives_whole_and_its_query_is_no_matter(port: HttpPort) -> None:
    assert get(port, "/metrics?x=1") == (200, b"x 1\n" * 100_000)


def test_only_get_of_known_paths_is_answered(port: HttpPort) -> None:
    assert get(port, "/readyz", method="POST", data=b"x" * 100_000)[0] == 405
    assert get(port, "/readyz", method="HEAD")[0] == 405
    assert get(port, "/") == (404, b"/healthz /metrics /readyz\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"\r\n\r\n", b"400"),
        (b"GET\r\n\r\n", b"400"),
        (b"\x00\xff\r\n\r\n", b"400"),
        (b"GET /readyz FTP/1\r\n\r\n", b"400"),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /readyz HTTP/1.1\r\nX: " + b"y" * http_port.MOST_BYTES, b"431"),
    ],
)
def test_what_is_no_request_is_refused_in_one_line(port: HttpPort, request_: bytes, status: bytes) -> None:
    with dial(port) as peer:
        peer.sendall(request_)
        assert until_closed(peer).split(b" ")[1] == status


def test_what_cannot_be_shown_is_an_error_of_that_path_alone() -> None:
    def broken() -> bytes:
        raise RuntimeError("not now")

    port = probe_port("127.0.0.1:0", alive=lambda: "", ready=lambda: "", metrics=broken)
    port.start()
    try:
        assert get(port, "/metrics") == (500, b"RuntimeError\n")
        assert get(port, "/healthz")[0] == 200
    finally:
        port.stop()


def test_clients_that_say_nothing_hold_nobody_up(port: HttpPort) -> None:
    silent = [dial(port) for _ in range(http_port.MOST_CONNECTIONS + 8)]
    silent[-1].sendall(b"GET /healthz HT")
    assert get(port, "/healthz")[0] == 200
    assert until_closed(silent[0]) == b""  # the oldest made room
    for peer in silent:
        peer.close()
    assert get(port, "/healthz")[0] == 200


def test_slow_client_is_hung_up_however_often_it_says_something(
    port: HttpPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_port, "PATIENCE_S", 0.2)
    pause = threading.Event()

    def drip(peer: socket.socket) -> None:
        for _ in range(10_000):
            peer.sendall(b"G")
            pause.wait(0.01)

    with dial(port) as peer, pytest.raises(OSError, match=r"reset|pipe"):
        drip(peer)


def test_client_that_reads_nothing_is_hung_up(port: HttpPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "PATIENCE_S", 0.2)
    with dial(port) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        deadline = threading.Event()
        while port._connections or not peer.recv(1, socket.MSG_PEEK):
            assert not deadline.wait(0.01)
    assert get(port, "/healthz")[0] == 200


def test_stop_ends_open_connections_and_frees_the_port(port: HttpPort) -> None:
    peer = dial(port)
    assert get(port, "/healthz")[0] == 200  # the one before is accepted by now
    again = probe_port("127.0.0.1:0", alive=lambda: "", ready=lambda: "", metrics=bytes)
    again.stop()  # also one that never started
    number = port.port
    port.stop()
    assert until_closed(peer) == b""
    peer.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", number), timeout=60)
    port.stop = lambda: None  # type: ignore[method-assign] # the fixture has nothing left to stop


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", "300.0.0.1:1"])
def test_address_that_is_none_is_refused_in_a_sentence(listen: str) -> None:
    with pytest.raises(ValueError, match="cannot listen on"):
        HttpPort(listen, {})
