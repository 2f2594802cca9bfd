"""How a group is done: what policies share is the backbone forward, everything else each does alone.

In: a `TrainGroup`. Out: its answers, in the order in which they are ready. Never: an op of a policy before the one that
comes before it. In each round the next op of every policy that needs features takes part in one forward over what is
not stored; then each policy does its private part, padded to its own samples. Of passes over experience there is one a
round: the features of an update are many, and those of several are not in memory at once.

Two kinds of trouble are kept apart. An op that is at fault (bad data, a non-finite loss) is answered with an error,
counts as applied and changed nothing. Where the service is at fault (a blob cannot be had, an unexpected exception) the
op was not done: the slot is dropped and `SlotFailed` says so; it is opened again from its checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
import torch

from common.telemetry import get_logger
from joynexus.vla.busy import BusyClock
from joynexus.vla.shared_forward import ForwardFailed, Need, SharedForward
from joynexus.wire.arrays import Buffer
from joynexus.wire.back import OpenSlot, SlotFailed, TrainDone, TrainGroup, TrainItem
from joynexus.wire.errors import ErrorCode, JoyNexusError, failure
from services.trainer.blobs import Unreachable
from services.trainer.ops import NEEDS_FEATURES, Batch, Ops, make_done
from services.trainer.slots import OutOfOrder, Slot, SlotKey

Answer = TrainDone | SlotFailed
_Outcome = TypeVar("_Outcome")

log = get_logger(__name__)


@dataclass
class _Ready:
    """A training op whose batch was read and whose features were looked up.

    Attributes:
        busy_s: what that took.
        overhead_s: its share of what the round took between its parts.
    """

    item: TrainItem
    batch: Batch
    need: Need
    busy_s: float = 0.0
    overhead_s: float = 0.0


@dataclass
class _Stored:
    """An op that was applied before, with the answer that it got then."""

    done: TrainDone


class GroupRun:
    """One group on its way: a lane of items for each policy, until all are empty."""

    def __init__(
        self,
        group: TrainGroup,
        buffers: Sequence[Buffer],
        slots: dict[SlotKey, Slot],
        open_slot: Callable[[OpenSlot], None],
        read: Callable[[TrainItem, Sequence[Buffer], Slot], Batch],
        forward: SharedForward,
        ops: Ops,
        clock: BusyClock,
    ) -> None:
        self._group = group
        self._buffers = buffers
        self._slots = slots
        self._open_slot = open_slot
        self._read = read
        self._forward = forward
        self._ops = ops
        self._clock = clock
        self._overhead = clock.overhead()
        self._lanes: dict[SlotKey, deque[TrainItem]] = {}
        self._paged_s: dict[SlotKey, float] = {}  # what opening took, until an item is charged with it
        for item in group.items:
            self._lanes.setdefault(_key(item), deque()).append(item)

    def answers(self) -> Iterator[Answer]:
        """Do the group; see `TrainerEngine.run`."""
        self._overhead = self._clock.overhead()  # on the thread that does the group, as of now
        failed = deque(self._open_slots())
        while failed:
            answer = failed.popleft()
            yield msgspec.structs.replace(answer, last=not failed and not self._lanes)
        while self._lanes:
            for done in self._round():
                yield msgspec.structs.replace(done, last=not self._lanes)

    def _open_slots(self) -> Iterator[SlotFailed]:
        for opening in self._group.slots:
            key = (opening.tenant, opening.policy)
            elapsed = self._clock.start()
            try:
                self._open_slot(opening)
                self._paged_s[key] = self._part(elapsed())
            except Unreachable as error:
                yield self._fail(key, error.code, f"policy '{key[1]}' cannot be opened now: {error}", elapsed())
            except JoyNexusError as error:
                yield self._fail(key, error.code, f"policy '{key[1]}' cannot be opened: {error}", elapsed())
            except torch.AcceleratorError:
                raise  # as in _guarded
            except Exception:  # as in _guarded
                log.exception("policy_not_opened", tenant=key[0], policy=key[1])
                sentence = f"policy '{key[1]}' cannot be opened; the trainer's log has the reason"
                yield self._fail(key, ErrorCode.INTERNAL, sentence, elapsed())
        for key in [key for key in self._lanes if key not in self._slots]:
            yield self._fail(key, ErrorCode.UNAVAILABLE, f"policy '{key[1]}' is not in this trainer's memory: open it")

    def _round(self) -> Iterator[Answer]:
        """Bring every policy to its next op that needs features, forward for all of them, then train each."""
        ready: list[_Ready] = []
        for key in list(self._lanes):
            yield from self._advance(key, ready)
        forwarded_s = self._forward.own_s
        self._forward.complete([op.need for op in ready])
        self._overhead.part(self._forward.own_s - forwarded_s)
        self._share_overhead(ready)
        # Short private parts first: a pass over an update's experience takes seconds, a step milliseconds.
        for op in sorted(ready, key=lambda op: len(op.batch.keys)):
            yield self._finish(op)

    def _advance(self, key: SlotKey, ready: list[_Ready]) -> Iterator[Answer]:
        """Do a policy's ops up to the next that needs features, and make that one ready if this round has room."""
        while key in self._lanes:
            item = self._lanes[key][0]
            if item.kind == "rl_epoch" and any(op.item.kind == "rl_epoch" for op in ready):
                return  # its turn comes in the next round
            elapsed = self._clock.start()
            outcome = self._guarded(item, partial(self._start, item))
            if isinstance(outcome, _Ready):
                outcome.busy_s = self._part(elapsed())
                ready.append(outcome)
                return
            if isinstance(outcome, _Stored):
                # A replay's first answer was charged when it was given; of another one nobody knows.
                known = {"busy_s": 0.0, "page_s": 0.0, "overhead_s": 0.0} if item.replay else {}
                yield self._answer(item, msgspec.structs.replace(outcome.done, **known))
            else:
                yield self._settle(item, outcome, self._part(elapsed()), self._overhead.take())

    def _start(self, item: TrainItem) -> TrainDone | _Stored | _Ready:
        slot = self._slots[_key(item)]
        stored = slot.recall(item)
        if stored is not None:
            return _Stored(stored)
        slot.check_order(item)
        if item.skip:
            return make_done(slot, item)
        if item.kind not in NEEDS_FEATURES:
            return self._ops.do(slot, item)
        batch = self._read(item, self._buffers, slot)
        return _Ready(item, batch, self._forward.look_up(batch.keys, batch.observe, slot.trained.layers))

    def _finish(self, op: _Ready) -> Answer:
        """Do the private part of a training op."""
        before_s = op.busy_s + op.need.busy_s
        elapsed = self._clock.start()
        outcome = self._guarded(op.item, partial(self._train, op))
        if isinstance(outcome, TrainDone):
            outcome = msgspec.structs.replace(outcome, backbone_forwards=op.need.forwards)
        busy_s = before_s + self._part(elapsed())
        return self._settle(op.item, outcome, busy_s, op.overhead_s + self._overhead.take())

    def _train(self, op: _Ready) -> TrainDone:
        return self._ops.train(self._slots[_key(op.item)], op.item, op.batch, op.need.features())

    def _part(self, seconds: float) -> float:
        """A part of the group has taken so long, on its own."""
        self._overhead.part(seconds)
        return seconds

    def _share_overhead(self, ready: Sequence[_Ready]) -> None:
        """Divide what the round took between its parts, by what those who shared it took of the parts."""
        total_s = sum(op.busy_s + op.need.busy_s for op in ready)
        if total_s > 0:
            rest_s = self._overhead.take()
            for op in ready:
                op.overhead_s = rest_s * (op.busy_s + op.need.busy_s) / total_s

    # What may become of an op

    def _guarded(self, item: TrainItem, work: Callable[[], _Outcome]) -> _Outcome | TrainDone | SlotFailed:
        key = _key(item)
        try:
            return work()
        except JoyNexusError as error:
            return make_done(self._slots[key], item, error=error.failure)
        except Unreachable as error:  # no answer to the op: done again, it may find what is missing now
            return self._fail(key, error.code, f"op {item.seq} of policy '{key[1]}' cannot be done: {error}")
        except (OutOfOrder, ForwardFailed) as error:
            return self._fail(key, ErrorCode.UNAVAILABLE, str(error))
        except torch.AcceleratorError:
            raise  # the device is lost to this process, which must start anew
        except Exception:  # a fault of ours in one tenant's private part must not take the other tenants down
            log.exception("op_failed", tenant=key[0], policy=key[1], seq=item.seq, kind=item.kind)
            sentence = f"op {item.seq} of policy '{key[1]}' failed inside the service; the trainer's log has the reason"
            return self._fail(key, ErrorCode.INTERNAL, sentence)

    def _settle(self, item: TrainItem, outcome: Answer, busy_s: float, overhead_s: float) -> Answer:
        """Count an op that was answered as applied."""
        page_s = self._paged_s.pop(_key(item), 0.0)
        total_s = busy_s + overhead_s + page_s
        if isinstance(outcome, SlotFailed):
            return msgspec.structs.replace(outcome, busy_s=total_s)
        outcome = msgspec.structs.replace(outcome, busy_s=total_s, overhead_s=overhead_s, page_s=page_s)
        self._slots[_key(item)].remember(item, outcome)
        return self._answer(item, outcome)

    def _answer(self, item: TrainItem, done: TrainDone) -> TrainDone:
        """Take an op from its lane and address its answer."""
        key = _key(item)
        self._lanes[key].popleft()
        if not self._lanes[key]:
            del self._lanes[key]
        return msgspec.structs.replace(done, task=self._group.task, attempt=self._group.attempt)

    def _fail(self, key: SlotKey, code: ErrorCode, sentence: str, busy_s: float = 0.0) -> SlotFailed:
        self._slots.pop(key, None)
        self._lanes.pop(key, None)
        group = self._group
        return SlotFailed(
            task=group.task,
            attempt=group.attempt,
            tenant=key[0],
            policy=key[1],
            error=failure(code, sentence),
            busy_s=self._part(busy_s),
        )


def _key(item: TrainItem) -> SlotKey:
    return item.tenant, item.policy
