"""Data sets as their tenant holds them: pushed by folder once, then known by name.

In: a folder. Out: what the service found in it. Never: a path on the wire (only names inside the set), or a file sent
twice.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from joynexus.client import _blobs
from joynexus.client._flow import Flow, answered, blocking, paused, worked
from joynexus.client._io import Connection, answer_of
from joynexus.client._progress import BytesBar
from joynexus.datasets import DatasetManifest
from joynexus.specs import check_name
from joynexus.wire import ErrorCode, JoyNexusError, failure
from joynexus.wire.front import (
    DatasetInfo,
    DatasetList,
    DeleteDataset,
    Done,
    FileEntry,
    GetDataset,
    ListDatasets,
    PushDataset,
)


class DatasetVerbs:
    """What can be done with data sets, whether one waits or awaits."""

    def __init__(self, connection: Connection, *, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s

    def _push(
        self,
        name: str,
        folder: str | Path,
        *,
        image_side: int = 0,
        progress: bool = True,
        wait: bool = True,
    ) -> Flow[DatasetInfo]:
        """Upload a data set and have it checked; what the service has already is not sent again.

        Args:
            name: name of the set from here on; pushing other content under it makes the name point there.
            folder: LeRobot's, with `meta/`, `data/` and perhaps `videos/`; or HDF5 files as LIBERO and robomimic write
                them.
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
        paths, blobs = yield from worked(lambda: _hashed(root))
        missing = yield from _blobs.missing(self._connection, blobs)
        with BytesBar(f"push {name}", sum(blob.nbytes - offset for blob, offset in missing), enabled=progress) as bar:
            for blob, _ in missing:
                yield from _blobs.upload(self._connection, blob, bar.advance)
        files = tuple(
            FileEntry(path=path.relative_to(root).as_posix(), digest=blob.digest, nbytes=blob.nbytes)
            for path, blob in zip(paths, blobs, strict=True)
        )
        push = PushDataset(dataset=name, files=files, image_side=image_side)
        info = yield from answered(self._connection.ask(push, answer_of(DatasetInfo), patience_s=self._timeout_s))
        return (yield from self._wait(name)) if wait else info

    def _wait(self, name: str, *, timeout_s: float | None = None) -> Flow[DatasetInfo]:
        """Wait until a data set is checked and prepared.

        Raises:
            JoyNexusError: if there is no such set, or `timeout_s` passed first.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause = 0.05
        while (info := (yield from self._get(name))).state == "checking":
            if deadline is not None and time.monotonic() > deadline:
                sentence = f"data set '{name}' is still being checked after {timeout_s:g} s; it goes on in the cluster"
                raise JoyNexusError(failure(ErrorCode.DEADLINE, sentence))
            yield from paused(pause)
            pause = min(0.5, pause * 1.5)
        return info

    def _get(self, name: str) -> Flow[DatasetInfo]:
        """Describe a data set: state, size, contract, faults."""
        ask = GetDataset(dataset=name)
        return (yield from answered(self._connection.ask(ask, answer_of(DatasetInfo), patience_s=self._timeout_s)))

    def _check(self, name: str) -> Flow[DatasetInfo]:
        """Wait for a data set's check and return what was found; a mounted set is read on its first use."""
        return (yield from self._wait(name))

    def _delete(self, name: str) -> Flow[None]:
        """Delete a data set of the tenant's own; its files are kept a while, so that pushing it again costs little.

        Raises:
            JoyNexusError: `NOT_FOUND`; `FORBIDDEN` for a mounted one; `CONFLICT` while a job needs it.
        """
        found = yield from self._get(name)
        ask = DeleteDataset(dataset=found.dataset)
        yield from answered(self._connection.ask(ask, answer_of(Done), patience_s=self._timeout_s))

    def _list(self) -> Flow[tuple[DatasetInfo, ...]]:
        """Describe the tenant's data sets and those the operator mounted."""
        asked = self._connection.ask(ListDatasets(), answer_of(DatasetList), patience_s=self._timeout_s)
        return (yield from answered(asked)).datasets

    def _manifest(self, name: str) -> Flow[DatasetManifest]:
        """Fetch what the service made of a data set: contract, statistics, episodes.

        Raises:
            JoyNexusError: if there is no such set, or it is not ready.
        """
        info = yield from self._get(name)
        if not info.manifest:
            sentence = f"data set '{name}' is {info.state}: `joynexus datasets check {name}` says why"
            raise JoyNexusError(failure(ErrorCode.BAD_DATA, sentence))
        content = yield from _blobs.fetch(self._connection, info.manifest)
        return msgspec.msgpack.decode(content, type=DatasetManifest)


class Datasets(DatasetVerbs):
    """The tenant's data sets: `client.datasets`."""

    push = blocking(DatasetVerbs._push)
    wait = blocking(DatasetVerbs._wait)
    get = blocking(DatasetVerbs._get)
    check = blocking(DatasetVerbs._check)
    delete = blocking(DatasetVerbs._delete)
    list = blocking(DatasetVerbs._list)
    manifest = blocking(DatasetVerbs._manifest)


def _hashed(root: Path) -> tuple[list[Path], list[_blobs.LocalBlob]]:
    paths = _files(root)
    return paths, [_blobs.LocalBlob.of(path) for path in paths]


def _files(root: Path) -> list[Path]:
    """List the files of a set, in order; hidden ones (a downloader's cache, an editor's swap) do not belong to it."""
    hdf5 = root.is_dir() and any(path.suffix in (".hdf5", ".h5") for path in root.iterdir())
    if not hdf5 and not (root / "meta" / "info.json").is_file():
        raise ValueError(f"{root} is no data set: it has neither LeRobot's meta/info.json nor an HDF5 file")
    paths = [
        path
        for path in sorted(root.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    outside = [path for path in paths if not path.resolve().is_relative_to(root.resolve())]
    if outside:
        raise ValueError(f"{outside[0].relative_to(root)} is a link out of the data set: copy the file into it")
    return paths
