"""What each op does to a slot, once its samples and features are at hand.

In: a slot, an op, and for training ops their samples and features. Out: a `TrainDone` whose place (task, attempt) and
cost are filled in by others. Never: a change to the slot by an op that is answered with an error.
"""

from __future__ import annotations

from collections.abc import Callable

from common.failpoints import failpoint
from joynexus.vla.feature import VLAFeature
from joynexus.vla.version_file import write_version
from joynexus.wire.back import RlBegin, RlEpoch, TrainDone, TrainItem
from joynexus.wire.errors import ErrorCode, Failure
from joynexus.wire.front import OpResult
from services.trainer.blobs import Blobs
from services.trainer.rl.reader import Gathered, update_name
from services.trainer.samples import TrainBatch
from services.trainer.slots import Slot, refused

Batch = TrainBatch | Gathered
"""What an op trains on: samples, or experience."""

NEEDS_FEATURES = frozenset({"forward_backward", "train_step", "rl_epoch"})
"""Kinds of ops that train on a batch."""


class Ops:
    """Does single ops.

    Args:
        blobs: where versions and states go and come from.
        numerics_class: of this process; written into versions.
        slot_bytes: a policy that RL would make take more than this is refused; 0 means no limit.
        advance: called after each minibatch of a long op.
    """

    def __init__(self, blobs: Blobs, numerics_class: str, slot_bytes: int, advance: Callable[[], None]) -> None:
        self._blobs = blobs
        self._numerics_class = numerics_class
        self._slot_bytes = slot_bytes
        self._advance = advance
        self._kinds: dict[str, Callable[[Slot, TrainItem], TrainDone]] = {
            "optim_step": lambda slot, item: make_done(slot, item, slot.optim_step()),
            "publish": self._publish,
            "save_state": self._save,
            "checkpoint": self._save,
            "load_state": self._load,
            "load_weights": self._load_weights,
            "rl_begin": self._begin_rl,
        }

    def do(self, slot: Slot, item: TrainItem) -> TrainDone:
        """Do an op that needs no samples.

        Raises:
            JoyNexusError: the op is refused, vetoed, or cannot be done now; the slot is as it was.
            Unreachable: a state's blob cannot be had.
        """
        return self._kinds[item.kind](slot, item)

    def train(self, slot: Slot, item: TrainItem, batch: Batch, features: list[VLAFeature]) -> TrainDone:
        """Do an op that trains on a batch; errors as `do`."""
        if isinstance(batch, TrainBatch):
            work = slot.train_step if item.kind == "train_step" else slot.forward_backward
            failpoint("trainer.forward_backward")
            metrics = work(batch, features, item.seq)
        else:
            epoch = epoch_of(item)
            metrics = slot.rl_epoch(epoch, update_name(epoch), batch.experience, features, self._advance)
        return make_done(slot, item, metrics, samples=len(features))

    def _publish(self, slot: Slot, item: TrainItem) -> TrainDone:
        slot.check_finite()
        digest, nbytes = self._blobs.put(
            lambda path: write_version(path, slot.trained, item.version, numerics_class=self._numerics_class)
        )
        slot.published = item.version
        return make_done(slot, item, digest=digest, version=item.version, nbytes=nbytes)

    def _save(self, slot: Slot, item: TrainItem) -> TrainDone:
        # A state covers its own op: whoever resumes from it goes on with the next one.
        digest, nbytes = self._blobs.put(lambda path: slot.save(path, item.seq))
        return make_done(slot, item, digest=digest, checkpoint=digest, nbytes=nbytes)

    def _load(self, slot: Slot, item: TrainItem) -> TrainDone:
        path = self._blobs.path(item.state)
        try:
            slot.load(path, item.state)
        except ValueError as error:
            raise refused(ErrorCode.INVALID, str(error)) from error
        return make_done(slot, item)

    def _load_weights(self, slot: Slot, item: TrainItem) -> TrainDone:
        slot.load_weights(self._blobs.path(item.payload))
        return make_done(slot, item)

    def _begin_rl(self, slot: Slot, item: TrainItem) -> TrainDone:
        if not isinstance(item.rl, RlBegin):
            raise refused(ErrorCode.INVALID, "rl_begin says nothing of what to begin with")
        slot.begin_rl(item.rl, self._slot_bytes)
        return make_done(slot, item)


def epoch_of(item: TrainItem) -> RlEpoch:
    """Return what an `rl_epoch` is to do.

    Raises:
        JoyNexusError: `INVALID` if it does not say.
    """
    if not isinstance(item.rl, RlEpoch):
        raise refused(ErrorCode.INVALID, "rl_epoch says nothing of what to train on")
    return item.rl


def make_done(
    slot: Slot,
    item: TrainItem,
    metrics: dict[str, float] | None = None,
    *,
    digest: str = "",
    version: int = 0,
    checkpoint: str = "",
    nbytes: int = 0,
    samples: int = 0,
    error: Failure | None = None,
) -> TrainDone:
    """Make an op's answer."""
    result = OpResult(
        policy=item.policy, seq=item.seq, metrics=metrics or {}, version=version, digest=digest, error=error
    )
    return TrainDone(
        task="",
        attempt=0,
        tenant=item.tenant,
        policy=item.policy,
        seq=item.seq,
        kind=item.kind,
        result=result,
        checkpoint=checkpoint,
        nbytes=nbytes,
        step=slot.step,
        samples=samples,
        slot_bytes=slot.nbytes,
    )
