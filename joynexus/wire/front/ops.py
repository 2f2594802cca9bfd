"""What a tenant's loop does to its policy, op by op."""

from __future__ import annotations

from joynexus.bounds import Few, Many, Short, Table, Text
from joynexus.wire.arrays import Array
from joynexus.wire.base import Wire
from joynexus.wire.errors import Failure


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
    images: Few[Array]
    instructions: Many[Text]


class DatasetSamples(Wire, frozen=True, kw_only=True):
    """Training samples by reference: steps of a prepared data set.

    Attributes:
        dataset: name of the tenant's data set (front) or digest of its manifest (back).
        indices: step indices, counted over all episodes in order.
    """

    dataset: Short
    indices: Many[int]


class ForwardBackward(Wire, frozen=True, kw_only=True):
    """Compute loss and gradients on samples, adding to the gradients that wait for the next `OptimStep`.

    Exactly one of `samples` (with buffers), `payload` and `dataset` is set. `payload` is the digest of a blob made
    by `frames.join([body, *buffers])` where body is an encoded `Samples`.
    Result metrics: `loss`, `samples`.
    """

    policy: Short
    lease: Short
    seq: int
    samples: Samples | None = None
    payload: Short = ""
    dataset: DatasetSamples | None = None


class OptimStep(Wire, frozen=True, kw_only=True):
    """Apply the gradients. Result metrics: `grad_norm`, `lr`, `step`."""

    policy: Short
    lease: Short
    seq: int


class Publish(Wire, frozen=True, kw_only=True):
    """Make the current weights an immutable version and serve it. Result: `version`."""

    policy: Short
    lease: Short
    seq: int


class SaveState(Wire, frozen=True, kw_only=True):
    """Keep module, optimizer and step under a name. Result: `digest`."""

    policy: Short
    lease: Short
    seq: int
    state: Short


class LoadState(Wire, frozen=True, kw_only=True):
    """Continue from a saved state of the same policy."""

    policy: Short
    lease: Short
    seq: int
    state: Short


class LoadWeights(Wire, frozen=True, kw_only=True):
    """Put the tenant's own weights into the action module, as if the policy had been created with them.

    `weights` is the digest of an uploaded safetensors blob: a version file, or plain tensors with the module's names.
    It is checked like a version: names, shapes, types, finite, and, if it says so, the backbone. The optimizer starts
    anew.
    """

    policy: Short
    lease: Short
    seq: int
    weights: Short


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

    policy: Short
    seq: int
    metrics: Table[float] = {}
    version: int = 0
    digest: Short = ""
    error: Failure | None = None
