"""An SFT job: batches drawn ahead, one `train_step` op a step, checkpoints, publication.

In: a ready data set, pages of indices, outcomes of its ops. Out: ops under the policy's sequence, the loss curve.
Never: a position of its own: op number `i` of the plan has seq `first_seq + i`, so the policy's `next_seq` says how far
it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from common.journal.records import CurveRecord, DatasetRecord, JobRecord, OpRecord, Record
from joynexus.contract import first_difference
from joynexus.specs import PolicySpec, SftPolicy, SftSpec
from joynexus.wire import ErrorCode, Failure, failure
from joynexus.wire.back import IndicesDrawn, SampleIndices
from joynexus.wire.front import JobInfo
from services.master.catalog import contract_of
from services.master.checks import recipe_difference
from services.master.curve import Curve, is_point
from services.master.intake import feature_scope
from services.master.job import Job, Tools, mismatch, policy_key
from services.master.metering import NO_POLICY
from services.master.ops import Op, OpState
from services.master.outbox import refuse
from services.master.plan import TrainingPlan, compile_training
from services.master.policies import Policy
from services.master.tasks import SAMPLER, EnvAnswer, Task

_LEAVES_A_HOLE = frozenset({ErrorCode.NON_FINITE, ErrorCode.POISON, ErrorCode.CONFLICT})
"""A step that was vetoed, set aside or given up changes nothing, and is a hole in the curve."""
_CURVE_POINTS = 50_000
"""Points of the curve in one answer; whoever wants more asks again with `since`."""


class TrainingJob(Job):
    """Supervised fine-tuning of one policy on one data set."""

    spec: SftSpec

    def __init__(self, record: JobRecord, tools: Tools) -> None:
        super().__init__(record, tools)
        if not isinstance(record.spec, SftSpec):
            raise TypeError(f"job {record.job} is no training job")
        self.spec = record.spec
        self._curve = Curve(record.tenant, record.job)
        self._vetoes = 0  # steps in a row, up to the last whose outcome is known
        self._busy = False  # something is on its way to the journal that it has to wait for
        self._pages: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._drawing: dict[int, Task] = {}

    # What happens to it

    def op_arrived(self, policy: Policy, op: Op) -> None:
        """The outcome of one of its ops is known: park the job before any of those behind it counts, if need be."""
        error = op.done.result.error if op.done else None
        if self.ended or self.parked or op.record.kind != "train_step":
            return
        vetoed = error is not None and error.code is ErrorCode.NON_FINITE
        self._vetoes = self._vetoes + 1 if vetoed else 0
        if error is not None and (self._vetoes >= self.tools.config.vetoes or error.code is ErrorCode.POISON):
            self._park(policy, error)

    def op_finished(self, policy: Policy, op: Op) -> None:
        """One of its ops is done, and that is durable."""
        self._note(policy, op)
        error = op.done.result.error if op.done else None
        if error is not None and not (op.record.kind == "train_step" and error.code in _LEAVES_A_HOLE):
            self.fail(error)
        self.advance()

    def resume(self) -> None:
        """Go on where it was parked, as if no step had been vetoed."""
        if not self.parked:
            super().resume()
        policy = self.tools.policies.get(self.tenant, self.spec.policy)
        self._vetoes = 0
        self.change(state="running", error=None, resumed=policy.applied + 1 - self._seq(0))
        self.tools.outbox.log("info", "job_resumed", tenant=self.tenant, job=self.id)
        self.tools.training.release(policy)
        self.advance()

    def forget(self) -> list[Record]:
        """Give up its curve."""
        return [*super().forget(), *self._curve.forget()]

    def fold(self, ops: Sequence[Op]) -> CurveRecord | None:
        """A checkpoint is about to cover these of its ops: give the part of the curve that is not written down yet."""
        return self._curve.fold([op for op in ops if is_point(op) and op.record.seq >= self._seq(self._curve.folded)])

    def restore_curve(self, record: CurveRecord) -> None:
        """Take a part of the curve back; they come in order."""
        self._curve.restore(record)

    def restore_ops(self) -> None:
        """Take back what the ops above the checkpoint say; the policy is restored."""
        policy = self.tools.policies.find(self.tenant, self.spec.policy)
        if policy is None or not self.record.first_seq:
            return
        if not self.ended:
            self._drive(policy)
            self._hold_data()
        end = self.record.first_seq + self._plan().total
        for seq in range(max(self.record.first_seq, policy.forgotten + 1), min(end, policy.next_seq)):
            op = policy.ops[seq]
            if op.record.job == self.id:
                self._note(policy, op)
        if self.ended:
            self._give_up(policy)
            return
        self._vetoes = self._curve.holes(self.record.resumed)
        if self.parked:
            self.tools.training.hold(policy)
        elif self._vetoes >= self.tools.config.vetoes:  # it was about to be parked when the master went down
            self._park(policy, failure(ErrorCode.NON_FINITE, "the loss or a gradient was not finite"))

    # What it does

    def _step(self) -> None:
        if self._busy:
            return
        if not self.record.first_seq:
            self._start()
            return
        policy = self.tools.policies.get(self.tenant, self.spec.policy)
        plan = self._plan()
        self._issue(policy, plan)
        last = self.record.first_seq + plan.total - 1
        if policy.next_seq <= last or policy.applied < last:
            return
        if policy.covered < last:
            self.tools.training.want_checkpoint(policy)
        elif len(self._curve) == plan.steps and (self.record.version or not plan.final):
            self._conclude(policy)

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
        if policy is None or (policy.never_opened and recipe_difference(policy.spec, spec.create) is not None):
            self._create(found)
            return
        check_recipe(policy, spec)
        difference = first_difference(policy.spec.contract, contract_of(found))
        if difference is not None:
            raise mismatch(f"policy '{policy.name}' does not fit data set '{spec.dataset}': {difference}")
        if policy.driver:
            driver = f"job '{policy.job}'" if policy.job else "the loop"
            self.waiting_for = f"{driver}, which drives policy '{policy.name}'"
            self.tools.wait(self, policy_key(policy))
            return
        self._begin(policy, found)

    def _create(self, found: DatasetRecord) -> None:
        create = self.spec.create
        fields = {field: getattr(create, field) for field in SftPolicy.__struct_fields__}
        statistics = None if create.normalization == "none" else found.statistics
        spec = PolicySpec(**fields, contract=contract_of(found), statistics=statistics)
        self._busy = True

        def then(outcome: Policy | str) -> None:
            self._busy = False
            self._go_on(failed=not isinstance(outcome, Policy))

        try:
            self.tools.policies.create(self.tenant, self.spec.policy, spec, then)
        except BaseException:
            self._busy = False
            raise

    def _begin(self, policy: Policy, found: DatasetRecord) -> None:
        """Take the lease and fix where the job's ops begin, durably, before the first of them."""
        record = msgspec.structs.replace(
            self.record,
            state="running",
            first_seq=policy.next_seq,
            initial=self.spec.publish_initial and not policy.versions,
            manifest=found.manifest,
            feature_scope=feature_scope(self.tenant, found.tenant, found.dataset),
        )
        self._drive(policy)
        self._busy = True

        def saved() -> None:
            self._busy = False
            if not self.ended:
                self.record = record
                self.waiting_for = ""
                self._hold_data()
                self.advance()

        def lost(reason: str) -> None:
            self._busy = False
            self._let_go(policy)
            self._go_on(failed=True)

        self.tools.outbox.save([record], saved, lost)

    def _issue(self, policy: Policy, plan: TrainingPlan) -> None:
        """Have as many of the next ops accepted as may wait and as there are batches for."""
        records: list[OpRecord] = []
        publishes = 0
        while True:
            seq = policy.next_seq + len(records)
            index = seq - self.record.first_seq
            if index >= plan.total or seq - 1 - policy.applied >= self.tools.config.job_ops:
                break
            planned = plan.op(index)
            record = OpRecord(tenant=self.tenant, policy=policy.name, seq=seq, kind=planned.kind, job=self.id)
            if planned.kind == "publish":
                record = msgspec.structs.replace(record, version=policy.next_version + publishes)
                publishes += 1
            else:
                indices = self._batch(plan, planned.step)
                if indices is None:
                    break
                record = msgspec.structs.replace(
                    record,
                    manifest=self.record.manifest,
                    feature_scope=self.record.feature_scope,
                    indices=indices,
                )
            records.append(record)
        if records:
            self.tools.intake.accept_of_job(policy, records, lambda: self._go_on(failed=True))

    def _park(self, policy: Policy, error: Failure) -> None:
        """Stop with the lease kept, until the tenant has looked; ops that were accepted already are held back."""
        self.tools.training.hold(policy)
        why = f"{self._vetoes} steps in a row were vetoed" if self._vetoes else "a step was set aside"
        sentence = f"{error.message} ({why}, so the job is parked: resume it to go on behind them, or cancel it)"
        self.change(state="parked", error=failure(error.code, sentence))
        self.tools.outbox.log("warning", "job_parked", tenant=self.tenant, job=self.id, reason=error.message)

    def _conclude(self, policy: Policy) -> None:
        """Everything is trained and covered: see the version into service."""
        number = self.record.version
        if not number:
            self.succeed()
            return
        version = policy.versions[number]
        if version.refused:
            self.fail(failure(ErrorCode.INTERNAL, f"version {number} was refused by inference: {version.refused}"))
        elif self.tools.serving.pending(policy, number):
            if self.record.state != "publishing":
                self.change(state="publishing")
        else:
            self.succeed()

    # Batches

    def _batch(self, plan: TrainingPlan, step: int) -> tuple[int, ...] | None:
        """Return a step's indices; None while they are drawn. Pages behind it are dropped, those ahead drawn."""
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
            )

        def done(answer: EnvAnswer) -> None:
            del self._drawing[first]
            self.tools.meter.add(self.tenant, NO_POLICY, {"env_s": answer.busy_s})
            if not isinstance(answer, IndicesDrawn) or len(answer.batches) != steps:
                self.fail(failure(ErrorCode.INTERNAL, f"the sampler did not draw {steps} batches: see its log"))
                return
            self._pages[first] = answer.batches
            self.advance()

        task = Task(
            tenant=self.tenant,
            policy=self.spec.policy,
            need=SAMPLER,
            answer=IndicesDrawn,
            make=make,
            done=done,
            failed=self.fail,
        )
        self._drawing[first] = task
        self.tools.env.submit(task)

    # Details

    def _plan(self) -> TrainingPlan:
        return compile_training(self.spec, initial=self.record.initial, page_steps=self.tools.config.page_steps)

    def _seq(self, step: int) -> int:
        """Return the seq of a `train_step`."""
        return self.record.first_seq + self.record.initial + step

    def _note(self, policy: Policy, op: Op) -> None:
        """An outcome is durable: continue the curve with it and what follows, note a version."""
        while (step := policy.ops.get(self._seq(len(self._curve)))) is not None and step.record.kind == "train_step":
            if step.state is OpState.APPLIED or step.record.job != self.id or not is_point(step):
                break
            self._curve.add(step)
        if op.record.kind == "publish" and op.done is not None and op.done.result.error is None:
            initial = self.record.initial and op.record.seq == self.record.first_seq
            field = "initial_version" if initial else "version"
            if getattr(self.record, field) != op.record.version:
                self.change(**{field: op.record.version})

    def _go_on(self, *, failed: bool) -> None:
        """Something is in the journal, or could not be written: try again a little later."""
        if failed:
            self.tools.outbox.after(self.tools.config.retry_s, self.advance)
        else:
            self.advance()

    def _drive(self, policy: Policy) -> None:
        policy.job = self.id
        policy.checkpoint_every = self.spec.checkpoint_every

    def _hold_data(self) -> None:
        if self.record.feature_scope == feature_scope(self.tenant, self.tenant, ""):  # a mounted set stays anyway
            self._hold(self.tools.catalog.blobs(self.tenant, self.record.manifest))

    def _let_go(self, policy: Policy) -> None:
        if policy.job == self.id:
            policy.job = ""
            policy.checkpoint_every = 0
            self.tools.freed(policy)

    def _release(self) -> None:
        self.tools.env.cancel(self._drawing.values())
        self._drawing.clear()
        self._pages.clear()
        policy = self.tools.policies.find(self.tenant, self.spec.policy)
        if policy is not None and policy.job == self.id:
            self._give_up(policy)
            self.tools.training.release(policy)
            self._let_go(policy)

    def _give_up(self, policy: Policy) -> None:
        """Nobody needs what was not sent to a trainer yet."""
        sentence = f"job '{self.id}' has ended before this op was done"
        self.tools.training.abandon(policy, self.id, failure(ErrorCode.CONFLICT, sentence))

    def _missing(self) -> str:
        policy = self.tools.policies.find(self.tenant, self.spec.policy)
        if policy is None or not self.record.first_seq:
            return ""
        if policy.applied + 1 < policy.next_seq and not self.tools.training.serves(policy.spec.backbone):
            others = ", ".join(f"'{name}'" for name in self.tools.training.backbones())
            return f"a trainer with backbone '{policy.spec.backbone}'" + (f" (there are {others})" if others else "")
        if self._drawing and policy.applied + 1 == policy.next_seq and not self.tools.env.serves(SAMPLER):
            return "an env worker that draws samples"
        return ""

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


def check_recipe(policy: Policy, spec: SftSpec) -> None:
    """Refuse to train a policy that exists with another recipe; a `create` that says nothing takes it as it is."""
    difference = None if spec.create == SftPolicy() else recipe_difference(policy.spec, spec.create)
    if difference is not None:
        raise refuse(
            ErrorCode.CONFLICT,
            f"policy '{policy.name}' exists with another recipe: {difference}; use another name, or leave 'create' out",
        )
