"""Clusters for tests, on addresses that nobody else takes while one of their roles is being started again.

In: a folder and what to run. Out: a cluster that is up, ended with the test. Never: an address that somebody listens
on, one of the last few hundred handed out, or one that another process of tests may be handed (rings run several).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from joynexus import launch
from joynexus.keyring import Addresses, Keyring
from joynexus.local import LocalCluster

_PORTS = range(12_000, 32_000)  # below those that systems give to outgoing connections
_BLOCK = 500


@functools.cache
def _own_ports() -> tuple[socket.socket, Iterator[int]]:
    """Claim a block of ports for this process: whoever listens on its first port owns it, for as long as it lives."""
    for first in _PORTS[::_BLOCK]:
        claim = socket.socket()
        try:
            claim.bind(("127.0.0.1", first))
            claim.listen()
        except OSError:
            claim.close()
        else:
            return claim, itertools.cycle(range(first + 1, first + _BLOCK))
    raise RuntimeError("every block of ports for tests is taken")


def own_addresses() -> Addresses:
    """Addresses on which nobody listens now, and no other process of tests will."""
    _, ports = _own_ports()
    free: list[str] = []
    while len(free) < len(Addresses.__struct_fields__):
        port = next(ports)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            free.append(f"tcp://127.0.0.1:{port}")
    return Addresses(**dict(zip(Addresses.__struct_fields__, free, strict=True)))


@contextmanager
def running(folder: Path, options: launch.Options, *, dashboard: bool = False) -> Iterator[LocalCluster]:
    """A cluster as `joynexus up` starts it; without a dashboard unless it is asked for: a process less to wait for."""
    options = dataclasses.replace(options, dashboard=dashboard)
    Keyring(LocalCluster(folder).keys).prepare(own_addresses())  # `up` takes a folder's old addresses if it can
    try:
        yield launch.up(folder, options)
    finally:
        launch.down(folder)
