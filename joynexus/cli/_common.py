"""What several commands share: options, the connection, tables and JSON on standard output."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from joynexus.client import Client
    from joynexus.specs import ModuleConfig

Config = Annotated[
    Path | None,
    typer.Option("--config", help="The cluster's client.toml; otherwise $JOYNEXUS_CONFIG, ./.joynexus, ~/.joynexus."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Folder = Annotated[Path, typer.Option("--state-dir", help="Folder of the cluster on this machine.")]
FOLDER = Path(".joynexus")
KeysDir = Annotated[
    Path | None, typer.Option("--keys-dir", help="The folder of keys; otherwise `keys` in --state-dir.")
]

JournalUrl = Annotated[
    str, typer.Option("--journal-url", envvar="JOYNEXUS_JOURNAL_URL", help="The journal, if it is in Postgres.")
]


@contextmanager
def client(config: Path | None) -> Iterator[Client]:
    """Connect, and close afterwards."""
    from joynexus.client import connect

    with connect(config) as connected:
        yield connected


def keys_folder(state_dir: Path, keys_dir: Path | None) -> Path:
    """Return the folder of keys that an operator means; ValueError if it is none."""
    folder = keys_dir or state_dir / "keys"
    if not (folder / "registry.json").exists():
        raise ValueError(f"{folder} is no folder of keys: start the cluster once, or name it with --keys-dir")
    return folder


def print_json(value: Any) -> None:
    """Print a message (or anything made of such) as JSON."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
    """Print rows as a table; columns of amounts are aligned to the right and never cut, empty ones are left out."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold"
    )
    cells = [[_text(cell) for cell in row] for row in rows]
    kept = [index for index, _ in enumerate(columns) if not rows or any(row[index] for row in cells)]
    for index in kept:
        if rows and all(_is_amount(row[index]) for row in cells):
            width = max(len(columns[index]), *(len(row[index]) for row in cells))
            table.add_column(columns[index], justify="right", no_wrap=True, min_width=width)
        else:
            table.add_column(columns[index], overflow="fold")
    for row in cells:
        table.add_row(*(row[index] for index in kept))
    Console(markup=False, emoji=False).print(table)  # cells are what users and operators named, not styles


def _text(cell: object) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def _is_amount(text: str) -> bool:
    return text in ("", "-") or text.removeprefix("-")[0].isdigit()


def human_bytes(nbytes: float) -> str:
    """Return a size with a unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """Return a duration with a unit that fits."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.0005 else "0 s"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def module_config(pairs: Sequence[str], option: str) -> ModuleConfig:
    """Read `key=value` options as an action module's or adapter's sizes.

    Raises:
        ValueError: if one has no `=`, or a key comes twice.
    """
    config: ModuleConfig = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (equals and key and text):
            raise ValueError(f"{option} takes key=value, e.g. width=192, not '{pair}'")
        if key in config:
            raise ValueError(f"{option} has '{key}' twice")
        config[key] = _value(text)
    return config


def _value(text: str) -> int | float | str | bool:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
