"""Validate a data set of any format that is understood, and say what is wrong with it.

In: a folder. Out: a `Report`; or a `Scan`, the report with everything that was read on the way, to prepare the set
from. Never: a change to the folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from services.env.datasets.folder import DatasetFolder
from services.env.datasets.lerobot import scan_lerobot
from services.env.datasets.libero_hdf5 import hdf5_files, scan_hdf5
from services.env.datasets.report import DatasetError, Findings, Report
from services.env.datasets.scan import Scan


def check_dataset(folder: Path) -> Report:
    """Read a data set, all but its pictures, and return what was found; never raises for bad data."""
    try:
        return scan_dataset(folder).report
    except DatasetError as error:
        return error.report


def scan_dataset(path: Path, alive: Callable[[], None] = lambda: None) -> Scan:
    """Read a data set, all but its pictures; `alive` is called with each episode.

    A folder with HDF5 files and without `meta/info.json` is read as LIBERO's or robomimic's; any other as LeRobot's.

    Raises:
        DatasetError: if it cannot be used; the error's report names every fault that was found.
    """
    folder = DatasetFolder(path, Findings())
    if hdf5_files(folder.files) and not folder.has("meta/info.json"):
        return scan_hdf5(folder, alive)
    return scan_lerobot(folder, alive)


def is_dataset(path: Path) -> bool:
    """Return whether a folder looks like a data set of some format, sound or not."""
    return (path / "meta/info.json").is_file() or bool(hdf5_files(sorted(file.name for file in path.iterdir())))
