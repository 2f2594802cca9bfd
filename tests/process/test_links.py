"""Who gets in, and what the one who does not is told."""

from __future__ import annotations

import contextlib
import socket

import pytest
import zmq

from common.transport import bind_router, peer_key
from joynexus import transport
from joynexus.keys import ClusterFile, KeyEntry, KeyPair
from joynexus.transport import Link
from tests.process.door import Door, until


def test_authenticated_key_comes_with_every_message(door: Door) -> None:
    line = door.line(door.laptop.keys())
    until(line, lambda: line.link is Link.UP)
    line.socket.send_multipart([b"a", b"b"])
    frames = door.router.recv_multipart(copy=False)
    assert peer_key(frames[-1]) == door.laptop.keys().public


def test_a_connection_that_comes_up_at_once_is_known_to_be_up(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = transport.AuthWatch

    def late(socket: transport.Socket) -> transport.AuthWatch:
        socket.poll(500, zmq.POLLOUT)  # as long as it would take to come up
        return watch(socket)

    monkeypatch.setattr(transport, "AuthWatch", late)
    line = door.line(door.laptop.keys())
    until(line, lambda: line.link is Link.UP, 20)


def test_unknown_key_is_refused_and_gets_in_once_it_is_known(door: Door) -> None:
    pair = KeyPair.generate()
    line = door.line(pair)
    until(line, lambda: line.link is Link.REFUSED)
    assert "does not accept this key" in line.link.sentence(door.address)
    door.keyring.registry.add(KeyEntry(name="late", public=pair.public, domain="tenant", tenant="acme"))
    until(line, lambda: line.link is Link.UP)
    assert line.ups == 1
    assert door.authenticator.refused >= 1


def test_workers_key_is_refused_at_the_tenants_door(door: Door) -> None:
    worker = ClusterFile.load(door.keyring.cluster_file("trainer"))
    line = door.line(worker.keys())
    until(line, lambda: line.link is Link.REFUSED)


def test_wrong_server_key_is_told_apart_from_a_wrong_own_key(door: Door) -> None:
    line = door.line(door.laptop.keys(), server_public=KeyPair.generate().public)
    until(line, lambda: line.link is Link.WRONG_SERVER)


def test_absent_server_is_connecting_and_nothing_can_be_sent(door: Door) -> None:
    line = door.line(door.laptop.keys(), address="tcp://127.0.0.1:1")
    line.tend()
    assert line.link is Link.CONNECTING
    with pytest.raises(zmq.Again):
        line.socket.send(b"x", zmq.NOBLOCK)


def test_peer_without_encryption_is_never_heard(door: Door) -> None:
    with door.context.socket(zmq.DEALER) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(door.address)
        plain.send_multipart([b"a", b"b"])
        line = door.line(door.laptop.keys())
        until(line, lambda: line.link is Link.UP)
        line.socket.send(b"legitimate")
        assert door.router.recv_multipart()[-1] == b"legitimate"
        assert not door.router.poll(200)


def test_link_is_connecting_again_after_the_server_went_and_up_after_it_came_back(door: Door) -> None:
    line = door.line(door.laptop.keys())
    until(line, lambda: line.link is Link.UP)
    door.router.close(0)
    until(line, lambda: line.link is Link.CONNECTING)
    server = door.keyring.server_keys("front")
    door.router = bind_router(door.context, door.address, server, "tenant", bulk=False)
    until(line, lambda: line.ups == 2)


def test_a_server_that_has_proven_itself_is_waited_for_behind_a_port_that_hangs_up(door: Door) -> None:
    line = door.line(door.laptop.keys())
    until(line, lambda: line.link is Link.UP)
    door.router.close(0)
    until(line, lambda: line.link is Link.CONNECTING)
    host, _, port = door.address.removeprefix("tcp://").rpartition(":")
    with socket.create_server((host, int(port))) as nobody:  # as Docker's proxy while the container starts
        nobody.setblocking(False)
        cut = 0
        while cut < 4:
            line.tend()
            assert line.link is Link.CONNECTING
            with contextlib.suppress(BlockingIOError):
                nobody.accept()[0].close()
                cut += 1
            line.monitor.poll(20)
    server = door.keyring.server_keys("front")
    door.router = bind_router(door.context, door.address, server, "tenant", bulk=False)
    until(line, lambda: line.ups == 2)


def test_taken_address_is_said_to_be_taken(door: Door) -> None:
    with pytest.raises(ValueError, match="another master"):
        bind_router(door.context, door.address, door.keyring.server_keys("front"), "tenant", bulk=False)
