"""`python -m common.journal check | repair FOLDER`: what `joynexus admin journal` runs.

In: the master's state folder. Out: lines for people; exit code 0 if the journal is sound (now), 1 if it is not, 2 if
that could not be told. Never: a traceback for anything an operator can put right.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from common.journal.repair import Report, check, repair

_SHOWN = 200


def main(arguments: Sequence[str]) -> int:
    """Run; return the exit code."""
    if len(arguments) != 2 or arguments[0] not in ("check", "repair"):
        print("usage: python -m common.journal check | repair FOLDER", file=sys.stderr)
        return 2
    verb, folder = arguments[0], Path(arguments[1])
    try:
        report = check(folder) if verb == "check" else repair(folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _say(report, folder)
    return 1 if report.damaged and report.copy is None else 0


def _say(report: Report, folder: Path) -> None:
    if not report.damaged:
        print(f"the journal in {folder} is sound: {report.kept} records")
        return
    done = report.copy is not None
    _list(f"{len(report.damaged)} damaged:", report.damaged)
    _list(f"{len(report.besides)} sound, but of no use without them:", report.besides)
    print(f"{report.kept} records {'stay' if done else 'would stay'}")
    if done:
        print(
            f"what is listed was set aside; the file as it was found is {report.copy}. A master that runs deletes "
            "blobs to which nothing refers any more: copy the folder of blobs first if anything of the above matters"
        )
    else:
        print(f"`joynexus admin journal repair {folder}` sets aside what is listed; the file is copied first")


def _list(title: str, lines: Sequence[str]) -> None:
    if not lines:
        return
    print(title)
    for line in lines[:_SHOWN]:
        print(f"  {line}")
    if len(lines) > _SHOWN:
        print(f"  and {len(lines) - _SHOWN} more")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
