"""Whether the files of an open journal are still those that have its names.

In: the journal's path, while it is open. Out: what became of a file, in a clause. Never: trust in a file that was
removed or replaced: SQLite goes on writing to it without a word, and nobody would find there what was acknowledged.
"""

from __future__ import annotations

import os
from pathlib import Path


class Names:
    """Remembers which files have the journal's names now.

    Args:
        path: of a journal that a connection has read and keeps open, so that its -wal file stays too.
    """

    def __init__(self, path: Path) -> None:
        files = (os.fspath(path), f"{os.fspath(path)}-wal")  # looked at with every transaction
        self._files = tuple((file, _identity(file)) for file in files)

    def lost(self) -> str:
        """Say which file has lost its name; nothing if none has."""
        for file, known in self._files:
            if (now := _identity(file)) != known:
                what = "replaced by another one" if now else "removed"
                return f"{os.path.basename(file)} was {what} while it was in use"  # tenants are told, and no path
        return ""


def _identity(file: str) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
