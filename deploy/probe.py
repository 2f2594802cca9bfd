"""Health check of a container: does its role serve?

In: the port in JOYNEXUS_METRICS (or an argument: the path, instead of /readyz). Out: exit code 0 or 1, and the role's
own sentence on stdout, where the engine keeps it. Never: an import beyond the standard library, or a wait without end.
A wedged role is not this check's business: its watchdog ends it, and the engine starts it again.
"""

from __future__ import annotations

import http.client
import os
import sys

TIMEOUT_S = 4.0


def main(listen: str, path: str = "/readyz") -> int:
    """Ask the role in this container; return 0 if it says yes."""
    port = int(listen.rpartition(":")[2])
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        connection.request("GET", path)
        reply = connection.getresponse()
        print(reply.read().decode(errors="replace").strip())
    except (OSError, http.client.HTTPException) as error:
        print(f"nobody answers on port {port}: {error}")
        return 1
    return int(reply.status != 200)


if __name__ == "__main__":
    sys.exit(main(os.environ["JOYNEXUS_METRICS"], *sys.argv[1:]))
