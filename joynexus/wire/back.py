"""What workers and the master say to each other (back domain).

A worker registers, then is given work up to its credit and answers each piece once. Work is named by `(task, attempt)`:
an answer counts only while that attempt is assigned to the worker's incarnation, so a worker that was declared dead can
change nothing any more.
"""

from __future__ import annotations

from typing import Literal

from joynexus.contract import Camera, Contract, Statistics
from joynexus.datasets import Fault
from joynexus.specs import Algorithm, CriticSpec, ExplorationSpec, OptimizerSpec, PolicySpec
from joynexus.wire.arrays import Array
from joynexus.wire.errors import Failure
from joynexus.wire.front import ActionError, DatasetSamples, EpisodeResult, Exploration, FileEntry, OpResult, Wire

Role = Literal["trainer", "inference", "env", "health"]


class Register(Wire, frozen=True, kw_only=True):
    """First message of a worker, and again after `NOT_REGISTERED`. Answer: `Registered`, or `FORBIDDEN`.

    Attributes:
        incarnation: random id of this process's life; a restarted process has another.
        credit: pieces of work it takes at once, by lane: trainer `{"train": n}`, inference `{"predict": n}`,
            env `{"simulator": n, "data": n}`.
        backbone, batch_key: digest and hard batch key of its backbone (trainer, inference).
        serves: simulator families (`metaworld`) and `datasets`, `sampler` (env).
        mounted: data sets found in the operator's folder (env).
        heads: action modules that it knows (trainer, inference).
        max_slots, slot_bytes: policies that a trainer holds in memory, and bytes that they may take; 0 means no limit.
        detail: for status: device, numerics verdict, software versions.
    """

    role: Role
    incarnation: str
    pid: int
    credit: dict[str, int]
    backbone: str = ""
    backbone_name: str = ""
    batch_key: str = ""
    serves: tuple[str, ...] = ()
    mounted: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    max_slots: int = 0
    slot_bytes: int = 0
    detail: dict[str, str] = {}


class Registered(Wire, frozen=True, kw_only=True):
    """Welcome.

    Attributes:
        worker: name given by the master, e.g. `trainer-1`.
        beat_ms: send a `Beat` this often.
        lost: tasks of this incarnation that were given to others meanwhile: drop them.
    """

    worker: str
    beat_ms: int
    lost: tuple[str, ...] = ()


class Beat(Wire, frozen=True, kw_only=True):
    """I live, and the work loop has advanced to `progress`. Answer: `BeatAck`.

    Attributes:
        phase: as in `RoleStatus`.
        busy_s: CPU time (or CUDA time) of the work loop since the process started.
    """

    progress: int
    phase: str
    busy_s: float
    detail: dict[str, str] = {}


class BeatAck(Wire, frozen=True, kw_only=True):
    """Heard. `cancelled` names tasks that nobody wants any more."""

    cancelled: tuple[str, ...] = ()


class Leaving(Wire, frozen=True, kw_only=True):
    """I finish what I have and go; give me nothing new. Answer: `BeatAck`."""


# ---------------------------------------------------------------------------------------------------- training


class OpenSlot(Wire, frozen=True, kw_only=True):
    """Bring a policy into memory: from its checkpoint, or fresh from its spec. Part of `TrainGroup`.

    Attributes:
        checkpoint: blob digest of the checkpoint; empty for a fresh slot.
        applied_seq: op up to which the checkpoint covers; 0 for a fresh slot (ops count from 1).
    """

    tenant: str
    policy: str
    spec: PolicySpec
    checkpoint: str = ""
    applied_seq: int = 0


class RlBegin(Wire, frozen=True, kw_only=True, tag="begin", tag_field="what"):
    """Make a policy ready for RL: give it what it draws with and a value head, and an optimizer that starts anew.

    Attributes:
        critic: value head; None for an algorithm without one.
        values: numbers that the value head gives for each chunk: 1, or the chunk's length at level `action`.
        optimizer: that the following `rl_epoch`s use.
    """

    exploration: ExplorationSpec
    critic: CriticSpec | None
    values: int
    optimizer: OptimizerSpec


class RlEpoch(Wire, frozen=True, kw_only=True, tag="epoch", tag_field="what"):
    """One pass over the experience of an update.

    Attributes:
        algorithm: with all its numbers.
        rollouts: blob digests of `joynexus.simulation.trajectories`, in order.
        update, epoch: both count from 0; with `seed` they decide the order of samples.
        reward_scale: factor on rewards.
        weight_limit: set in asynchronous jobs (else 0): the ratio is taken to the policy as it was when the update
            began, and samples weigh by how much that differs from the one that acted, at most this.
    """

    algorithm: Algorithm
    rollouts: tuple[str, ...]
    update: int
    epoch: int
    seed: int
    reward_scale: float = 1.0
    weight_limit: float = 0.0


TrainKind = Literal[
    "forward_backward",
    "optim_step",
    "train_step",
    "publish",
    "save_state",
    "load_state",
    "load_weights",
    "rl_begin",
    "rl_epoch",
    "checkpoint",
]


class TrainItem(Wire, frozen=True, kw_only=True):
    """One op for the trainer.

    Attributes:
        seq: the op's number; `checkpoint` is not an op and has the number of the last op before it.
        kind: `train_step` is `forward_backward` and `optim_step` in one, as jobs use it.
        samples: for inline data: the samples with array frames counted from `first_buffer`.
        payload: or the blob that holds them (see `ForwardBackward`); for `load_weights`, the safetensors blob.
        dataset: or steps of a prepared data set; `dataset.dataset` is the blob digest of its encoded manifest.
        feature_scope: whose features may be shared: `tenant:<id>`, or `shared:<data set>`.
        rl: for `rl_begin` and `rl_epoch`, what to do.
        version: for `publish`, the number to give it.
        state: for `load_state`, the blob digest of the state.
        replay: it was applied before by an earlier incarnation; the result is only compared.
        skip: the master answered it without a trainer (it was set aside as poison): count it, do nothing.
    """

    tenant: str
    policy: str
    seq: int
    kind: TrainKind
    samples: bytes = b""
    first_buffer: int = 0
    buffers: int = 0
    payload: str = ""
    dataset: DatasetSamples | None = None
    feature_scope: str = ""
    rl: RlBegin | RlEpoch | None = None
    version: int = 0
    state: str = ""
    replay: bool = False
    skip: bool = False


class TrainGroup(Wire, frozen=True, kw_only=True):
    """Work for a trainer: slots to open first, then items; items of one policy are in order of seq.

    Each item is answered by one `TrainDone` as soon as its part is done; the credit returns with the last.
    """

    task: str
    attempt: int
    slots: tuple[OpenSlot, ...] = ()
    items: tuple[TrainItem, ...] = ()
    close: tuple[tuple[str, str], ...] = ()
    """Policies (tenant, policy) to drop from memory; they were checkpointed."""


class TrainDone(Wire, frozen=True, kw_only=True):
    """One item is done.

    Attributes:
        result: as the tenant will see it.
        checkpoint: for `checkpoint` (and `save_state`): blob digest, put into the blob store before this was sent.
        nbytes: size of the blob in `checkpoint` or `result.digest`.
        step: optimizer steps of the policy so far.
        busy_s: the item's share of busy time (a shared forward divided by tokens).
        page_s: the part of it that opening the policy's slot took; in the first item behind that.
        samples, backbone_forwards: counts for metering.
        slot_bytes: memory that the policy takes in the trainer: parameters, gradients and moments.
        last: the group is done.
    """

    task: str
    attempt: int
    tenant: str
    policy: str
    seq: int
    kind: TrainKind
    result: OpResult
    checkpoint: str = ""
    nbytes: int = 0
    step: int = 0
    busy_s: float = 0.0
    page_s: float = 0.0
    samples: int = 0
    backbone_forwards: int = 0
    slot_bytes: int = 0
    last: bool = False


class SlotFailed(Wire, frozen=True, kw_only=True):
    """A slot could not be opened; its items are not done."""

    task: str
    attempt: int
    tenant: str
    policy: str
    error: Failure
    last: bool = False


# --------------------------------------------------------------------------------------------------- inference


class PredictItem(Wire, frozen=True, kw_only=True):
    """One request in a group.

    Attributes:
        request: names it within the task.
        version, digest: version that is to act, and its blob.
        act: the asker's `Act`, encoded; its array frames count from `first_buffer`.
        feature_scope: set for pictures of a data set: whose features may be shared (as in `TrainItem`), and that they
            are worth keeping. Empty for a robot's or simulator's: they are shared within the tenant, for a while.
    """

    request: str
    tenant: str
    policy: str
    version: int
    digest: str
    act: bytes
    first_buffer: int
    buffers: int
    feature_scope: str = ""


class PredictGroup(Wire, frozen=True, kw_only=True):
    """Work for an inference worker: one backbone forward over all rows of all items. Answer: `PredictDone`."""

    task: str
    attempt: int
    items: tuple[PredictItem, ...]


class Predicted(Wire, frozen=True, kw_only=True):
    """Answer to one item: actions [R, chunk, A] float32 (and `exploration` if that was asked for), or an error."""

    request: str
    version: int = 0
    actions: Array | None = None
    exploration: Exploration | None = None
    error: Failure | None = None
    rows: int = 0
    busy_s: float = 0.0
    backbone_forwards: int = 0


class PredictDone(Wire, frozen=True, kw_only=True):
    """All answers of a group; `actions.frame` counts the message's buffers."""

    task: str
    attempt: int
    items: tuple[Predicted, ...]


class WeightsOffer(Wire, frozen=True, kw_only=True):
    """A new version exists. The worker pulls the blob, checks it, and answers `WeightsApplied` or `WeightsRefused`."""

    tenant: str
    policy: str
    version: int
    digest: str
    nbytes: int


class WeightsApplied(Wire, frozen=True, kw_only=True):
    """The version is in memory and may act."""

    tenant: str
    policy: str
    version: int


class WeightsRefused(Wire, frozen=True, kw_only=True):
    """The version is unusable; the old one keeps serving."""

    tenant: str
    policy: str
    version: int
    error: Failure


# --------------------------------------------------------------------------------------------------------- env


class PrepareDataset(Wire, frozen=True, kw_only=True):
    """Read and check a data set once (lane `data`). Answer: `DatasetPrepared`.

    Attributes:
        files: files of a pushed set, as blobs; empty for a mounted set.
        mounted: name of the folder in the operator's directory; empty for a pushed set.
        image_side: resize pictures to this many pixels a side; 0 keeps them.
    """

    task: str
    attempt: int
    tenant: str
    dataset: str
    files: tuple[FileEntry, ...] = ()
    mounted: str = ""
    image_side: int = 0


class DatasetPrepared(Wire, frozen=True, kw_only=True):
    """What a data set is, or why it cannot be used.

    Attributes:
        manifest: blob digest of the encoded `DatasetManifest`; empty if it has errors.
        blobs: digests and sizes of the episode blobs, for accounting.
        error: why it could not be read now, through no fault of the set: it is tried again.
    """

    task: str
    attempt: int
    manifest: str = ""
    manifest_nbytes: int = 0
    blobs: tuple[tuple[str, int], ...] = ()
    faults: tuple[Fault, ...] = ()
    error: Failure | None = None
    busy_s: float = 0.0


class SampleIndices(Wire, frozen=True, kw_only=True):
    """Draw a page of training batches (lane `data`). Answer: `IndicesDrawn`.

    Attributes:
        manifest: blob digest of the encoded `DatasetManifest`.
        holdout_episodes: episodes at the end that are never drawn.
        seed, batch_size: of the job.
        first_step, steps: which page.
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


class IndicesDrawn(Wire, frozen=True, kw_only=True):
    """The page: for each step its indices."""

    task: str
    attempt: int
    batches: tuple[tuple[int, ...], ...] = ()
    error: Failure | None = None
    busy_s: float = 0.0


class DescribeSimulator(Wire, frozen=True, kw_only=True):
    """What is a simulator task like (lane `simulator`)? Answer: `SimulatorDescribed`.

    Attributes:
        cameras: pictures wanted; None takes the simulator's own choice.
        episode_limit: 0 takes the simulator's own.
        warmup_episodes: episodes to run with random actions, for statistics; 0 for none.
        seed: of the random actions, and of the first episode.
    """

    task: str
    attempt: int
    tenant: str
    env: str
    cameras: tuple[Camera, ...] | None = None
    episode_limit: int = 0
    warmup_episodes: int = 0
    seed: int = 0


class SimulatorDescribed(Wire, frozen=True, kw_only=True):
    """What a simulator task is like, or why it cannot be used.

    Attributes:
        statistics: of the states that random actions led to; of the actions their middle and half their range.
    """

    task: str
    attempt: int
    contract: Contract | None = None
    instruction: str = ""
    statistics: Statistics | None = None
    software: dict[str, str] = {}
    error: Failure | None = None
    busy_s: float = 0.0


class Collect(Wire, frozen=True, kw_only=True):
    """Episodes are to be trained on: explore, and keep what was seen and done. Part of `Rollout`.

    Attributes:
        reward: as in `RlSpec`; with `success` an episode ends when it is solved.
        value: also ask what the last observation of an episode is worth that did not end by itself.
    """

    reward: Literal["dense", "success"]
    value: bool


class Rollout(Wire, frozen=True, kw_only=True):
    """Run episodes of a simulator with a fixed version (lane `simulator`). Answer: `RolloutDone`.

    The worker asks for actions with `WorkerAct`, for all its live rows at once.

    Attributes:
        seeds: one an episode; they may repeat where `draws` differ.
        draws: one an episode: seeds of what the policy draws in it; empty takes the episodes' seeds.
        collect: set for episodes that are to be trained on.
    """

    task: str
    attempt: int
    tenant: str
    policy: str
    version: int
    contract: Contract
    chunk: int
    env: str
    seeds: tuple[int, ...]
    videos: tuple[int, ...] = ()
    """Seeds whose episodes are recorded."""
    episode_limit: int = 0
    execute: int = 0
    draws: tuple[int, ...] = ()
    collect: Collect | None = None


class RolloutDone(Wire, frozen=True, kw_only=True):
    """Episodes in the order of the seeds asked for, or why they could not be run.

    Attributes:
        trajectories: blob digest of what was collected (`joynexus.simulation.trajectories`).
        trajectories_nbytes: its size.
    """

    task: str
    attempt: int
    episodes: tuple[EpisodeResult, ...] = ()
    contract_digest: str = ""
    software: dict[str, str] = {}
    videos: tuple[tuple[str, int], ...] = ()
    trajectories: str = ""
    trajectories_nbytes: int = 0
    error: Failure | None = None
    busy_s: float = 0.0


class EvaluateActions(Wire, frozen=True, kw_only=True):
    """Compare a version's actions with recorded ones (lane `data`). Answer: `ActionsEvaluated`.

    The worker asks for actions with `WorkerAct`.
    """

    task: str
    attempt: int
    tenant: str
    policy: str
    version: int
    spec: PolicySpec
    manifest: str
    episodes: tuple[int, ...]


class ActionsEvaluated(Wire, frozen=True, kw_only=True):
    """The error, or why it could not be measured."""

    task: str
    attempt: int
    result: ActionError | None = None
    error: Failure | None = None
    busy_s: float = 0.0


class WorkerAct(Wire, frozen=True, kw_only=True):
    """A rollout asks for actions on behalf of its task's tenant. Answer: `Actions`.

    Attributes:
        task, attempt: the piece of work it acts for; gives the tenant, policy and version.
        act: encoded `Act`; its arrays are the message's buffers.
    """

    task: str
    attempt: int
    act: bytes
