"""The loss curve of a training job: points from outcomes of its steps, written down when a checkpoint covers them.

In: steps whose outcome is durable, in order; records of what was written before. Out: losses, counts, records. Never: a
point for a step that was given up with its job. A step that was vetoed or set aside is a hole: NaN.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from common.journal.records import CurveRecord
from joynexus.wire import ErrorCode
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


def is_outcome(op: Op) -> bool:
    """Tell whether the outcome of an op is known, and not that it was given up with its job."""
    error = op.done.result.error if op.done else None
    given_up = op.done is not None and op.done.skipped and error is not None and error.code is ErrorCode.CONFLICT
    return op.done is not None and not given_up


def _loss(op: Op) -> float:
    return op.done.result.metrics.get("loss", math.nan) if op.done else math.nan
