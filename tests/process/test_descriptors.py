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

from common import descriptors
from common.connections import Bounds, Connections, Ending
from common.descriptors import Doorkeeper, bounds
from joynexus.transport import Link, receive_frames
from joynexus.wire.front import BlobOffset
from tests.chaos.proxy import Proxy
from tests.process.door import Door, until
from tests.process.master_process import MasterProcess
from tests.process.test_master import fine, upload
from tests.waiting import until as wait

MOST = 64


@pytest.fixture
def keeper(door: Door) -> Iterator[Doorkeeper]:
    few = Bounds(new=MOST, mute=MOST, spoken=1000, of_one=8, backlog_bytes=32 * 2**20)
    keeper = Doorkeeper(door.context, [door.router], bounds=few, owner_of=lambda key: key, failed=lambda: None)
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


def test_a_connection_that_goes_while_it_is_hung_up_on_takes_nothing_with_it(
    keeper: Doorkeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as gone:
        place = (gone.fileno(), 7)
    monkeypatch.setattr(descriptors, "_place", lambda _: place)  # as it was a moment ago
    keeper._hang_up(Ending(place, "", "silent", "of too many"))
    assert keeper.hung_up == 1


def test_a_doorkeeper_that_fails_says_so_and_keeps_no_context_open(
    door: Door, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(Connections, "accepted", fail)
    failed = threading.Event()
    few = Bounds(new=MOST, mute=MOST, spoken=1000, of_one=8, backlog_bytes=32 * 2**20)
    keeper = Doorkeeper(door.context, [door.router], bounds=few, owner_of=lambda key: key, failed=failed.set)
    with knock(door.address):
        assert failed.wait(60)
    keeper.stop()
    door.close()  # else it would wait here for ever
    assert door.context.closed
    assert "a mistake" in capsys.readouterr().out


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

        def speaks() -> None:
            """Say a word and have it heard; it may have come by a connection that has gone since."""
            until(line, lambda: line.link is Link.UP)
            while not door.router.poll(100):
                line.tend()
                if line.socket.poll(100, zmq.POLLOUT):
                    line.socket.send(b"hello")
            while door.router.poll(0):
                keeper.heard("front", receive_frames(door.router))
            line.tend()

        def others_go() -> None:
            had = keeper.hung_up
            wait(lambda: keeper.hung_up > had + 2 * MOST)
            line.tend()

        def stays(rounds: int) -> bool:
            ups = line.ups
            for _ in range(rounds):
                others_go()
            return (line.link, line.ups) == (Link.UP, ups)

        speaks()
        while not stays(1):
            speaks()
        assert stays(20)
    finally:
        enough.set()
        flooding.join()


class Speaker:
    """A connection with a key that says a word."""

    def __init__(self, door: Door, keeper: Doorkeeper, *, address: str = "") -> None:
        self.line = door.line(door.laptop.keys(), address=address)
        until(self.line, lambda: self.line.link is Link.UP)
        self.door, self.keeper = door, keeper
        self.say(b"hello")

    def say(self, *frames: bytes) -> None:
        self.line.socket.send_multipart(frames)
        assert self.door.router.poll(60_000)
        self.keeper.heard("front", receive_frames(self.door.router))

    def there(self) -> bool:
        self.line.tend()
        return self.line.link is Link.UP and self.line.ups == 1


def test_of_a_keys_connections_the_one_that_was_silent_for_longest_goes(door: Door, keeper: Doorkeeper) -> None:
    speakers = [Speaker(door, keeper) for _ in range(8)]
    speakers[0].say(b"again")
    assert keeper.hung_up == 0
    newest = Speaker(door, keeper)
    wait(lambda: not speakers[1].there())
    assert keeper.counts == {"connections": 1}
    assert all(speaker.there() for speaker in [speakers[0], *speakers[2:], newest])
    for speaker in [*speakers, newest]:
        door.lines.remove(speaker.line)
        speaker.line.close()
    wait(lambda: keeper.spoken == 0)


def test_mute_connections_of_a_valid_key_are_bounded_and_one_that_speaks_is_not_among_them(
    door: Door, keeper: Doorkeeper
) -> None:
    speaker = Speaker(door, keeper)
    lines = [door.line(door.laptop.keys()) for _ in range(MOST)]
    for line in lines:
        until(line, lambda line=line: line.link is Link.UP)  # type: ignore[misc]  # bound at once
    wait(lambda: keeper.mute == MOST)
    assert keeper.hung_up == 0
    late = [door.line(door.laptop.keys()) for _ in range(4)]
    for line in late:
        until(line, lambda line=line: line.link is Link.UP)  # type: ignore[misc]
    wait(lambda: keeper.hung_up >= 4)
    assert speaker.there()


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say how much has come")
def test_a_message_that_never_ends_is_ended_and_long_ones_that_do_are_not(door: Door, keeper: Doorkeeper) -> None:
    with Proxy(door.address) as network:
        honest, endless = Speaker(door, keeper), Speaker(door, keeper, address=network.address)
        part = bytes(2**20)
        for _ in range(40):  # more in all than one may have sent that has not come out
            honest.say(part, b"small", bytes(300))
        network.faults.bandwidth = 20e6
        endless.line.socket.send_multipart([part] * 200, copy=False)
        wait(lambda: not endless.there())
        assert keeper.counts == {"backlog": 1}
        assert network.carried < 190 * 2**20  # gone long before its message was whole
        assert honest.there()


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
    assert bounds(1024, of_one=100)[:4] == (256, 128, 512, 100)
    assert bounds(2**20, of_one=1024)[:4] == (4096, 4096, 2**19, 1024)
