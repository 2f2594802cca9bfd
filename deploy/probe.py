"""Health check of a container: is its role connected, or (for the master) listening?

In: `listen PORT` or `dial PORT`. Out: exit code 0 or 1. Never: a packet sent: the kernel's table of connections says
it. A wedged role is not this check's business: its watchdog ends it, and the engine starts it again.
"""

from __future__ import annotations

import sys
from pathlib import Path

ESTABLISHED, LISTENING = "01", "0A"


def sockets() -> list[tuple[int, int, str]]:
    """Return local port, remote port and state of every TCP socket here; source: proc_net_tcp(5)."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        path = Path(table)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            _, local, remote, state, *_ = line.split()
            found.append((int(local.rpartition(":")[2], 16), int(remote.rpartition(":")[2], 16), state))
    return found


def main(mode: str, port: int) -> int:
    """Return 0 if the port is listened on here, or dialled from here."""
    if mode == "listen":
        return int(not any(local == port and state == LISTENING for local, _, state in sockets()))
    return int(not any(remote == port and state == ESTABLISHED for _, remote, state in sockets()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
