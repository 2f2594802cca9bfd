"""`joynexus admin journal check | repair`: what to do when a master says that its journal is damaged.

In: the master's state folder. Out: what is damaged; with `repair` a journal that the master starts with. Never: a word
with the cluster: its master does not run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

commands = typer.Typer(help="Examine and repair the master's journal.", no_args_is_help=True)
State = Annotated[Path, typer.Argument(help="The master's state folder, which holds journal.db.")]


@commands.command()
def check(folder: State) -> None:
    """Say what of a journal is damaged, and change nothing. Exit code 0: nothing."""
    _run("check", folder)


@commands.command()
def repair(folder: State) -> None:
    """Set aside what is damaged, so that the master starts with the rest. The file is copied first."""
    _run("repair", folder)


def _run(verb: str, folder: Path) -> None:
    """Have the service's code do it: a tenant's package has none that knows a journal."""
    from joynexus.launch import checkout

    command = [sys.executable, "-m", "common.journal", verb, str(folder.resolve())]
    raise typer.Exit(subprocess.run(command, cwd=checkout(), check=False).returncode)
