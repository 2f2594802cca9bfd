"""Pipes to processes that may stop in the middle of a message.

In: a pipe, seconds. Out: the same pipe, whose reads and writes end. Never: a bound on the wait for a message to begin:
that is what polling is for.
"""

from __future__ import annotations

import os
import socket
import struct
from multiprocessing.connection import Connection


def limit_stalls(pipe: Connection, seconds: float) -> None:
    """Have the kernel end a read or write of this pipe in which so long nothing moves: BlockingIOError (Linux)."""
    whole, part = divmod(seconds, 1.0)
    limit = struct.pack("ll", int(whole), int(part * 1e6))
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, limit)
