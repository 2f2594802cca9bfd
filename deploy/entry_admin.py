"""What the `admin` container starts with: the operator's cluster file, changed to dial the master by its name.

In: the folder of keys in `.joynexus/keys`, a command. Out: `.joynexus/client.toml`, as `joynexus up` leaves it; then
the command, in this process. Never: a key copied.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from joynexus.keys import ClusterFile

FOLDER = Path(".joynexus")


def main(command: list[str]) -> None:
    """Write the cluster file, then become the command."""
    with suppress(ValueError):  # keys that were not made yet: commands without a connection work
        own = ClusterFile.load(FOLDER / "keys" / "default" / "client.toml")
        near = msgspec.structs.replace(
            own, control="tcp://master:5710", bulk="tcp://master:5711", key_file="keys/default/key.toml"
        )
        near.save(FOLDER / "client.toml")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
