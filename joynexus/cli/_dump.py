"""`joynexus admin dump FILE`: what somebody needs who is asked for help, without keys and without tenants' words.

In: the cluster's folder, and what its master says. Out: a bundle. Never: a question that the master has to answer for
the bundle to be made: it is made of a cluster that does not run, too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from joynexus.cli._common import FOLDER, Config, Folder, JournalUrl, KeysDir, client


def dump(
    file: Annotated[Path, typer.Argument(help="The bundle, a .tar.gz.")],
    names: Annotated[bool, typer.Option("--names", help="Keep the names of tenants, policies and data sets.")] = False,
    log: Annotated[list[Path] | None, typer.Option(help="Further logs, e.g. of `docker compose logs`.")] = None,
    config: Config = None,
    state_dir: Folder = FOLDER,
    keys_dir: KeysDir = None,
    journal_url: JournalUrl = "",
) -> None:
    """Make a bundle for a bug report: versions, settings, status, usage, the ends of logs, counts. Look at it first."""
    import msgspec

    from joynexus.launch import checkout

    folder = state_dir.absolute()
    command = [
        *(sys.executable, "-m", "common.dump", str(file.absolute())),
        *("--state", str(folder / "state"), "--blobs", str(folder / "blobs"), "--run", str(folder / "run")),
        *("--keys", str((keys_dir or folder / "keys").absolute())),
        *(word for path in log or [] for word in ("--log", str(path.absolute()))),
        *(("--names",) if names else ()),
        *(("--journal-url", journal_url) if journal_url else ()),
    ]
    said = msgspec.json.encode(_ask(config))
    raise typer.Exit(subprocess.run(command, cwd=checkout(), input=said, check=False).returncode)


def _ask(config: Path | None) -> dict[str, Any]:
    """Return what the master says, or why it does not."""
    from joynexus.wire.errors import JoyNexusError

    try:
        with client(config) as connected:
            return {"status": connected.status(), "usage": connected.usage()}
    except (ValueError, OSError, JoyNexusError) as error:
        return {"unanswered": str(error)}
