"""The curves of jobs that train: points from outcomes of ops, written down when a checkpoint covers them.

In: ops whose outcome is durable, in order; records of what was written before. Out: points, counts, records. Never: a
point for what was given up with its job. A step that was vetoed or set aside is a hole in a loss curve: NaN.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from common.journal.records import CurveRecord, OpDone
from joynexus.wire import ErrorCode
from joynexus.wire.front import UpdatePoint
from services.master.ops import Op


class LossCurve:
    """The curve of a job that is trained on a data set.

    Attributes:
        losses: one a step.
        samples, forwards: samples that were trained on, and backbone forwards that they took.
        folded: steps that records have.
    """

    def __init__(self, tenant: str, job: str) -> None:
        self._tenant = tenant
        self._job = job
        self._firsts: list[int] = []
        self.losses = array("d")
        self.samples = 0
        self.forwards = 0
        self.folded = 0

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.losses)

    def add(self, op: Op) -> None:
        """Continue with a step's outcome."""
        self.losses.append(_loss(op))
        self.samples += op.done.samples if op.done else 0
        self.forwards += op.done.backbone_forwards if op.done else 0

    def holes(self, since: int) -> int:
        """Return how many steps in a row, up to the last one and not before step `since`, have no loss."""
        count = 0
        while count < len(self.losses) - since and math.isnan(self.losses[-1 - count]):
            count += 1
        return count

    def fold(self, steps: Sequence[Op]) -> CurveRecord | None:
        """Give the part of the curve that these steps are, which follow what was folded; None if that is nothing."""
        outcomes = [op.done for op in steps if op.done is not None]
        if not outcomes:
            return None
        record = CurveRecord(
            tenant=self._tenant,
            job=self._job,
            first=self.folded,
            losses=array("d", [_loss(op) for op in steps]).tobytes(),
            samples=sum(done.samples for done in outcomes),
            backbone_forwards=sum(done.backbone_forwards for done in outcomes),
        )
        self._firsts.append(self.folded)
        self.folded += len(steps)
        return record

    def restore(self, record: CurveRecord) -> None:
        """Take a part of the curve back; they come in order."""
        self._firsts.append(record.first)
        self.losses.frombytes(record.losses)
        self.folded = len(self.losses)
        self.samples += record.samples
        self.forwards += record.backbone_forwards

    def forget(self) -> list[CurveRecord]:
        """Return the records by which what was folded goes from the journal."""
        return [CurveRecord(tenant=self._tenant, job=self._job, first=first, gone=True) for first in self._firsts]


class LearningCurve:
    """The curve of a job that is trained by reinforcement: a point for each update, which is several ops.

    Attributes:
        points: one an update.
        samples, forwards: samples that were trained on, and backbone forwards that they took.
        folded: points that records have.
    """

    def __init__(self, tenant: str, job: str) -> None:
        self._tenant = tenant
        self._job = job
        self._firsts: dict[int, None] = {}
        self._folded = (0, 0)  # samples and forwards that records have
        self._begun = (0, 0)  # those of them that the newest record has, if its update is not complete
        self.points: list[UpdatePoint] = []
        self.samples = 0
        self.forwards = 0
        self.folded = 0

    def __len__(self) -> int:
        """Number of updates."""
        return len(self.points)

    def count(self, done: OpDone) -> None:
        """One more op is done."""
        self.samples += done.samples
        self.forwards += done.backbone_forwards

    def fold(self, points: Sequence[UpdatePoint], outcomes: Sequence[OpDone]) -> CurveRecord | None:
        """Give what follows what was folded: points, and the ops that took something; None if that is nothing."""
        if not outcomes:
            return None
        samples = sum(done.samples for done in outcomes)
        return self._record(points, samples, sum(done.backbone_forwards for done in outcomes))

    def close(self) -> CurveRecord | None:
        """Nothing follows any more: give all that was not folded; None if that is nothing."""
        points = self.points[self.folded :]
        samples, forwards = self.samples - self._folded[0], self.forwards - self._folded[1]
        return self._record(points, samples, forwards) if points or samples or forwards else None

    def _record(self, points: Sequence[UpdatePoint], samples: int, forwards: int) -> CurveRecord:
        self._folded = (self._folded[0] + samples, self._folded[1] + forwards)
        all_samples, all_forwards = self._begun[0] + samples, self._begun[1] + forwards
        record = CurveRecord(
            tenant=self._tenant,
            job=self._job,
            first=self.folded,
            updates=tuple(points),
            samples=all_samples,
            backbone_forwards=all_forwards,
        )
        self._firsts[self.folded] = None
        self.folded += len(points)
        self._begun = (0, 0) if points else (all_samples, all_forwards)  # the next record then replaces this one
        return record

    def restore(self, record: CurveRecord) -> None:
        """Take a part of the curve back; they come in order."""
        self._firsts[record.first] = None
        self.points += record.updates
        self.folded = len(self.points)
        self.samples += record.samples
        self.forwards += record.backbone_forwards
        self._folded = (self.samples, self.forwards)
        self._begun = (0, 0) if record.updates else (record.samples, record.backbone_forwards)

    def forget(self) -> list[CurveRecord]:
        """Return the records by which what was folded goes from the journal."""
        return [CurveRecord(tenant=self._tenant, job=self._job, first=first, gone=True) for first in self._firsts]


def is_outcome(op: Op) -> bool:
    """Tell whether the outcome of an op is known, and not that it was given up with its job."""
    error = op.done.result.error if op.done else None
    given_up = op.done is not None and op.done.skipped and error is not None and error.code is ErrorCode.CONFLICT
    return op.done is not None and not given_up


def _loss(op: Op) -> float:
    return op.done.result.metrics.get("loss", math.nan) if op.done else math.nan
