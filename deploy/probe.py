"""Health check of a container: does its role serve?

In: the port in JOYNEXUS_METRICS (or an argument: the path, instead of /readyz). Out: exit code 0 or 1, and the role's
own sentence on stdout, where the engine keeps it. Never: an import that costs (it runs in every container every ten
seconds: `python -I -S`, and HTTP by hand), or a wait without end. A wedged role is not this check's business: its
watchdog ends it, and the engine starts it again.
"""

from __future__ import annotations

import os
import socket
import sys

TIMEOUT_S = 4.0


def main(listen: str, path: str = "/readyz") -> int:
    """Ask the role in this container; return 0 if it says yes."""
    port = int(listen.rpartition(":")[2])
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            head, _, said = b"".join(iter(lambda: connection.recv(4096), b"")).partition(b"\r\n\r\n")
    except OSError as error:
        print(f"nobody answers on port {port}: {error}")
        return 1
    print(said.decode(errors="replace").strip())
    return int(head.split(b" ")[1:2] != [b"200"])


if __name__ == "__main__":
    sys.exit(main(os.environ["JOYNEXUS_METRICS"], *sys.argv[1:]))
