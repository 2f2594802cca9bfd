"""The trainer's engine: groups of ops in, one answer an op out, each as soon as its own part is done.

In: a `TrainGroup` with its buffers. Out: `TrainDone` and `SlotFailed`. Never: sockets, or numbers of one policy that
depend on who else is in the group (`services.trainer.group` says how a group is done).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from joynexus.vla.backbones.base import Backbone
from joynexus.vla.busy import BusyClock
from joynexus.vla.modules import check_modules
from joynexus.vla.numerics import numerics_class
from joynexus.vla.shared_forward import SharedForward, Store
from joynexus.wire.arrays import Buffer
from joynexus.wire.back import OpenSlot, TrainGroup, TrainItem
from joynexus.wire.errors import ErrorCode
from services.trainer.blobs import Blobs, OpenBlob, PutBlob
from services.trainer.group import Answer, GroupRun
from services.trainer.ops import Batch, Ops, epoch_of
from services.trainer.rl.reader import ExperienceReader
from services.trainer.samples import SampleReader
from services.trainer.slots import Slot, SlotKey, open_slot, refused

GIB = 1024**3


class TrainerEngine:
    """Policies in memory, and the ops done on them.

    Args:
        backbone: shared and frozen.
        feature_store: keeps features between ops; None keeps nothing.
        open_blob: gives a blob's file.
        put_blob: takes a file into the blob store.
        scratch: folder for files on their way there.
        clock: measures busy time; None takes the backbone's device.
        max_rows: samples in one forward at most.
        max_slots: policies in memory at most; 0 means no limit.
        slot_bytes: a policy that takes more than this to train is refused when it is new or RL adds to it; 0 means no
            limit.
        update_bytes: an RL update whose features take more than this is refused; 0 means no limit.
        advance: called after each forward, and after each rollout and each minibatch of a long op.
    """

    def __init__(
        self,
        backbone: Backbone,
        feature_store: Store | None,
        open_blob: OpenBlob,
        put_blob: PutBlob,
        *,
        scratch: Path,
        clock: BusyClock | None = None,
        max_rows: int = 64,
        max_slots: int = 0,
        slot_bytes: int = 0,
        update_bytes: int = 0,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self._backbone = backbone
        self._slots: dict[SlotKey, Slot] = {}  # the one used longest ago first
        self._max_slots = max_slots
        self._slot_bytes = slot_bytes
        self._clock = clock or BusyClock(backbone.device)
        self._blobs = Blobs(open_blob, put_blob, scratch)
        self._forward = SharedForward(backbone, feature_store, self._clock, max_rows=max_rows, advance=advance)
        self._samples = SampleReader(self._blobs, self._forward.key)
        self._experience = ExperienceReader(self._blobs, self._forward, update_bytes=update_bytes, advance=advance)
        self._ops = Ops(self._blobs, numerics_class(backbone.device, backbone.dtype), slot_bytes, advance)

    @property
    def policies(self) -> tuple[SlotKey, ...]:
        """Tenant and policy of the slots in memory."""
        return tuple(self._slots)

    def run(self, group: TrainGroup, buffers: Sequence[Buffer] = ()) -> Iterator[Answer]:
        """Do a group, lazily (take all answers): a `TrainDone` an item, or a `SlotFailed` for all that a slot had left.

        The last answer of the group has `last` set.
        """
        for key in group.close:
            self._slots.pop(key, None)
        self._drop_forgotten(group)
        run = GroupRun(group, buffers, self._slots, self._open, self._read, self._forward, self._ops, self._clock)
        return run.answers()

    def _read(self, item: TrainItem, buffers: Sequence[Buffer], slot: Slot) -> Batch:
        """Gather what an op trains on; errors as `SampleReader.read` and `ExperienceReader.read`."""
        if item.kind == "rl_epoch":
            return self._experience.read(epoch_of(item), item.feature_scope, slot)
        return self._samples.read(item, buffers, slot.spec)

    def _drop_forgotten(self, group: TrainGroup) -> None:
        """Make room that nobody asked for: a master that was restarted knows of no slot that was opened before."""
        wanted = {(slot.tenant, slot.policy): None for slot in group.slots}
        wanted |= {(item.tenant, item.policy): None for item in group.items}
        for key in wanted:
            if key in self._slots:
                self._slots[key] = self._slots.pop(key)
        others = [key for key in self._slots if key not in wanted]
        surplus = len(others) + len(wanted) - self._max_slots
        if self._max_slots and surplus > 0:
            for key in others[:surplus]:
                del self._slots[key]

    def _open(self, opening: OpenSlot) -> None:
        """Bring a policy into memory, if it is not there as asked for; errors as `open_slot`, or Unreachable."""
        key = (opening.tenant, opening.policy)
        held = self._slots.get(key)
        if held is not None and held.covers(opening):
            return
        self._slots.pop(key, None)
        if not opening.checkpoint:
            self._check_size(opening)
        path = self._blobs.path(opening.checkpoint) if opening.checkpoint else None
        self._slots[key] = open_slot(opening, self._backbone, path)

    def _check_size(self, opening: OpenSlot) -> None:
        """Refuse a new policy that would not leave the others their memory."""
        try:
            nbytes = check_modules(opening.spec, self._backbone.hidden_size)
        except ValueError as error:
            raise refused(ErrorCode.INVALID, str(error)) from error
        if self._slot_bytes and nbytes > self._slot_bytes:
            raise refused(
                ErrorCode.INVALID,
                f"it takes {nbytes / GIB:.1f} GiB to train, and policies have {self._slot_bytes / GIB:.1f} GiB here: "
                "choose a smaller head_config, or ask the operator for more (slot_bytes)",
            )
