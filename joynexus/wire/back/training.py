"""Work for trainers."""

from __future__ import annotations

from typing import Literal

from joynexus.bounds import Short
from joynexus.specs import Algorithm, CriticSpec, ExplorationSpec, OptimizerSpec, PolicySpec
from joynexus.wire.base import Wire
from joynexus.wire.errors import Failure
from joynexus.wire.front import DatasetSamples, OpResult


class OpenSlot(Wire, frozen=True, kw_only=True):
    """Bring a policy into memory: from its checkpoint, or fresh from its spec. Part of `TrainGroup`.

    Attributes:
        checkpoint: blob digest of the checkpoint; empty for a fresh slot.
        applied_seq: op up to which the checkpoint covers; 0 for a fresh slot (ops count from 1).
        life: tells the policy from another one of its name that was deleted.
    """

    tenant: str
    policy: str
    spec: PolicySpec
    checkpoint: str = ""
    applied_seq: int = 0
    life: str = ""


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
        trace: request or job that it comes from; stands in every role's log.
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
    trace: str = ""


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
        overhead_s: the part of it that is this item's share of what the group took between its parts.
        samples, backbone_forwards: counts for metering.
        slot_bytes: memory that the policy takes in the trainer: parameters, gradients and moments.
        last: the group is done.
    """

    task: Short
    attempt: int
    tenant: Short
    policy: Short
    seq: int
    kind: TrainKind
    result: OpResult
    checkpoint: Short = ""
    nbytes: int = 0
    step: int = 0
    busy_s: float = 0.0
    page_s: float = 0.0
    overhead_s: float = 0.0
    samples: int = 0
    backbone_forwards: int = 0
    slot_bytes: int = 0
    last: bool = False


class SlotFailed(Wire, frozen=True, kw_only=True):
    """A slot could not be opened; its items are not done. `busy_s` is what trying took."""

    task: Short
    attempt: int
    tenant: Short
    policy: Short
    error: Failure
    busy_s: float = 0.0
    last: bool = False
