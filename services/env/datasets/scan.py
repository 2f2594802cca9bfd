"""What was read of a data set, whatever its format, to prepare it from.

In: numbers, texts and a contract that a format's reader found. Out: a `Scan`. Never: a picture in memory; they come one
by one when the set is prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from joynexus.contract import Camera, Contract
from services.env.datasets.folder import DatasetFolder
from services.env.datasets.pictures import Picture
from services.env.datasets.report import Report, Summary
from services.env.datasets.tables import EpisodeRows


class Scan(NamedTuple):
    """A data set that is fit to be prepared.

    Attributes:
        folder: the folder.
        source_format: as in `DatasetManifest`.
        fps: steps per second.
        contract: the recordings' contract, with the cameras' own sizes.
        rows: numbers of each episode.
        instructions: task text of each episode.
        pictures: gives the pictures of an episode (by its place) and a camera in order, [H, W, 3] uint8 of the camera's
            size, turned as the contract says.
        report: everything that was found, no error among it.
    """

    folder: DatasetFolder
    source_format: str
    fps: float
    contract: Contract
    rows: tuple[EpisodeRows, ...]
    instructions: tuple[str, ...]
    pictures: Callable[[int, Camera], Iterator[Picture]]
    report: Report


def make_scan(
    folder: DatasetFolder,
    source_format: str,
    fps: float,
    contract: Contract,
    rows: tuple[EpisodeRows, ...],
    instructions: tuple[str, ...],
    pictures: Callable[[int, Camera], Iterator[Picture]],
) -> Scan:
    """Return a scan with its report; DatasetError if an error was noted."""
    folder.findings.stop_if_failed()
    summary = Summary(
        source_format=source_format,
        robot=contract.robot,
        episodes=len(rows),
        steps=sum(len(numbers.state) for numbers in rows),
        fps=fps,
        state_dim=contract.state_dim,
        action_dim=contract.action_dim,
        cameras=tuple(camera.name for camera in contract.cameras),
        instructions=tuple(sorted(set(instructions))),
    )
    return Scan(folder, source_format, fps, contract, rows, instructions, pictures, folder.findings.report(summary))
