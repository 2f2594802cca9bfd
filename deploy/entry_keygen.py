"""What the `keygen` container starts with: a password for the Postgres server of the profile `postgres`, made once.

In: the folder of keys in `/keys`, a command. Out: `password` for the server and `pgpass` for libpq in the master; then
the command, in this process. Never: a password in the environment, an argument or a log, or one that is replaced.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from joynexus.keys import write_private

FOLDER = Path("/keys/_postgres")  # no name that a key can have


def main(command: list[str]) -> None:
    """Make the password if there is none, then become the command."""
    if not (FOLDER / "pgpass").exists():
        password = secrets.token_urlsafe(32)
        write_private(FOLDER / "password", password.encode())
        write_private(FOLDER / "pgpass", f"postgres:5432:joynexus:joynexus:{password}\n".encode())
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
