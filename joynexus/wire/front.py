"""What tenants and the master say to each other (front domain, control socket).

Only typed structs live here. A tenant's identity is never a field: it is the authenticated key of the connection. Every
name is looked up under that tenant. Every request is answered by exactly one message whose header's `re` is the
request's id, either the answer named here or a `Failure`; an op is answered twice, `Accepted` when it is durable and
`OpResult` when it was applied. Asking again with the same id or the same op key is always safe.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from joynexus.contract import Contract
from joynexus.datasets import Fault
from joynexus.specs import JobSpec, PolicySpec
from joynexus.wire.arrays import Array
from joynexus.wire.errors import Failure


class Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages: map-encoded, unknown fields skipped, so that a newer side may add fields with defaults."""


# ---------------------------------------------------------------------------------------------------- session


class Hello(Wire, frozen=True, kw_only=True):
    """First message of a client. Answer: `Welcome`."""

    protocol_min: int
    protocol_max: int
    client: str


class Welcome(Wire, frozen=True, kw_only=True):
    """Who you are to this cluster, and its limits.

    Attributes:
        protocol: protocol version both sides use from here.
        tenant, scope: what the key stands for.
        inline_bytes: payloads above this go as blobs.
        max_inflight_ops: ops of one policy that may wait unanswered.
        operator: the key also sees other tenants' work in `Status`.
    """

    protocol: int
    server: str
    tenant: str
    scope: str
    inline_bytes: int
    max_inflight_ops: int
    operator: bool = False


class Ping(Wire, frozen=True, kw_only=True):
    """Are you there? Answer: `Pong`."""


class Pong(Wire, frozen=True, kw_only=True):
    """Yes."""


# --------------------------------------------------------------------------------------------------- policies


class CreatePolicy(Wire, frozen=True, kw_only=True):
    """Create a policy. The same spec again is answered alike; another spec under the name is a `CONFLICT`.

    Answer: `PolicyInfo`.
    """

    policy: str
    spec: PolicySpec


class GetPolicy(Wire, frozen=True, kw_only=True):
    """Describe a policy. Answer: `PolicyInfo`."""

    policy: str


class ListPolicies(Wire, frozen=True, kw_only=True):
    """Describe all policies of the tenant. Answer: `PolicyList`."""


class VersionInfo(Wire, frozen=True, kw_only=True):
    """One published version.

    Attributes:
        version: number, counted from 1 per policy.
        digest, nbytes: its safetensors blob.
        step: optimizer steps taken before it was published.
    """

    version: int
    digest: str
    nbytes: int
    step: int


class PolicyInfo(Wire, frozen=True, kw_only=True):
    """A policy as the master knows it.

    Attributes:
        next_seq: sequence number of the next op.
        step: optimizer steps applied.
        driver: `""`, `job:<id>` or `loop`: who holds the lease.
        home: the trainer that it lives on; empty while it has none.
        resident: it is in that trainer's memory, not paged out.
        contract_digest: digest of the contract in `spec`.
        states: names of saved states.
    """

    policy: str
    spec: PolicySpec
    next_seq: int
    step: int
    driver: str
    contract_digest: str
    versions: tuple[VersionInfo, ...] = ()
    states: tuple[str, ...] = ()
    home: str = ""
    resident: bool = False


class MovePolicy(Wire, frozen=True, kw_only=True):
    """Have a policy live on another trainer (operators only). It goes by checkpoint, between two optimizer steps.

    Answer: `PolicyInfo`, once its new home is that trainer; asking again is answered alike.

    Attributes:
        tenant: whose policy; empty for the asker's own.
        trainer: name as in `ClusterStatus`, e.g. `trainer-2`.
    """

    policy: str
    trainer: str
    tenant: str = ""


class PolicyList(Wire, frozen=True, kw_only=True):
    """All policies of the tenant."""

    policies: tuple[PolicyInfo, ...]


class AcquireLease(Wire, frozen=True, kw_only=True):
    """Become the driver of a policy, to send ops. Held while its ops keep coming (`ttl_ms` of silence ends it).

    A client that asks again with its own `holder` gets the same lease. Answer: `Lease`, or `CONFLICT`.
    """

    policy: str
    holder: str
    ttl_ms: int = 60_000


class Lease(Wire, frozen=True, kw_only=True):
    """You drive the policy; continue with `next_seq`."""

    policy: str
    lease: str
    next_seq: int


class ReleaseLease(Wire, frozen=True, kw_only=True):
    """Stop driving. Answer: `Done`."""

    policy: str
    lease: str


class Done(Wire, frozen=True, kw_only=True):
    """It is so."""


# -------------------------------------------------------------------------------------------------------- ops


class Samples(Wire, frozen=True, kw_only=True):
    """Training samples, as arrays over B samples, in raw units (the service normalises).

    Attributes:
        state: [B, S] float32.
        action: [B, chunk, A] float32.
        action_mask: [B, chunk] bool, False where the episode had ended.
        images: one [B, H, W, 3] uint8 array per camera, in the contract's order.
        instructions: B task texts.
    """

    state: Array
    action: Array
    action_mask: Array
    images: tuple[Array, ...]
    instructions: tuple[str, ...]


class DatasetSamples(Wire, frozen=True, kw_only=True):
    """Training samples by reference: steps of a prepared data set.

    Attributes:
        dataset: name of the tenant's data set (front) or digest of its manifest (back).
        indices: step indices, counted over all episodes in order.
    """

    dataset: str
    indices: tuple[int, ...]


class ForwardBackward(Wire, frozen=True, kw_only=True):
    """Compute loss and gradients on samples, adding to the gradients that wait for the next `OptimStep`.

    Exactly one of `samples` (with buffers), `payload` and `dataset` is set. `payload` is the digest of a blob made
    by `frames.join([body, *buffers])` where body is an encoded `Samples`.
    Result metrics: `loss`, `samples`.
    """

    policy: str
    lease: str
    seq: int
    samples: Samples | None = None
    payload: str = ""
    dataset: DatasetSamples | None = None


class OptimStep(Wire, frozen=True, kw_only=True):
    """Apply the gradients. Result metrics: `grad_norm`, `lr`, `step`."""

    policy: str
    lease: str
    seq: int


class Publish(Wire, frozen=True, kw_only=True):
    """Make the current weights an immutable version and serve it. Result: `version`."""

    policy: str
    lease: str
    seq: int


class SaveState(Wire, frozen=True, kw_only=True):
    """Keep module, optimizer and step under a name. Result: `digest`."""

    policy: str
    lease: str
    seq: int
    state: str


class LoadState(Wire, frozen=True, kw_only=True):
    """Continue from a saved state of the same policy."""

    policy: str
    lease: str
    seq: int
    state: str


class LoadWeights(Wire, frozen=True, kw_only=True):
    """Put the tenant's own weights into the action module, as if the policy had been created with them.

    `weights` is the digest of an uploaded safetensors blob: a version file, or plain tensors with the module's names.
    It is checked like a version: names, shapes, types, finite, and, if it says so, the backbone. The optimizer starts
    anew.
    """

    policy: str
    lease: str
    seq: int
    weights: str


class Accepted(Wire, frozen=True, kw_only=True):
    """The op is durable; its `OpResult` follows, also after restarts of anything."""

    policy: str
    seq: int


class OpResult(Wire, frozen=True, kw_only=True):
    """What an op did.

    Attributes:
        metrics: numbers, by name.
        version: for `Publish`, the version it made.
        digest: for `Publish` and `SaveState`, the blob.
        error: set if the op was refused or vetoed; then it changed nothing, and the sequence goes on.
    """

    policy: str
    seq: int
    metrics: dict[str, float] = {}
    version: int = 0
    digest: str = ""
    error: Failure | None = None


# ------------------------------------------------------------------------------------------------------- jobs


class SubmitJob(Wire, frozen=True, kw_only=True):
    """Start a job. `key` is chosen by the client: the same key again returns the same job.

    Answer: `JobInfo`.
    """

    key: str
    spec: JobSpec


class GetJob(Wire, frozen=True, kw_only=True):
    """How is a job? `since` cuts the curve: only points from that index on. Answer: `JobInfo`."""

    job: str
    since: int = 0


class CancelJob(Wire, frozen=True, kw_only=True):
    """Stop a job; what it published stays. Answer: `JobInfo`."""

    job: str


class ResumeJob(Wire, frozen=True, kw_only=True):
    """Have a parked job go on where it stopped. Answer: `JobInfo`; `CONFLICT` if it is not parked."""

    job: str


class ListJobs(Wire, frozen=True, kw_only=True):
    """All jobs of the tenant, newest first. Answer: `JobList`."""


JobState = Literal["waiting", "running", "publishing", "parked", "succeeded", "failed", "cancelled"]


class EpisodeResult(Wire, frozen=True, kw_only=True):
    """One evaluated episode.

    Attributes:
        seed: seed it was reset with.
        success: the simulator's own flag was raised.
        steps: steps taken.
        reward: sum of rewards.
        failure: empty, or why it did not succeed: `limit`, `terminated`.
        video: blob digest of its MP4, if one was asked for.
        env: its task, where there are several.
    """

    seed: int
    success: bool
    steps: int
    reward: float
    failure: str = ""
    video: str = ""
    env: str = ""


class TaskResult(Wire, frozen=True, kw_only=True):
    """What an evaluation found on one of its tasks; see `EvaluationResult`."""

    env: str
    successes: int
    episodes: int
    success: float
    low: float
    high: float
    mean_steps: float
    mean_reward: float
    failures: dict[str, int]
    contract_digest: str


class EvaluationResult(Wire, frozen=True, kw_only=True):
    """What an evaluation found.

    Attributes:
        version: version that acted.
        successes, episodes: counts.
        success, low, high: success rate with its 95 % Wilson interval.
        mean_steps, mean_reward: over all episodes.
        failures: count by reason.
        contract_digest: the environment's contract; the first task's if there are several.
        tasks: the same for each task.
        software: versions of simulator, renderer and packages that made these numbers.
        results: episodes by task, in seed order.
    """

    version: int
    successes: int
    episodes: int
    success: float
    low: float
    high: float
    mean_steps: float
    mean_reward: float
    failures: dict[str, int]
    contract_digest: str
    software: dict[str, str]
    results: tuple[EpisodeResult, ...]
    tasks: tuple[TaskResult, ...] = ()


class ActionError(Wire, frozen=True, kw_only=True):
    """Mean absolute action error on held-out steps, raw units, with two trivial policies beside it.

    Attributes:
        policy: error of the policy, mean over valid chunk steps and dimensions, each divided by that dimension's
            standard deviation in the training statistics (dimensions that never change are left out).
        mean_action: the same for always predicting the mean action.
        repeat_state: the same for predicting the current state as the action; NaN where state and action differ in
            length.
        per_dimension, per_step: the policy's error by action dimension and by step of the chunk.
        samples: steps evaluated.
    """

    version: int
    policy: float
    mean_action: float
    repeat_state: float
    per_dimension: tuple[float, ...]
    per_step: tuple[float, ...]
    samples: int


class UpdatePoint(Wire, frozen=True, kw_only=True):
    """One update of an RL job.

    Attributes:
        update: counts from 0.
        version: that it published.
        episodes, steps: episodes that it was trained on, and actions in them.
        success, reward, length: their rate of success, mean return (unscaled) and mean length.
        staleness: most updates between the version that acted in one of them and this one.
        metrics: of its last epoch: `policy_loss`, `value_loss`, `entropy`, `approx_kl`, `clip_fraction`, `grad_norm`, …
    """

    update: int
    version: int
    episodes: int
    steps: int
    success: float
    reward: float
    length: float
    staleness: int = 0
    metrics: dict[str, float] = {}


class StageInfo(Wire, frozen=True, kw_only=True):
    """One stage of a pipeline: its job once it has begun, and how that ended."""

    kind: str
    job: str = ""
    state: JobState = "waiting"


class JobInfo(Wire, frozen=True, kw_only=True):
    """State and progress of a job.

    Attributes:
        done, total: optimizer steps (sft), updates (rl), episodes (evaluate) or stages (pipeline).
        losses: the loss curve from index `since` on (sft).
        updates: the learning curve from index `since` on (rl).
        stages: the stages of a pipeline.
        initial_version, version: versions the job published; 0 if none.
        backbone_forwards, samples: samples that went through the backbone, and samples trained on.
        seconds: since the job was accepted until now or its end.
        message: one sentence on what it waits for, or why it failed.
    """

    job: str
    spec: JobSpec
    state: JobState
    done: int
    total: int
    losses: tuple[float, ...] = ()
    initial_version: int = 0
    version: int = 0
    backbone_forwards: int = 0
    samples: int = 0
    seconds: float = 0.0
    message: str = ""
    error: Failure | None = None
    evaluation: EvaluationResult | None = None
    action_error: ActionError | None = None
    updates: tuple[UpdatePoint, ...] = ()
    stages: tuple[StageInfo, ...] = ()


class JobList(Wire, frozen=True, kw_only=True):
    """Jobs without curves and results."""

    jobs: tuple[JobInfo, ...]


# -------------------------------------------------------------------------------------------------------- act


class Act(Wire, frozen=True, kw_only=True):
    """Ask a served policy for actions, for R rows at once. Safe to repeat. Answer: `Actions`.

    Attributes:
        version: 0 means the newest one in service.
        state: [R, S] float32, raw units.
        images: one [R, H, W, 3] uint8 array per camera, in the contract's order.
        instructions: R task texts.
        contract: digest of the asker's contract, checked against the policy's if set.
        seeds: one a row, for heads that draw (flow matching): the same seed draws the same noise whatever else is in
            the group; empty means 0 for each row. A rollout derives it from (episode seed, step).
        explore: draw the actions as the policy's RL job says, and tell what training needs to know of them. For
            rollouts; refused for a version that was not published by an RL job.
    """

    policy: str
    version: int = 0
    state: Array
    images: tuple[Array, ...]
    instructions: tuple[str, ...]
    contract: str = ""
    seeds: tuple[int, ...] = ()
    explore: bool = False


class Exploration(Wire, frozen=True, kw_only=True):
    """What training needs to know of actions that were drawn. V is 0 without a value head, else 1 or the chunk.

    Attributes:
        sample: [R, …] float32, what the head drew, from which it finds the log-probability again.
        log_prob: [R, chunk, A] float32, of each number drawn; how they are summed is the algorithm's choice.
        value: [R, V] float32.
        keys: R keys under which the features are stored.
    """

    sample: Array
    log_prob: Array
    value: Array
    keys: tuple[str, ...]


class Actions(Wire, frozen=True, kw_only=True):
    """Actions of one version.

    Attributes:
        version: which version acted.
        actions: [R, chunk, A] float32, raw units.
        exploration: set if `explore` was.
    """

    version: int
    actions: Array
    exploration: Exploration | None = None


# -------------------------------------------------------------------------------------------------- data sets


class FileEntry(Wire, frozen=True, kw_only=True):
    """One file of a pushed data set: its path inside the set, its blob."""

    path: str
    digest: str
    nbytes: int


class PushDataset(Wire, frozen=True, kw_only=True):
    """Make a data set of blobs that were uploaded. Repeating it is safe; another content makes the name point there.

    Answer: `DatasetInfo` at once, in state `checking`.
    """

    dataset: str
    files: tuple[FileEntry, ...]
    image_side: int = 0


class GetDataset(Wire, frozen=True, kw_only=True):
    """Describe a data set. Answer: `DatasetInfo`."""

    dataset: str


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


# ------------------------------------------------------------------------------------------- status and usage


class Status(Wire, frozen=True, kw_only=True):
    """How is the cluster? Answer: `ClusterStatus`."""


class RoleStatus(Wire, frozen=True, kw_only=True):
    """One worker process.

    Attributes:
        phase: `starting`, `loading`, `idle`, `working`, `draining`, `lost`.
        progress: counter of the work loop.
        busy_s, uptime_s: CPU time of the work loop (CUDA events on a GPU), and time since it registered.
        restarts: how often this role was restarted since the cluster came up.
        detail: backbone, device and numerics verdict, or simulators.
    """

    role: str
    worker: str
    phase: str
    progress: int
    busy_s: float
    uptime_s: float
    restarts: int = 0
    pid: int = 0
    detail: dict[str, str] = {}


class LaneStatus(Wire, frozen=True, kw_only=True):
    """One tenant's lane in one queue.

    Attributes:
        queue: `training`, `inference` or `env`.
        waiting, running: pieces of work that wait, and that are with a worker.
        weight, priority: as the operator set them.
        used_s: device seconds charged to it in this queue since the master started.
        oldest_s: how long its oldest piece has waited.
    """

    queue: str
    tenant: str
    waiting: int
    running: int
    weight: float = 1.0
    priority: int = 0
    used_s: float = 0.0
    oldest_s: float = 0.0


class ClusterStatus(Wire, frozen=True, kw_only=True):
    """Roles (all), and of queues, policies and jobs those that the key may see.

    Attributes:
        policies, policies_resident: registered, and of these in a trainer's memory.
    """

    server: str
    uptime_s: float
    roles: tuple[RoleStatus, ...]
    lanes: tuple[LaneStatus, ...]
    policies: int
    jobs_running: int
    versions_in_service: int
    policies_resident: int = 0


class GetUsage(Wire, frozen=True, kw_only=True):
    """What did I use (an operator: what did all tenants use)? Answer: `UsageReport`."""


class UsageLine(Wire, frozen=True, kw_only=True):
    """Metered use of one tenant's policy or job.

    Attributes:
        trainer_s, inference_s: the metered share of busy device time.
        samples: samples trained on or acted on.
        backbone_forwards: samples that went through the backbone.
        env_s: busy seconds of simulators and data preparation.
        bytes_in, bytes_out: payload moved for the tenant.
        bytes_stored: blobs kept.
    """

    tenant: str
    policy: str
    trainer_s: float = 0.0
    inference_s: float = 0.0
    samples: int = 0
    backbone_forwards: int = 0
    env_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_stored: int = 0


class UsageReport(Wire, frozen=True, kw_only=True):
    """Use by tenant and policy; the line with an empty policy holds what belongs to none of the tenant's."""

    lines: tuple[UsageLine, ...]


class GetVersion(Wire, frozen=True, kw_only=True):
    """Where is a version's blob? `version` 0 means the newest. Answer: `VersionInfo`."""

    policy: str
    version: int = 0


# ------------------------------------------------------------------------------------------------------ blobs


class BlobBegin(Wire, frozen=True, kw_only=True):
    """Start or resume an upload (bulk socket). Answer: `BlobOffset`: how much the service has already."""

    digest: str
    nbytes: int


class BlobChunk(Wire, frozen=True, kw_only=True):
    """One chunk in buffer 0. Answer: `BlobOffset`; at the end the digest is verified."""

    digest: str
    offset: int


class BlobOffset(Wire, frozen=True, kw_only=True):
    """The service has the first `offset` bytes; `complete` once the digest was verified."""

    digest: str
    offset: int
    complete: bool = False


class BlobRead(Wire, frozen=True, kw_only=True):
    """Read part of a blob (bulk socket). Answer: `BlobData` with the bytes in buffer 0."""

    digest: str
    offset: int
    length: int


class BlobData(Wire, frozen=True, kw_only=True):
    """Bytes of a blob in buffer 0; `nbytes` is the blob's full size."""

    digest: str
    offset: int
    nbytes: int
