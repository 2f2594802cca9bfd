"""`python -m common.journal check | repair WHERE`: what `joynexus admin journal` runs.

In: the master's state folder, or the URL of a journal in Postgres. Out: lines for people; exit code 0 if the journal is
sound (now), 1 if it is not, 2 if that could not be told. Never: a traceback for anything an operator can put right.
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
        print("usage: python -m common.journal check | repair FOLDER_OR_URL", file=sys.stderr)
        return 2
    verb, where = arguments
    try:
        report = _look(verb, where)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _say(report, where)
    return 1 if report.damaged and report.copy is None else 0


def _look(verb: str, where: str) -> Report:
    if "://" not in where:
        return check(Path(where)) if verb == "check" else repair(Path(where))
    if verb == "repair":
        raise ValueError("only a journal in a file is repaired: bring the server's database back from a copy")
    from common.journal.inspect import inspect

    return inspect(where)


def _say(report: Report, where: str) -> None:
    if not report.damaged:
        print(f"the journal in {where} is sound: {report.kept} records")
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
    elif "://" in where:
        print("bring the server's database back from a copy")
    else:
        print(f"`joynexus admin journal repair {where}` sets aside what is listed; the file is copied first")


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
