"""Data sets as their tenant holds them: pushed by folder once, then known by name.

In: a folder. Out: what the service found in it. Never: a path on the wire (only names inside the set), or a file sent
twice.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from joynexus.client import _blobs
from joynexus.client._io import Connection, answer_of
from joynexus.client._progress import BytesBar
from joynexus.datasets import DatasetManifest
from joynexus.specs import check_name
from joynexus.wire import ErrorCode, JoyNexusError, failure
from joynexus.wire.front import DatasetInfo, DatasetList, FileEntry, GetDataset, ListDatasets, PushDataset


class Datasets:
    """The tenant's data sets: `client.datasets`."""

    def __init__(self, connection: Connection, *, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s

    def push(
        self,
        name: str,
        folder: str | Path,
        *,
        image_side: int = 0,
        progress: bool = True,
        wait: bool = True,
    ) -> DatasetInfo:
        """Upload a LeRobot data set and have it checked; what the service has already is not sent again.

        Args:
            name: name of the set from here on; pushing other content under it makes the name point there.
            folder: folder with `meta/`, `data/` and perhaps `videos/`.
            image_side: resize pictures to this many pixels a side; 0 keeps them.
            progress: draw a progress bar on a terminal's standard error.
            wait: wait until the set is checked and prepared.

        Returns:
            What the set is; `faults` say what is wrong with it, `state` whether it can be used.

        Raises:
            ValueError: if the folder is no data set.
            JoyNexusError: if the service refuses it.
        """
        check_name("data set", name)
        root = Path(folder)
        paths = _files(root)
        blobs = [_blobs.LocalBlob.of(path) for path in paths]
        missing = _blobs.missing(self._connection, blobs)
        with BytesBar(f"push {name}", sum(blob.nbytes - offset for blob, offset in missing), enabled=progress) as bar:
            for blob, _ in missing:
                _blobs.upload(self._connection, blob, bar.advance)
        files = tuple(
            FileEntry(path=path.relative_to(root).as_posix(), digest=blob.digest, nbytes=blob.nbytes)
            for path, blob in zip(paths, blobs, strict=True)
        )
        push = PushDataset(dataset=name, files=files, image_side=image_side)
        info = self._connection.ask(push, answer_of(DatasetInfo), patience_s=self._timeout_s).result()
        return self.wait(name) if wait else info

    def wait(self, name: str, *, timeout_s: float | None = None) -> DatasetInfo:
        """Wait until a data set is checked and prepared.

        Raises:
            JoyNexusError: if there is no such set, or `timeout_s` passed first.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause = 0.05
        while (info := self.get(name)).state == "checking":
            if deadline is not None and time.monotonic() > deadline:
                sentence = f"data set '{name}' is still being checked after {timeout_s:g} s; it goes on in the cluster"
                raise JoyNexusError(failure(ErrorCode.DEADLINE, sentence))
            time.sleep(pause)
            pause = min(0.5, pause * 1.5)
        return info

    def get(self, name: str) -> DatasetInfo:
        """Describe a data set: state, size, contract, faults."""
        return self._connection.ask(
            GetDataset(dataset=name), answer_of(DatasetInfo), patience_s=self._timeout_s
        ).result()

    def check(self, name: str) -> DatasetInfo:
        """Wait for a data set's check and return what was found; a mounted set is read on its first use."""
        return self.wait(name)

    def list(self) -> tuple[DatasetInfo, ...]:
        """Describe the tenant's data sets and those the operator mounted."""
        return (
            self._connection.ask(ListDatasets(), answer_of(DatasetList), patience_s=self._timeout_s).result().datasets
        )

    def manifest(self, name: str) -> DatasetManifest:
        """Fetch what the service made of a data set: contract, statistics, episodes.

        Raises:
            JoyNexusError: if there is no such set, or it is not ready.
        """
        info = self.get(name)
        if not info.manifest:
            sentence = f"data set '{name}' is {info.state}: `joynexus datasets check {name}` says why"
            raise JoyNexusError(failure(ErrorCode.BAD_DATA, sentence))
        return msgspec.msgpack.decode(_blobs.fetch(self._connection, info.manifest), type=DatasetManifest)


def _files(root: Path) -> list[Path]:
    """List the files of a set, in order; hidden ones (a downloader's cache, an editor's swap) do not belong to it."""
    if not (root / "meta" / "info.json").is_file():
        raise ValueError(f"{root} is not a LeRobot data set: it has no meta/info.json")
    paths = [
        path
        for path in sorted(root.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    outside = [path for path in paths if not path.resolve().is_relative_to(root.resolve())]
    if outside:
        raise ValueError(f"{outside[0].relative_to(root)} is a link out of the data set: copy the file into it")
    return paths
