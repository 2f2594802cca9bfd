"""Work for inference workers, and the versions that they serve."""

from __future__ import annotations

from joynexus.bounds import Few, Short
from joynexus.wire.arrays import Array
from joynexus.wire.base import Wire
from joynexus.wire.errors import Failure
from joynexus.wire.front import Exploration


class PredictItem(Wire, frozen=True, kw_only=True):
    """One request in a group.

    Attributes:
        request: names it within the task.
        version, digest: version that is to act, and its blob.
        act: the asker's `Act`, encoded; its array frames count from `first_buffer`.
        feature_scope: set for pictures of a data set: whose features may be shared (as in `TrainItem`), and that they
            are worth keeping. Empty for a robot's or simulator's: they are shared within the tenant, for a while.
        trace: as in `TrainItem`.
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
    trace: str = ""


class PredictGroup(Wire, frozen=True, kw_only=True):
    """Work for an inference worker: one backbone forward over all rows of all items. Answer: `PredictDone`."""

    task: str
    attempt: int
    items: tuple[PredictItem, ...]


class Predicted(Wire, frozen=True, kw_only=True):
    """Answer to one item: actions [R, chunk, A] float32 (and `exploration` if that was asked for), or an error.

    Attributes:
        busy_s: the item's share of busy time (a shared forward divided by tokens).
        overhead_s: the part of it that is this item's share of what the group took between its parts.
    """

    request: Short
    version: int = 0
    actions: Array | None = None
    exploration: Exploration | None = None
    error: Failure | None = None
    rows: int = 0
    busy_s: float = 0.0
    overhead_s: float = 0.0
    backbone_forwards: int = 0


class PredictDone(Wire, frozen=True, kw_only=True):
    """All answers of a group; `actions.frame` counts the message's buffers."""

    task: Short
    attempt: int
    items: Few[Predicted]


class WeightsOffer(Wire, frozen=True, kw_only=True):
    """A new version exists. The worker pulls the blob, checks it, and answers `WeightsApplied` or `WeightsRefused`."""

    tenant: str
    policy: str
    version: int
    digest: str
    nbytes: int


class WeightsApplied(Wire, frozen=True, kw_only=True):
    """The version is in memory and may act. `busy_s` is what loading it took."""

    tenant: Short
    policy: Short
    version: int
    busy_s: float = 0.0


class WeightsRefused(Wire, frozen=True, kw_only=True):
    """The version is unusable; the old one keeps serving. `busy_s` is what trying took."""

    tenant: Short
    policy: Short
    version: int
    error: Failure
    busy_s: float = 0.0
