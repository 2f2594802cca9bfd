"""Data sets that tenants push and train on."""

from __future__ import annotations

from typing import Literal

from joynexus.bounds import Many, Short, Text
from joynexus.contract import Contract
from joynexus.datasets import Fault
from joynexus.wire.base import Wire


class FileEntry(Wire, frozen=True, kw_only=True):
    """One file of a pushed data set: its path inside the set, its blob."""

    path: Text
    digest: Short
    nbytes: int


class PushDataset(Wire, frozen=True, kw_only=True):
    """Make a data set of blobs that were uploaded. Repeating it is safe; another content makes the name point there.

    Answer: `DatasetInfo` at once, in state `checking`.
    """

    dataset: Short
    files: Many[FileEntry]
    image_side: int = 0


class GetDataset(Wire, frozen=True, kw_only=True):
    """Describe a data set. Answer: `DatasetInfo`."""

    dataset: Short


class ListDatasets(Wire, frozen=True, kw_only=True):
    """Data sets of the tenant, and those the operator mounted. Answer: `DatasetList`."""


DatasetState = Literal["checking", "ready", "faulty"]


class DatasetInfo(Wire, frozen=True, kw_only=True):
    """A data set as the service knows it.

    Attributes:
        manifest: digest of the blob with the encoded `DatasetManifest`; empty until it is ready.
        digest: `DatasetManifest.digest()`.
        faults: everything that was found wrong, and what was done about it.
    """

    dataset: str
    state: DatasetState
    episodes: int = 0
    steps: int = 0
    fps: float = 0.0
    source_format: str = ""
    contract: Contract | None = None
    instructions: tuple[str, ...] = ()
    manifest: str = ""
    digest: str = ""
    nbytes: int = 0
    shared: bool = False
    faults: tuple[Fault, ...] = ()


class DatasetList(Wire, frozen=True, kw_only=True):
    """Data sets, by name."""

    datasets: tuple[DatasetInfo, ...]
