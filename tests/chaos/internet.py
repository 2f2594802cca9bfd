"""Several hosts on one machine, and the network between them, which this process is: latency, and cuts.

In: how many hosts, and the latency. Out: processes that run on a host, each a network namespace whose only way out is a
TUN device; packets that go there come by here, are held for a while, and are put into the TUN device of whom they are
for. Never: a packet to or from the real network, an address of this machine, or a namespace left behind.

It needs root's rights over networks (CAP_NET_ADMIN, CAP_SYS_ADMIN), `/dev/net/tun` and `ip`: `why_not` says what is
missing. The kernel's own `netem` is not asked for: many kernels are built without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

_TUN = "/dev/net/tun"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 9000
_LOOK_S = 0.05
_numbers = itertools.count(1)


def why_not() -> str:
    """Say why there can be no such network here; empty if there can."""
    if shutil.which("ip") is None:
        return "there is no `ip` (package iproute2)"
    if not os.access(_TUN, os.R_OK | os.W_OK):
        return f"{_TUN} is missing or may not be opened"
    name = f"jn-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces need root: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


class Internet:
    """Hosts `198.18.0.1`, `.2`, … (a range kept for tests of networks), each of which reaches all others. Use `with`.

    Args:
        hosts: how many.
        latency_s: one way.
    """

    def __init__(self, hosts: int, *, latency_s: float = 0.0) -> None:
        self._latency_s = latency_s
        self.addresses = [f"198.18.0.{number}" for number in range(1, hosts + 1)]
        network = f"jn-{os.getpid()}-{next(_numbers)}"
        self._names = {address: f"{network}-{number}" for number, address in enumerate(self.addresses, start=1)}
        self._tuns: dict[str, int] = {}
        self._cut: set[str] = set()
        self._stop = False
        self.carried = 0
        """Packets that went on."""
        self._thread = threading.Thread(target=self._carry, name="internet", daemon=True)

    def __enter__(self) -> Internet:
        try:
            for number, (address, name) in enumerate(self._names.items(), start=1):
                self._add(address, name, f"jn{os.getpid() % 100_000}x{number}")
        except BaseException:
            self._remove()
            raise
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop = True
        self._thread.join()
        self._remove()

    def start(
        self,
        address: str,
        command: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        output: IO[bytes] | int,
    ) -> subprocess.Popen[bytes]:
        """Start a process on a host; with `subprocess.PIPE` for output it is spoken with over its stdin, too."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self._names[address], *command],
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.PIPE if output == subprocess.PIPE else subprocess.DEVNULL,
            stdout=output,
            stderr=None if output == subprocess.PIPE else subprocess.STDOUT,
        )

    def cut(self, address: str) -> None:
        """From now on nothing reaches a host, and nothing comes from there; nobody is told."""
        self._cut.add(address)

    def mend(self, address: str) -> None:
        """It is back."""
        self._cut.discard(address)

    def _add(self, address: str, name: str, device: str) -> None:
        tun = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._tuns[address] = tun
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
        _ip("netns", "add", name)
        _ip("link", "set", device, "netns", name)
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
        _ip("-n", name, "link", "set", device, "mtu", str(_MTU), "up")
        _ip("-n", name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for tun in self._tuns.values():
            os.close(tun)
        self._tuns.clear()
        for name in self._names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _carry(self) -> None:
        """Hold each packet for the latency, then hand it on; what is due first goes first."""
        hosts = {tun: address for address, tun in self._tuns.items()}
        held: list[tuple[float, int, int, bytes]] = []
        order = itertools.count()
        while not self._stop:
            wait = min(_LOOK_S, max(0.0, held[0][0] - time.monotonic())) if held else _LOOK_S
            for tun in select.select(list(hosts), [], [], wait)[0]:
                for packet in _packets(tun):
                    to = socket.inet_ntoa(packet[16:20]) if packet[0] >> 4 == 4 else ""
                    if to in self._tuns and not {to, hosts[tun]} & self._cut:
                        due = time.monotonic() + self._latency_s
                        heapq.heappush(held, (due, next(order), self._tuns[to], packet))
            while held and held[0][0] <= time.monotonic():
                _, _, tun, packet = heapq.heappop(held)
                with contextlib.suppress(OSError):  # a full queue drops packets, as routers do
                    os.write(tun, packet)
                    self.carried += 1


def _packets(tun: int) -> list[bytes]:
    """Read what is there, at most so much that others have their turn."""
    packets: list[bytes] = []
    with contextlib.suppress(OSError):  # no more is there, or the device is not up
        while len(packets) < 256:
            packets.append(os.read(tun, 65_536))
    return packets


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
