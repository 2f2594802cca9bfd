"""An SFT job: batches drawn ahead, one `train_step` op a step, checkpoints, publication.

In: a ready data set, pages of indices, outcomes of its ops. Out: ops under the policy's sequence, the loss curve.
Never: a batch that is not a function of the seed and the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from common.journal.records import CurveRecord, DatasetRecord, JobRecord, OpRecord, Record
from joynexus.contract import first_difference
from joynexus.specs import PolicySpec, SftPolicy, SftSpec
from joynexus.wire import ErrorCode, failure
from joynexus.wire.back import IndicesDrawn, SampleIndices
from joynexus.wire.front import JobInfo
from services.master.catalog import contract_of
from services.master.curve import LossCurve, is_outcome
from services.master.driving_job import DrivingJob, check_recipe, to_be_created
from services.master.intake import feature_scope
from services.master.job import Tools, mismatch
from services.master.ops import Op
from services.master.outbox import refuse
from services.master.plan import PlannedOp, TrainingPlan, compile_training
from services.master.policy import Policy
from services.master.tasks import SAMPLER, EnvAnswer, Task

_CURVE_POINTS = 50_000
"""Points of the curve in one answer; whoever wants more asks again with `since`."""


class TrainingJob(DrivingJob):
    """Supervised fine-tuning of one policy on one data set."""

    spec: SftSpec
    step_kind = "train_step"

    def __init__(self, record: JobRecord, tools: Tools) -> None:
        super().__init__(record, tools)
        if not isinstance(record.spec, SftSpec):
            raise TypeError(f"job {record.job} is no training job")
        self.spec = record.spec
        self._curve = LossCurve(record.tenant, record.job)
        self._pages: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._drawing: dict[int, Task] = {}

    # What happens to it

    def forget(self) -> list[Record]:
        """Give up its curve."""
        return [*super().forget(), *self._curve.forget()]

    def fold(self, ops: Sequence[Op]) -> Sequence[Record]:
        """Give the part of the curve that these are and that is not written down yet."""
        steps = [op for op in ops if op.record.kind == "train_step" and is_outcome(op)]
        record = self._curve.fold([op for op in steps if op.record.seq >= self._seq(self._curve.folded)])
        return [] if record is None else [record]

    def restore_curve(self, record: CurveRecord) -> None:
        """Take a part of the curve back; they come in order."""
        self._curve.restore(record)

    # What it does

    def _start(self) -> None:
        spec = self.spec
        found = self._dataset(spec.dataset)
        if found is None:
            return
        if spec.holdout_episodes >= found.episodes:
            raise refuse(
                ErrorCode.INVALID,
                f"holdout_episodes is {spec.holdout_episodes}, but data set '{spec.dataset}' has {found.episodes} "
                f"episodes: hold out at most {found.episodes - 1}",
            )
        policy = self.tools.policies.find(self.tenant, spec.policy)
        if self._comes_later(policy, spec.create):
            return
        if policy is None or to_be_created(policy, spec.create):
            self._create(make_spec(spec.create, found))
            return
        check_recipe(policy, spec.create)
        difference = first_difference(policy.spec.contract, contract_of(found))
        if difference is not None:
            raise mismatch(f"policy '{policy.name}' does not fit data set '{spec.dataset}': {difference}")
        self._take(
            policy,
            initial=spec.publish_initial and not policy.versions,
            manifest=found.manifest,
            feature_scope=feature_scope(self.tenant, found.tenant, found.dataset),
        )

    def _fill(self, policy: Policy, planned: PlannedOp, record: OpRecord) -> OpRecord | None:
        indices = self._batch(planned.step)
        if indices is None:
            return None
        return msgspec.structs.replace(
            record, manifest=self.record.manifest, feature_scope=self.record.feature_scope, indices=indices
        )

    # Batches

    def _batch(self, step: int) -> tuple[int, ...] | None:
        """Return a step's indices; None while they are drawn. Pages behind it are dropped, those ahead drawn."""
        plan = self._plan
        first, _ = plan.page(step)
        for old in [page for page in self._pages if page < first]:
            del self._pages[old]
        for ahead in range(self.tools.config.pages_ahead):
            page = first + ahead * plan.page_steps
            if page < plan.steps and page not in self._pages and page not in self._drawing:
                self._draw(plan, page)
        batches = self._pages.get(first)
        return None if batches is None else batches[step - first]

    def _draw(self, plan: TrainingPlan, page: int) -> None:
        first, steps = plan.page(page)

        def make(task: str, attempt: int) -> SampleIndices:
            return SampleIndices(
                task=task,
                attempt=attempt,
                tenant=self.tenant,
                manifest=self.record.manifest,
                holdout_episodes=self.spec.holdout_episodes,
                seed=self.spec.seed,
                batch_size=self.spec.batch_size,
                first_step=first,
                steps=steps,
                trace=self.id,
            )

        def done(answer: EnvAnswer) -> None:
            del self._drawing[first]
            if not isinstance(answer, IndicesDrawn) or len(answer.batches) != steps:
                self.fail(failure(ErrorCode.INTERNAL, f"the sampler did not draw {steps} batches: see its log"))
                return
            self._pages[first] = answer.batches
            self.advance()

        task = Task(
            tenant=self.tenant,
            policy=self.spec.policy,
            job=self.id,
            need=SAMPLER,
            answer=IndicesDrawn,
            make=make,
            done=done,
            failed=self.fail,
        )
        self._drawing[first] = task
        self.tools.env.submit(task)

    # Details

    @property
    def _plan(self) -> TrainingPlan:
        return compile_training(self.spec, initial=self.record.initial, page_steps=self.tools.config.page_steps)

    @property
    def _first_step(self) -> int:
        return self._seq(0)

    @property
    def _complete(self) -> bool:
        return len(self._curve) == self.spec.steps and bool(self.record.version or not self.spec.publish)

    @property
    def _checkpoint_every(self) -> int:
        return self.spec.checkpoint_every

    def _seq(self, step: int) -> int:
        """Return the seq of a `train_step`."""
        return self.record.first_seq + self.record.initial + step

    def _restored(self, policy: Policy) -> None:
        mounted = self.record.feature_scope != feature_scope(self.tenant, self.tenant, "")
        if not self.ended and not mounted:  # a mounted set stays anyway
            self._hold(self.tools.catalog.blobs(self.tenant, self.record.manifest))
        for version in self._versions_of(policy):  # their ops may be forgotten, and this not yet written down
            self._note_version(version)

    def _note(self, policy: Policy, op: Op) -> None:
        while (step := self._settled(policy, self._seq(len(self._curve)))) is not None:
            if step.record.kind != "train_step":
                break
            self._curve.add(step)
        if op.record.kind == "publish" and op.done is not None and op.done.result.error is None:
            self._note_version(op.record.version)

    def _note_version(self, version: int) -> None:
        """A version is published: the untrained policy, if the job begins with that, or what it was trained to."""
        initial = self.record.initial and self.record.initial_version in (0, version)
        field = "initial_version" if initial else "version"
        if getattr(self.record, field) != version:
            self.change(**{field: version})

    def _holes(self, policy: Policy) -> int:
        return self._curve.holes(self.record.resumed)

    def _release(self) -> None:
        self.tools.env.cancel(self._drawing.values())
        self._drawing.clear()
        self._pages.clear()
        super()._release()

    def _missing(self) -> str:
        policy = self.tools.policies.find(self.tenant, self.spec.policy)
        if policy is None or not self.record.first_seq:
            return ""
        if missing := self._missing_trainer(policy):
            return missing
        if self._drawing and policy.applied + 1 == policy.next_seq and not self.tools.env.serves(SAMPLER):
            return "an env worker that draws samples"
        return ""

    @property
    def newest(self) -> tuple[float, str]:
        """Its newest loss."""
        losses = self._curve.losses
        return (losses[-1], "loss") if losses and math.isfinite(losses[-1]) else (0.0, "")

    def _describe(self, basic: JobInfo, since: int, *, brief: bool) -> JobInfo:
        since = max(0, since)
        losses = () if brief else tuple(self._curve.losses[since : since + _CURVE_POINTS])
        return msgspec.structs.replace(
            basic,
            done=len(self._curve),
            total=self.spec.steps,
            losses=losses,
            samples=self._curve.samples,
            backbone_forwards=self._curve.forwards,
        )


def make_spec(create: SftPolicy, found: DatasetRecord) -> PolicySpec:
    """Return the policy that an SFT job makes for a ready data set."""
    fields = {field: getattr(create, field) for field in SftPolicy.__struct_fields__}
    statistics = None if create.normalization == "none" else found.statistics
    return PolicySpec(**fields, contract=contract_of(found), statistics=statistics)
