"""Progress bars on standard error, where that is a terminal.

In: job states and byte counts. Out: lines on a terminal. Never: output into a pipe or a log file, or on standard
output.
"""

from __future__ import annotations

import sys
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from joynexus.wire.front import JobInfo


class _Bar:
    def __init__(self, title: str, total: float | None, columns: list[ProgressColumn], *, enabled: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            *columns,
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=Console(stderr=True),
            disable=not (enabled and sys.stderr.isatty()),
        )
        self._task = self._progress.add_task(title, total=total, note="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class JobBar(_Bar):
    """Steps or episodes done, with the state and the last loss beside it."""

    def __init__(self, title: str, *, enabled: bool) -> None:
        super().__init__(title, None, [MofNCompleteColumn()], enabled=enabled)

    def show(self, info: JobInfo) -> None:
        """Draw the newest state."""
        note = info.state if not info.losses else f"{info.state}, loss {info.losses[-1]:.4f}"
        if info.message and info.state in ("waiting", "parked", "paused"):
            note = info.message if info.state == "waiting" else f"{info.state}: {info.message}"
        self._progress.update(self._task, completed=info.done, total=info.total or None, note=note)


class BytesBar(_Bar):
    """Bytes moved."""

    def __init__(self, title: str, nbytes: int, *, enabled: bool) -> None:
        super().__init__(title, nbytes, [DownloadColumn(), TransferSpeedColumn()], enabled=enabled)

    def advance(self, nbytes: int) -> None:
        """So many more bytes were moved."""
        self._progress.advance(self._task, nbytes)
