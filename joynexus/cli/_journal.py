"""`joynexus admin journal check | repair`: what to do when a master says that its journal is damaged.

In: the master's state folder, or the URL of a journal in Postgres. Out: what is damaged; with `repair` a journal in a
file that the master starts with. Never: a word with the cluster: its master does not run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

commands = typer.Typer(help="Examine and repair the master's journal.", no_args_is_help=True)
State = Annotated[
    str, typer.Argument(help="The master's state folder, which holds journal.db; or postgresql://user@host/database.")
]


@commands.command()
def check(where: State) -> None:
    """Say what of a journal is damaged, and change nothing. Exit code 0: nothing."""
    _run("check", where)


@commands.command()
def repair(where: State) -> None:
    """Set aside what is damaged, so that the master starts with the rest. The file is copied first."""
    _run("repair", where)


def _run(verb: str, where: str) -> None:
    """Have the service's code do it: a tenant's package has none that knows a journal."""
    from joynexus.launch import checkout

    command = [sys.executable, "-m", "common.journal", verb, where if "://" in where else str(Path(where).resolve())]
    raise typer.Exit(subprocess.run(command, cwd=checkout(), check=False).returncode)
