"""Work on data sets for env workers (lane `data`)."""

from __future__ import annotations

from joynexus.bounds import Many, Short
from joynexus.datasets import Fault
from joynexus.specs import PolicySpec
from joynexus.wire.base import Wire
from joynexus.wire.errors import Failure
from joynexus.wire.front import ActionError, FileEntry


class PrepareDataset(Wire, frozen=True, kw_only=True):
    """Read and check a data set once (lane `data`). Answer: `DatasetPrepared`.

    Attributes:
        files: files of a pushed set, as blobs; empty for a mounted set.
        mounted: name of the folder in the operator's directory; empty for a pushed set.
        image_side: resize pictures to this many pixels a side; 0 keeps them.
        trace: as in `TrainItem`; empty for a mounted set, which nobody asked for alone.
    """

    task: str
    attempt: int
    tenant: str
    dataset: str
    files: tuple[FileEntry, ...] = ()
    mounted: str = ""
    image_side: int = 0
    trace: str = ""


class DatasetPrepared(Wire, frozen=True, kw_only=True):
    """What a data set is, or why it cannot be used.

    Attributes:
        manifest: blob digest of the encoded `DatasetManifest`; empty if it has errors.
        blobs: digests and sizes of the episode blobs, for accounting.
        error: why it could not be read now, through no fault of the set: it is tried again.
    """

    task: Short
    attempt: int
    manifest: Short = ""
    manifest_nbytes: int = 0
    blobs: Many[tuple[Short, int]] = ()
    faults: Many[Fault] = ()
    error: Failure | None = None
    busy_s: float = 0.0


class SampleIndices(Wire, frozen=True, kw_only=True):
    """Draw a page of training batches (lane `data`). Answer: `IndicesDrawn`.

    Attributes:
        manifest: blob digest of the encoded `DatasetManifest`.
        holdout_episodes: episodes at the end that are never drawn.
        seed, batch_size: of the job.
        first_step, steps: which page.
        trace: as in `TrainItem`.
    """

    task: str
    attempt: int
    tenant: str
    manifest: str
    holdout_episodes: int
    seed: int
    batch_size: int
    first_step: int
    steps: int
    trace: str = ""


class IndicesDrawn(Wire, frozen=True, kw_only=True):
    """The page: for each step its indices."""

    task: Short
    attempt: int
    batches: Many[Many[int]] = ()
    error: Failure | None = None
    busy_s: float = 0.0


class EvaluateActions(Wire, frozen=True, kw_only=True):
    """Compare a version's actions with recorded ones (lane `data`). Answer: `ActionsEvaluated`.

    The worker asks for actions with `WorkerAct`. `trace` is as in `TrainItem`.
    """

    task: str
    attempt: int
    tenant: str
    policy: str
    version: int
    spec: PolicySpec
    manifest: str
    episodes: tuple[int, ...]
    trace: str = ""


class ActionsEvaluated(Wire, frozen=True, kw_only=True):
    """The error, or why it could not be measured."""

    task: Short
    attempt: int
    result: ActionError | None = None
    error: Failure | None = None
    busy_s: float = 0.0
