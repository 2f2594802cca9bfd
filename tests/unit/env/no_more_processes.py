"""A module after whose import its process can fork once and no more, as where a limit of processes is reached."""

from __future__ import annotations

import errno
import os

_fork, _left = os.fork, [1]


def _fork_once() -> int:
    if not _left:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    _left.pop()
    return _fork()


os.fork = _fork_once
