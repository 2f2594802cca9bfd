"""Strangers hold few descriptors, and whoever has a key gets in past them."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from common.descriptors import Doorkeeper, most_silent
from joynexus.transport import Link, receive_frames
from joynexus.wire.front import BlobOffset
from tests.process.master_process import MasterProcess
from tests.process.test_links import Door, until
from tests.process.test_master import fine, upload
from tests.waiting import until as wait

MOST = 64


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    door = Door(tmp_path)
    yield door
    door.close()


@pytest.fixture
def keeper(door: Door) -> Iterator[Doorkeeper]:
    keeper = Doorkeeper(door.context, [door.router], most=MOST, failed=lambda: None)
    yield keeper
    keeper.stop()


def knock(address: str) -> socket.socket:
    host, port = address.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def test_of_silent_connections_the_oldest_goes(door: Door, keeper: Doorkeeper) -> None:
    strangers = [knock(door.address) for _ in range(3 * MOST)]
    wait(lambda: keeper.hung_up == 2 * MOST)
    for stranger in strangers[: 2 * MOST]:
        while stranger.recv(4096):  # libzmq's greeting, then the end
            pass
    assert keeper.silent == MOST
    for stranger in strangers:
        stranger.close()
    wait(lambda: keeper.silent == 0)


def test_whoever_has_a_key_gets_in_and_stays_however_many_strangers_come(door: Door, keeper: Doorkeeper) -> None:
    enough = threading.Event()

    def flood() -> None:
        held: list[socket.socket] = []
        while not enough.is_set():
            with contextlib.suppress(OSError):
                held.append(knock(door.address))
            if len(held) > 4 * MOST:
                held.pop(0).close()
        for stranger in held:
            stranger.close()

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        line = door.line(door.laptop.keys())
        until(line, lambda: line.link is Link.UP, 60)
        while not door.router.poll(100):  # a first word may be lost with its connection
            line.tend()
            if line.socket.poll(100, zmq.POLLOUT):
                line.socket.send(b"hello")
        keeper.heard(receive_frames(door.router)[-1])
        line.tend()
        ups = line.ups
        for _ in range(20):
            had = keeper.hung_up
            wait(lambda had=had: keeper.hung_up > had + 2 * MOST)  # type: ignore[misc]  # bound at once
            line.tend()
        assert (line.link, line.ups) == (Link.UP, ups)
    finally:
        enough.set()
        flooding.join()


def test_a_connection_that_says_nothing_for_long_but_has_a_key_is_left_alone(door: Door, keeper: Doorkeeper) -> None:
    line = door.line(door.laptop.keys())
    until(line, lambda: line.link is Link.UP)
    wait(lambda: keeper.silent == 1)
    wait(lambda: keeper.silent == 0)  # longer there than a handshake may take
    strangers = [knock(door.address) for _ in range(2 * MOST)]
    wait(lambda: keeper.hung_up >= MOST)
    line.tend()
    assert (line.link, line.ups) == (Link.UP, 1)
    for stranger in strangers:
        stranger.close()


def test_a_master_with_few_descriptors_serves_its_tenants_while_strangers_hold_all_they_can(tmp_path: Path) -> None:
    limit = 160
    master = MasterProcess(tmp_path)
    master.start()
    assert master.process is not None
    resource.prlimit(master.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
    try:
        with master.tenant() as tenant:
            fine(tenant)
            strangers = [knock(address) for address in (master.addresses.front_control,) * 400]
            for size in (10, 100_000):
                fine(tenant)
                assert isinstance(upload(tenant, bytes(size)).message, BlobOffset)
            assert master.process.poll() is None
            for stranger in strangers:
                stranger.close()
    finally:
        master.kill()


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes() -> None:
    code = (
        "import resource; from common.descriptors import raise_limit\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "print(raise_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 2**20))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "True", done.stderr
    assert most_silent(1024) == 256
    assert most_silent(2**20) == 4096
