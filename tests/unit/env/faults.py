"""Data sets of tests in which something is broken, and what is said of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.blobs import BlobStore
from services.env.datasets.check import check_dataset
from services.env.datasets.prepare import prepare_dataset
from services.env.datasets.report import DatasetError, Report
from tests.unit.env import sets

VIDEOS = f"videos/chunk-000/{sets.KEY}"


def info(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    sets.edit_json(folder / "meta/info.json", edit)


def warnings(report: Report) -> str:
    assert report.errors == ()
    assert report.summary is not None, "a set with warnings alone can be used"
    return "\n".join(f"{fault.where}: {fault.what}" for fault in report.faults)


def refusal(folder: Path, tmp_path: Path) -> str:
    """Preparing must refuse, in one sentence, and leave no blob; checking must give the same faults without raising."""
    store = BlobStore(tmp_path / "blobs")
    with pytest.raises(DatasetError) as caught:
        prepare_dataset(folder, store)
    assert caught.value.report.errors
    report = check_dataset(folder)
    if report.errors:  # what only decoding shows, checking may miss
        assert report == caught.value.report
    return str(caught.value)
