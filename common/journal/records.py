"""What the master writes down before it answers: one typed record for each kind of durable fact.

In: facts that the core decided. Out: structs that `Journal.append` stores and `Journal.load` gives back. Never: a fact
that could be derived from others (progress, queues, who works on what), or a path.

A record replaces the earlier one with the same key, so writing it twice is harmless. Records with `gone` delete it.
Times are seconds since the Unix epoch, as the master's own clock says (it never jumps while the master runs).
"""

from __future__ import annotations

import msgspec

from joynexus.contract import Contract, Statistics
from joynexus.datasets import Fault
from joynexus.specs import JobSpec, PolicySpec
from joynexus.wire.back import RlBegin, RlEpoch, TrainKind
from joynexus.wire.errors import Failure
from joynexus.wire.front import (
    ActionError,
    DatasetState,
    EpisodeResult,
    FileEntry,
    JobState,
    OpResult,
    StageInfo,
    UpdatePoint,
)


class Base(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all records; fields may be added with defaults."""


class PolicyRecord(Base, frozen=True, kw_only=True):
    """A policy exists. Key: tenant, policy.

    Attributes:
        life: tells it from another one of its name that was deleted before.
    """

    tenant: str
    policy: str
    spec: PolicySpec
    life: str = ""
    gone: bool = False


class LeaseRecord(Base, frozen=True, kw_only=True):
    """A tenant's own loop drives the policy (a job's lease follows from its `JobRecord`). Key: tenant, policy."""

    tenant: str
    policy: str
    holder: str = ""
    lease: str = ""
    ttl_s: float = 0.0
    gone: bool = False


class OpRecord(Base, frozen=True, kw_only=True):
    """An op was accepted: everything that doing it again needs. Key: tenant, policy, seq.

    Attributes:
        fingerprint: hash of what the tenant sent, to tell a retry from a conflict.
        payload: inline samples, made by `frames.join`; kept in a column of its own and not given back by `load`.
        payload_nbytes, body_nbytes: its length, and that of the encoded `Samples` in it.
        blob: digest of the blob with the samples, or with the state or weights to load.
        blob_nbytes: its size.
        manifest, indices, feature_scope: samples by reference to a prepared data set.
        rl: what to do, for `rl_begin` and `rl_epoch`.
        rollouts: digests and sizes of the blobs that an `rl_epoch` is trained on.
        version: number issued to a `publish`.
        state: name of the state to save or load.
        state_seq: for `load_state`, the op that saved that state.
        job: job that issued it; empty for a tenant's own op.
        refusals: how often the disk had refused ops of the policy before; one with fewer than an op before it was
            refused together with another.
        trace: id of the request with which the tenant sent it, for the logs.
    """

    tenant: str
    policy: str
    seq: int
    kind: TrainKind
    fingerprint: str = ""
    payload: bytes = b""
    payload_nbytes: int = 0
    body_nbytes: int = 0
    blob: str = ""
    blob_nbytes: int = 0
    manifest: str = ""
    indices: tuple[int, ...] = ()
    feature_scope: str = ""
    rl: RlBegin | RlEpoch | None = None
    rollouts: tuple[tuple[str, int], ...] = ()
    version: int = 0
    state: str = ""
    state_seq: int = 0
    job: str = ""
    refusals: int = 0
    trace: str = ""


class OpDone(Base, frozen=True, kw_only=True):
    """An op was applied (or refused or vetoed, if the result has an error). Key: tenant, policy, seq.

    Attributes:
        nbytes: size of the blob in `result.digest`, if it has one.
        step: optimizer steps of the policy after it.
        samples, backbone_forwards, busy_s: what it took.
        skipped: the master decided the outcome without a trainer, so a replay skips the op.
    """

    tenant: str
    policy: str
    seq: int
    result: OpResult
    nbytes: int = 0
    skipped: bool = False
    step: int = 0
    samples: int = 0
    backbone_forwards: int = 0
    busy_s: float = 0.0


class OpsCovered(Base, frozen=True, kw_only=True):
    """A checkpoint covers ops: their payloads go at once, whole rows after `forget` (their replies are kept so long).

    Never given back by `load`.

    Attributes:
        covered: payloads of ops up to here are deleted.
        forget: rows of ops up to here are deleted.
    """

    tenant: str
    policy: str
    covered: int
    forget: int


class VersionRecord(Base, frozen=True, kw_only=True):
    """A version was published. Key: tenant, policy, version.

    Attributes:
        refused: why inference would not take it; empty if it would.
        job: job that published it.
    """

    tenant: str
    policy: str
    version: int
    digest: str
    nbytes: int
    step: int
    refused: str = ""
    job: str = ""
    gone: bool = False


class CheckpointRecord(Base, frozen=True, kw_only=True):
    """The newest checkpoint of a policy, covering ops up to `seq`. Key: tenant, policy."""

    tenant: str
    policy: str
    digest: str
    nbytes: int
    seq: int
    step: int
    gone: bool = False


class StateRecord(Base, frozen=True, kw_only=True):
    """A state that a tenant saved under a name; `seq` is the op that saved it. Key: tenant, policy, state."""

    tenant: str
    policy: str
    state: str
    digest: str
    nbytes: int
    seq: int
    gone: bool = False


class JobRecord(Base, frozen=True, kw_only=True):
    """A job, as far as it cannot be derived. Key: tenant, job.

    Attributes:
        key: chosen by the client; the same key is the same job.
        number: counts the tenant's jobs.
        version: evaluations: the version that acts; training: the newest version that it published.
        manifest, feature_scope: data set, once resolved.
        first_seq: training: seq of the job's first op, once it drives the policy; 0 before.
        initial: training: its first op publishes the untrained policy, as `initial_version`.
        resumed: training: steps that were done when it was resumed last; vetoes before do not count.
        stages: pipelines: the jobs of the stages that have begun.
        pipeline: job of which it is a stage.
    """

    tenant: str
    job: str
    key: str
    number: int
    spec: JobSpec
    accepted_s: float
    state: JobState = "waiting"
    ended_s: float = 0.0
    version: int = 0
    manifest: str = ""
    feature_scope: str = ""
    first_seq: int = 0
    initial: bool = False
    initial_version: int = 0
    resumed: int = 0
    stages: tuple[StageInfo, ...] = ()
    pipeline: str = ""
    error: Failure | None = None
    action_error: ActionError | None = None
    gone: bool = False


class PageRecord(Base, frozen=True, kw_only=True):
    """Episodes were run, to evaluate or to be trained on. Key: tenant, job, page.

    Attributes:
        version: to be trained on: the version that acted.
        trajectories, trajectories_nbytes: and the blob of what was collected; empty if no episode could be run. The
            record goes when a checkpoint covers the update that was trained on it.
    """

    tenant: str
    job: str
    page: int
    episodes: tuple[EpisodeResult, ...] = ()
    contract_digest: str = ""
    software: dict[str, str] = {}
    videos: tuple[tuple[str, int], ...] = ()
    version: int = 0
    trajectories: str = ""
    trajectories_nbytes: int = 0
    gone: bool = False


class CurveRecord(Base, frozen=True, kw_only=True):
    """Part of a loss or learning curve, written when a checkpoint covers its ops. Key: tenant, job, first.

    Attributes:
        first: index of the first point.
        losses: little-endian float64, one a step (sft).
        updates: or updates (rl); none while an update is not complete.
        samples, backbone_forwards: sums over the ops of these steps or updates.
    """

    tenant: str
    job: str
    first: int
    losses: bytes = b""
    updates: tuple[UpdatePoint, ...] = ()
    samples: int = 0
    backbone_forwards: int = 0
    gone: bool = False


class DatasetRecord(Base, frozen=True, kw_only=True):
    """A data set under its name; `tenant` is empty for one that the operator mounted. Key: tenant, dataset.

    Attributes:
        content: digest of the pushed files and how to read them: the same content is not prepared again.
        manifest: blob with the encoded `DatasetManifest`, once it is ready; `digest` is the manifest's own.
        blobs: blobs that preparing it made, with sizes.
    """

    tenant: str
    dataset: str
    content: str
    files: tuple[FileEntry, ...] = ()
    image_side: int = 0
    state: DatasetState = "checking"
    manifest: str = ""
    digest: str = ""
    episodes: int = 0
    steps: int = 0
    fps: float = 0.0
    source_format: str = ""
    contract: Contract | None = None
    statistics: Statistics | None = None
    instructions: tuple[str, ...] = ()
    blobs: tuple[tuple[str, int], ...] = ()
    faults: tuple[Fault, ...] = ()
    gone: bool = False


class UsageRecord(Base, frozen=True, kw_only=True):
    """All that a tenant used for a job of a policy in a month (absolute, not a difference). Key: all of these.

    Attributes:
        tenant: empty for the service's own use; `policy` then says what for.
        job: empty for a tenant's own ops and requests.
        month: `2026-11`, in UTC; empty for what was used before months were told apart.
        stored_byte_s: bytes kept, integrated over time; only where policy and job are empty.
        until_s: up to this time.
    """

    tenant: str
    policy: str
    job: str = ""
    month: str = ""
    trainer_s: float = 0.0
    inference_s: float = 0.0
    samples: int = 0
    backbone_forwards: int = 0
    env_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    stored_byte_s: float = 0.0
    until_s: float = 0.0
    gone: bool = False


class LifeRecord(Base, frozen=True, kw_only=True):
    """How much of a worker's busy time since it started has been charged to somebody. Key: incarnation."""

    incarnation: str
    charged_s: float = 0.0
    gone: bool = False


class BlobRecord(Base, frozen=True, kw_only=True):
    """A tenant has uploaded this blob and may refer to it. Key: tenant, digest."""

    tenant: str
    digest: str
    nbytes: int = 0
    gone: bool = False


Record = (
    PolicyRecord
    | LeaseRecord
    | OpRecord
    | OpDone
    | OpsCovered
    | VersionRecord
    | CheckpointRecord
    | StateRecord
    | JobRecord
    | PageRecord
    | CurveRecord
    | DatasetRecord
    | UsageRecord
    | LifeRecord
    | BlobRecord
)

KEYS: dict[type[Base], tuple[str, ...]] = {
    PolicyRecord: ("tenant", "policy"),
    LeaseRecord: ("tenant", "policy"),
    VersionRecord: ("tenant", "policy", "version"),
    CheckpointRecord: ("tenant", "policy"),
    StateRecord: ("tenant", "policy", "state"),
    JobRecord: ("tenant", "job"),
    PageRecord: ("tenant", "job", "page"),
    CurveRecord: ("tenant", "job", "first"),
    DatasetRecord: ("tenant", "dataset"),
    UsageRecord: ("tenant", "policy", "job", "month"),
    LifeRecord: ("incarnation",),
    BlobRecord: ("tenant", "digest"),
    OpRecord: ("tenant", "policy", "seq"),
    OpDone: ("tenant", "policy", "seq"),
    OpsCovered: ("tenant", "policy"),
}
"""Key fields of every kind of record: a later record replaces an earlier one of the same kind and key."""


def key_of(record: Base) -> tuple[object, ...]:
    """Return what a record is about: two records of the same kind with equal keys, and the later one counts."""
    return (type(record), *(getattr(record, field) for field in KEYS[type(record)]))
