"""One of a master's doors, without a master: a ROUTER that lets in whom a registry knows, and lines to it.

In: a folder for keys. Out: the ROUTER, and who dials it. Never: a word that is read or answered unasked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import zmq

from common.transport import Authenticator, bind_router, bound_address
from joynexus.keyring import Addresses, Keyring
from joynexus.keys import ClusterFile, KeyPair
from joynexus.transport import Context, Line, Socket


class Door:
    def __init__(self, folder: Path) -> None:
        self.keyring = Keyring(folder)
        self.keyring.prepare(Addresses())
        self.laptop = ClusterFile.load(self.keyring.issue("laptop", tenant="acme"))
        self.context: Context = zmq.Context()
        self.authenticator = Authenticator(self.context, self.keyring.registry)
        server = self.keyring.server_keys("front")
        self.router: Socket = bind_router(self.context, "tcp://127.0.0.1:*", server, "tenant", bulk=False)
        self.address = bound_address(self.router)
        self.lines: list[Line] = []

    def line(self, keys: KeyPair, *, server_public: str = "", address: str = "") -> Line:
        line = Line(self.context, address or self.address, server_public or self.laptop.server_public, keys)
        self.lines.append(line)
        return line

    def close(self) -> None:
        for line in self.lines:
            line.close()
        self.router.close(0)
        self.authenticator.stop()
        self.context.term()


def until(line: Line, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Tend a line until a condition holds; fail if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"link is {line.link}"
        line.tend()
        line.monitor.poll(20)
