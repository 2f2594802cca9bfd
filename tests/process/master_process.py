"""A real master process, and the plainest possible peers of it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import zmq

from joynexus.keyring import Addresses, Keyring
from joynexus.keys import ClusterFile, KeyScope
from joynexus.transport import dial
from joynexus.wire import Buffer, Message, Packet, decode, encode
from tests.process.clusters import own_addresses

PATIENCE_S = 60.0
"""Of whoever waits for a real master: on a busy host it starts in half a minute."""
_RESEND_S = 5.0


class MasterProcess:
    """`python -m services.master` in a folder of its own; `with` starts and ends it."""

    def __init__(self, folder: Path, *, module: str = "services.master", **settings: object) -> None:
        self.folder = folder
        self._module = module
        self.addresses = own_addresses()
        self.keyring = Keyring(folder / "keys")
        self.keyring.prepare(self.addresses)
        self.process: subprocess.Popen[bytes] | None = None
        self._settings = {
            **{name: getattr(self.addresses, name) for name in Addresses.__struct_fields__},
            "keys_dir": folder / "keys",
            "state_dir": folder / "state",
            **settings,
        }

    def __enter__(self) -> MasterProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start it; peers connect when it listens."""
        env = {f"JOYNEXUS_{name.upper()}": str(value) for name, value in self._settings.items()}
        self.log = (self.folder / "master.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
        )

    def kill(self) -> None:
        """Kill it with SIGKILL, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.log.close()

    def terminate(self) -> int:
        """End it with SIGTERM; return its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def log_text(self) -> str:
        """What it has logged so far."""
        return (self.folder / "master.log").read_text()

    def tenant(self, name: str = "laptop", *, tenant: str = "acme", scope: KeyScope = "all") -> Peer:
        """Connect with a new key of a tenant."""
        return Peer(ClusterFile.load(self.keyring.issue(name, tenant=tenant, scope=scope)))

    def worker(self, role: str) -> Peer:
        """Connect with the key of a worker role."""
        return Peer(ClusterFile.load(self.keyring.cluster_file(role)))


class Peer:
    """Somebody who speaks the protocol, one message at a time."""

    def __init__(self, cluster: ClusterFile) -> None:
        self.cluster = cluster
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = cluster.keys()
        self.control = dial(self._context, cluster.control, cluster.server_public, keys)
        self.bulk = dial(self._context, cluster.bulk, cluster.server_public, keys, bulk=True)
        self._ids = itertools.count(1)
        self._prefix = os.urandom(4).hex()
        self.unasked: list[Packet] = []
        """Messages that came while an answer was waited for."""

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._context.destroy(linger=0)

    def send(self, frames: Sequence[Buffer], *, bulk: bool = False, timeout_s: float = PATIENCE_S) -> None:
        """Send frames as they are."""
        out = self.bulk if bulk else self.control
        assert out.poll(int(timeout_s * 1000), zmq.POLLOUT), "no connection"
        out.send_multipart(frames)

    def receive(self, *, bulk: bool = False, timeout_s: float = PATIENCE_S) -> Packet:
        """Take the next message."""
        source = self.bulk if bulk else self.control
        assert source.poll(int(timeout_s * 1000)), "no answer"
        return decode(source.recv_multipart())

    def ask(
        self,
        message: Message,
        buffers: Sequence[Buffer] = (),
        *,
        bulk: bool = False,
        id: str = "",
        timeout_s: float = PATIENCE_S,
    ) -> Packet:
        """Send a request, again while it is not answered (a connection may be lost unnoticed); return its answer."""
        id = id or f"{self._prefix}-{next(self._ids)}"
        source = self.bulk if bulk else self.control
        deadline = time.monotonic() + timeout_s
        self.send(encode(message, id=id, buffers=buffers), bulk=bulk, timeout_s=timeout_s)
        while True:
            left = max(0.0, deadline - time.monotonic())
            if left > _RESEND_S and not source.poll(int(1000 * _RESEND_S)):
                self.send(encode(message, id=id, buffers=buffers), bulk=bulk, timeout_s=left)
                continue
            packet = self.receive(bulk=bulk, timeout_s=left)
            if packet.header.re == id:
                return packet
            self.unasked.append(packet)


def dial_deaf(context: zmq.Context[zmq.Socket[bytes]], cluster: ClusterFile, address: str = "") -> zmq.Socket[bytes]:
    """Dial, but take hardly any message before it is asked for: what comes waits at the other end."""
    keys = cluster.keys()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVHWM, 2)
    socket.setsockopt(zmq.CURVE_SERVERKEY, cluster.server_public.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    socket.connect(address or cluster.control)
    return socket


def short_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder with a short name."""
    return tempfile.TemporaryDirectory(prefix="jnx")
