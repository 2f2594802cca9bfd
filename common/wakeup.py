"""Ending another thread's poll.

In: `set` from any thread or signal handler. Out: the poll returns. Never: a message; what there is to do lies in a
queue, which is looked at after `clear`.
"""

from __future__ import annotations

import contextlib
import socket


class Wakeup:
    """Something to poll; it is readable from `set` until `clear`."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """Return what is polled."""
        return self._read.fileno()

    def set(self) -> None:
        """End the poll that runs, or the next one."""
        with contextlib.suppress(OSError):  # full of wake-ups already, or closed: nobody polls
            self._write.send(b"\0")

    def clear(self) -> None:
        """Forget wake-ups (a great many at once may take several polls)."""
        with contextlib.suppress(BlockingIOError):
            self._read.recv(4096)

    def close(self) -> None:
        """Close it; `set` does nothing from now on."""
        self._read.close()
        self._write.close()
