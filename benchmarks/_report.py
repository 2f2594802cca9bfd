"""What all benchmarks share: quick or full, figures with their spread, one table for people and one JSON for machines.

In: rows of figures. Out: a table on stdout and `benchmarks/results/<name>.json` with rows, host and command. Never: a
host name, a path of this machine, or a figure without the number of runs behind it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"

Row = dict[str, object]


def arguments(
    name: str,
    description: str,
    argv: Sequence[str] | None = None,
    more: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> argparse.Namespace:
    """Read the command line: `--quick` (under a minute) and `--out`, as every benchmark has, and what `more` adds."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, done in under a minute")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="where the JSON goes")
    more(parser)
    return parser.parse_args(argv)


def spread(values: Sequence[float], digits: int = 3) -> Row:
    """Return median, smallest and largest of repeated runs, and how many there were."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "runs": len(values),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share (0 to 1) of all values lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def write(name: str, options: argparse.Namespace, rows: Sequence[Row], *, flags: str = "") -> None:
    """Print the rows as a table (one for each `table` that they name) and write them with the host and the command."""
    for title, table in itertools.groupby(rows, key=lambda row: row.get("table", "")):
        print(f"\n{title}" if title else "")
        _print([{column: value for column, value in row.items() if column != "table"} for row in table])
    command = f"python -m benchmarks.{name}" + (" --quick" if options.quick else "") + flags
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"rows": rows, "host": host(), "command": command}, indent=2) + "\n")


def host() -> Row:
    """Describe the machine without saying which one it is."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("pyzmq", "msgspec", "numpy", "sqlalchemy", "torch")},
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def _print(rows: Sequence[Row]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    for line in [columns, *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return f"{value['median']} ({value['min']}-{value['max']})"
    return str(value)
