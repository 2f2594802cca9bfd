"""Work of the `data` lane: prepare data sets, draw pages of batches, compare actions with recorded ones.

In: messages of the master. Out: their answers. Never: a path from a message (a mounted set is one of those that were
found at start; a pushed one is made of blobs), a file of a data set that this process opens, a simulator, or torch.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Protocol

import msgspec
import numpy as np

from common.prepared import PreparedDataset, training_indices
from joynexus.contract import first_difference
from joynexus.datasets import DatasetManifest, Fault
from joynexus.seeds import derived_seed
from joynexus.simulation.asking import Asker
from joynexus.specs import NAME_PATTERN
from joynexus.unreadable import UNREADABLE
from joynexus.wire import ErrorCode, JoyNexusError, failure
from joynexus.wire.back import (
    ActionsEvaluated,
    DatasetPrepared,
    EvaluateActions,
    IndicesDrawn,
    PrepareDataset,
    SampleIndices,
)
from joynexus.wire.front import ActionError, FileEntry
from services.env.datasets.apart import prepare_apart
from services.env.datasets.check import is_dataset
from services.env.datasets.report import DatasetError
from services.env.producers.action_error import ActionErrors
from services.env.producers.sampler import batch_indices

_COMPARED_ROWS = 32  # steps for which actions are asked at once
_MANIFESTS = 8  # kept at hand
_decode_manifest = msgspec.msgpack.Decoder(DatasetManifest).decode


class Blobs(Protocol):
    """What of `BlobAccess` this needs."""

    def fetch(self, digest: str) -> Path:
        """Return a blob's file."""

    def read(self, digest: str) -> bytes:
        """Return a blob's content."""

    def put_bytes(self, data: bytes | memoryview) -> str:
        """Store bytes."""

    def put_file(self, path: Path, *, move: bool = True) -> tuple[str, int]:
        """Store a file."""


def find_mounted(folder: Path | None) -> dict[str, Path]:
    """Return the data sets in the operator's folder, by a name that may stand in jobs.

    A folder's name is taken in lower case with '-' for each other character: `Pick.v2` is named `pick-v2`. Where two
    folders would get one name, the first in alphabetical order has it.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()) if folder is not None and folder.is_dir() else ():
        name = re.sub(r"[^a-z0-9_-]", "-", path.name.lower())
        if path.is_dir() and is_dataset(path) and NAME_PATTERN.fullmatch(name):
            found.setdefault(name, path)
    return found


class DataWork:
    """Does the work of the `data` lane.

    Args:
        blobs: where blobs come from and go.
        scratch: folder for files that are deleted again.
        mounted: data sets in the operator's folder, by name.
        alive: called now and then, to say that this worker lives.
        child_busy: called with the CPU seconds of processes that read a set.
        reader_bytes: memory that such a process may take.
    """

    def __init__(
        self,
        blobs: Blobs,
        scratch: Path,
        mounted: dict[str, Path],
        alive: Callable[[], None] = lambda: None,
        *,
        child_busy: Callable[[float], None] = lambda seconds: None,
        reader_bytes: int = 8 * 1024**3,
    ) -> None:
        self._blobs, self._scratch, self._mounted, self._alive = blobs, scratch, mounted, alive
        self._child_busy, self._reader_bytes = child_busy, reader_bytes
        self._lock = threading.Lock()  # several threads do this lane's work
        self._manifests: dict[str, DatasetManifest] = {}
        scratch.mkdir(parents=True, exist_ok=True)

    def prepare(self, message: PrepareDataset) -> DatasetPrepared:
        """Read and check a data set; faults are its answer, never an exception for what is in the set."""

        def answer(manifest: DatasetManifest | None, faults: tuple[Fault, ...]) -> DatasetPrepared:
            encoded = msgspec.msgpack.encode(manifest) if manifest else b""
            return DatasetPrepared(
                task=message.task,
                attempt=message.attempt,
                manifest=self._blobs.put_bytes(encoded) if manifest else "",
                manifest_nbytes=len(encoded),
                blobs=tuple((e.blob, e.nbytes) for e in manifest.episodes) if manifest else (),
                faults=faults,
            )

        try:
            with self._folder_of(message) as folder:
                manifest = prepare_apart(
                    folder,
                    self._blobs,
                    self._scratch,
                    memory_bytes=self._reader_bytes,
                    image_side=message.image_side or None,
                    alive=self._alive,
                    busy=self._child_busy,
                )
            return answer(manifest, manifest.faults)
        except DatasetError as error:
            return answer(None, error.report.faults)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            what = f"it could not be prepared ({error.strerror}): ask the operator for disk space, then push it again"
            return DatasetPrepared(
                task=message.task, attempt=message.attempt, error=failure(ErrorCode.UNAVAILABLE, what)
            )

    def draw(self, message: SampleIndices) -> IndicesDrawn:
        """Draw a page of batches."""
        try:
            allowed = training_indices(self._manifest(message.manifest), message.holdout_episodes)
            steps = range(message.first_step, message.first_step + message.steps)
            pages = (batch_indices(message.seed, step, len(allowed), message.batch_size) for step in steps)
            batches = tuple(tuple(allowed[page].tolist()) for page in pages)
        except ValueError as error:
            reason = failure(ErrorCode.INVALID, str(error))
            return IndicesDrawn(task=message.task, attempt=message.attempt, error=reason)
        return IndicesDrawn(task=message.task, attempt=message.attempt, batches=batches)

    def compare(self, message: EvaluateActions, ask: Asker) -> ActionsEvaluated:
        """Compare a version's actions with recorded ones.

        Raises:
            JoyNexusError: what the master answered to a request to act.
        """
        try:
            result = self._compare(message, ask)
        except (ValueError, IndexError) as error:
            reason = failure(ErrorCode.INVALID, str(error))
            return ActionsEvaluated(task=message.task, attempt=message.attempt, error=reason)
        return ActionsEvaluated(task=message.task, attempt=message.attempt, result=result)

    def _compare(self, message: EvaluateActions, ask: Asker) -> ActionError:
        spec, data = message.spec, PreparedDataset(self._manifest(message.manifest), self._blobs.fetch)
        difference = first_difference(spec.contract, data.manifest.contract)
        if difference is not None:
            raise JoyNexusError(failure(ErrorCode.CONTRACT_MISMATCH, difference.replace("environment", "data set")))
        statistics = spec.statistics or data.manifest.statistics
        errors = ActionErrors(statistics.action, spec.chunk)
        steps = data.sample_range(message.episodes)
        if len(steps) == 0:
            raise ValueError("no episode is named: name at least one to evaluate on")
        for start in range(0, len(steps), _COMPARED_ROWS):
            part = steps[start : start + _COMPARED_ROWS]
            recorded = data.batch(part, spec.chunk)
            pictures = [data.images(int(step)) for step in part]
            images = [np.stack(views) for views in zip(*pictures, strict=True)]
            draws = [derived_seed("recorded", int(step)) for step in part]
            errors.add(recorded, ask(recorded.state, images, recorded.instructions, draws).actions)
        return ActionError(version=message.version, **errors.result()._asdict())

    def _manifest(self, digest: str) -> DatasetManifest:
        known = self._manifests.get(digest)
        if known is not None:
            return known
        try:
            decoded = _decode_manifest(self._blobs.read(digest))
        except UNREADABLE as error:
            raise ValueError(f"blob {digest} is no data set's manifest: {error}") from error
        with self._lock:
            self._manifests[digest] = decoded
            while len(self._manifests) > _MANIFESTS:
                del self._manifests[next(iter(self._manifests))]
        return decoded

    @contextmanager
    def _folder_of(self, message: PrepareDataset) -> Iterator[Path]:
        """Give the data set as a folder: the operator's own, or one made of a pushed set's blobs."""
        if message.mounted:
            if message.mounted not in self._mounted:
                raise JoyNexusError(failure(ErrorCode.UNAVAILABLE, f"data set '{message.mounted}' is not mounted here"))
            yield self._mounted[message.mounted]
            return
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            root = Path(folder) / message.dataset
            root.mkdir()
            for entry in message.files:
                self._place(root, entry)
            yield root

    def _place(self, root: Path, entry: FileEntry) -> None:
        path = PurePosixPath(entry.path)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise JoyNexusError(failure(ErrorCode.INVALID, f"'{entry.path[:80]}' is not a path inside a data set"))
        self._alive()
        target, source = root / path, self._blobs.fetch(entry.digest)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(source, target)
        except (FileExistsError, NotADirectoryError) as error:  # what is there is a blob's own file: never write to it
            raise JoyNexusError(
                failure(ErrorCode.INVALID, f"'{entry.path[:80]}' is in the place of another file of the data set")
            ) from error
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(source, target)
