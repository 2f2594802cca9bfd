"""What several commands share: options, the connection, tables and JSON on standard output."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from joynexus.client import Client

Config = Annotated[
    Path | None,
    typer.Option("--config", help="The cluster's client.toml; otherwise $JOYNEXUS_CONFIG, ./.joynexus, ~/.joynexus."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Folder = Annotated[Path, typer.Option("--state-dir", help="Folder of the cluster on this machine.")]
FOLDER = Path(".joynexus")


@contextmanager
def client(config: Path | None) -> Iterator[Client]:
    """Connect, and close afterwards."""
    from joynexus.client import connect

    with connect(config) as connected:
        yield connected


def print_json(value: Any) -> None:
    """Print a message (or anything made of such) as JSON."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
    """Print rows as a table; columns whose values are numbers are aligned to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console().print(table)


def human_bytes(nbytes: int) -> str:
    """Return a size with a unit that fits."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
