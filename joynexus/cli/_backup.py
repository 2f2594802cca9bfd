"""`joynexus admin backup | restore`: a copy of all that must survive, and a cluster that goes on from it.

In: folders. Out: a backup; a folder in which `joynexus up` goes on. Never: a copy made beside a master that was not
asked to keep its blobs meanwhile.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from joynexus.cli._common import FOLDER, Config, Folder, JournalUrl, KeysDir, client

if TYPE_CHECKING:
    from joynexus.client import Client

BUSY = 75
"""Exit code of the copying process if a master has the journal."""
KEPT_S = 300.0
"""Blobs are kept for so long at a time; if whoever copies is killed, they go again after this."""

NoKeys = Annotated[bool, typer.Option("--no-keys", help="Leave out the folder of keys, which has every secret.")]
BlobsDir = Annotated[Path | None, typer.Option("--blobs-dir", help="The blob store; otherwise `blobs` in --state-dir.")]
MasterDir = Annotated[
    Path | None, typer.Option("--master-dir", help="The master's state, with journal.db; otherwise `state` there.")
]


def backup(
    folder: Annotated[Path, typer.Argument(help="Folder that is to be made.")],
    no_keys: NoKeys = False,
    config: Config = None,
    state_dir: Folder = FOLDER,
    keys_dir: KeysDir = None,
    blobs_dir: BlobsDir = None,
    master_dir: MasterDir = None,
    journal_url: JournalUrl = "",
) -> None:
    """Copy journal, blobs and keys, while the cluster runs or not. Asked with an operator's key, if it runs.

    Exit code 0: all is there; 3: it was made, but blobs had been lost before, which are named; others: it was not made.
    """
    places = _places(state_dir, None if no_keys else keys_dir or state_dir / "keys", blobs_dir, master_dir, journal_url)
    code = _run("make", folder, *places)
    if code == BUSY:
        with client(config) as connected, _blobs_stay(connected):
            code = _run("make", folder, *places, "--live")
    raise typer.Exit(code)


def restore(
    folder: Annotated[Path, typer.Argument(help="A backup.")],
    no_keys: NoKeys = False,
    state_dir: Folder = FOLDER,
    keys_dir: KeysDir = None,
    blobs_dir: BlobsDir = None,
    master_dir: MasterDir = None,
    journal_url: JournalUrl = "",
) -> None:
    """Fill a new cluster's folder from a backup, which is read and checked first; then start it."""
    places = _places(state_dir, None if no_keys else keys_dir or state_dir / "keys", blobs_dir, master_dir, journal_url)
    raise typer.Exit(_run("restore", folder, *places))


def _places(
    state_dir: Path, keys: Path | None, blobs_dir: Path | None, master_dir: Path | None, journal_url: str
) -> list[str]:
    places = {"--state": master_dir or state_dir / "state", "--blobs": blobs_dir or state_dir / "blobs", "--keys": keys}
    words = [word for name, path in places.items() if path for word in (name, str(path.absolute()))]
    return [*words, *(("--journal-url", journal_url) if journal_url else ())]


@contextmanager
def _blobs_stay(connected: Client) -> Iterator[None]:
    """Have the master delete no blob; it is asked again and again, for a copy may take long."""
    tickets = [connected.begin_backup(KEPT_S)]
    done = threading.Event()

    def renew() -> None:
        while not done.wait(KEPT_S / 5):
            with suppress(Exception):  # it is tried again; what is missing in the end is noticed
                tickets.append(connected.begin_backup(KEPT_S))
                connected.end_backup(tickets.pop(0))

    thread = threading.Thread(target=renew, name="backup", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        for ticket in tickets:
            with suppress(Exception):  # it ends by itself
                connected.end_backup(ticket)


def _run(verb: str, folder: Path, *places: str) -> int:
    """Have the service's code do it: a tenant's package has none that knows a journal."""
    from joynexus.launch import checkout

    command = [sys.executable, "-m", "common.backup_command", verb, str(folder.absolute()), *places]
    return subprocess.run(command, cwd=checkout(), check=False).returncode
