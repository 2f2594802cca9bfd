"""`python -m common.backup_command make | restore FOLDER`: what `joynexus admin backup` and `restore` run.

In: paths. Out: lines for people; exit code 0, 2 (not made), 3 (made, but blobs had been lost before), 75 (a master
has the journal). Never: a traceback for anything an operator can put right.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common.backup import BusyError, Contents, Places, make, restore

_BUSY, _LOST = 75, 3
_SHOWN = 50
_SECRET = ": keep it as secret as they are"


def main(arguments: Sequence[str]) -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m common.backup_command")
    parser.add_argument("verb", choices=("make", "restore"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--blobs", type=Path, required=True)
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--journal-url", default="")
    parser.add_argument("--live", action="store_true")
    told = parser.parse_args(arguments)
    places = Places(state=told.state, blobs=told.blobs, keys=told.keys, journal_url=told.journal_url)
    try:
        if told.verb == "restore":
            contents = restore(told.folder, places)
            print(f"restored from {told.folder}: {_text(contents)}")
        else:
            contents = make(told.folder, places, live=told.live)
            print(f"backup {told.folder}: {_text(contents)}{_SECRET if contents.keys else ''}")
    except BusyError as error:
        if told.verb == "make":
            return _BUSY
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not contents.missing:
        return 0
    print(f"{len(contents.missing)} blobs had been lost or damaged before it was made:")
    for digest in contents.missing[:_SHOWN]:
        print(f"  {digest}")
    return _LOST if told.verb == "make" else 0


def _text(contents: Contents) -> str:
    keys = "with the keys" if contents.keys else "without keys"
    return f"{contents.records} records, {contents.blobs} blobs ({contents.nbytes / 1e6:,.1f} MB), {keys}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
