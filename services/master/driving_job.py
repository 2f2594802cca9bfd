"""What jobs that train have in common: they drive a policy, op after op of a plan, and see its version into service.

In: a plan, what its next op needs, outcomes of its ops. Out: ops under the policy's sequence, a lease taken and given
back, a job that is parked when steps fail in a row. Never: a position of its own: op number `i` of the plan has seq
`first_seq + i`, so the policy's `next_seq` says how far it is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec

from common.journal.records import CurveRecord, JobRecord, OpRecord, Record
from joynexus.specs import PolicySpec
from joynexus.wire import ErrorCode, Failure, failure
from joynexus.wire.back import TrainKind
from services.master.checks import Recipe, recipe_difference, says_nothing
from services.master.curve import is_outcome
from services.master.job import Job, Tools, policy_key
from services.master.ops import Op
from services.master.outbox import refuse
from services.master.plan import PlannedOp
from services.master.policy import Policy

_LEAVES_A_HOLE = frozenset({ErrorCode.NON_FINITE, ErrorCode.POISON, ErrorCode.CONFLICT})
"""A step that was vetoed, set aside or given up changes nothing, and is a hole in the curve."""


class Plan(Protocol):
    """The ops of a job, by position."""

    @property
    def total(self) -> int:
        """Number of ops."""
        ...

    def op(self, index: int) -> PlannedOp:
        """Return the op at a position, counted from 0."""
        ...


class DrivingJob(Job):
    """A job that drives a policy.

    Attributes:
        step_kind: kind of its ops that train; one that is vetoed leaves a hole, too many in a row park the job.
        policy_name: the policy.
        checkpoint_every: optimizer ops between checkpoints.
    """

    step_kind: ClassVar[TrainKind]

    def __init__(self, record: JobRecord, tools: Tools) -> None:
        super().__init__(record, tools)
        self.policy_name = record.spec.policy
        self._vetoes = 0  # steps in a row, up to the last whose outcome is known
        self._busy = False  # something is on its way to the journal that it has to wait for

    # What happens to it

    def op_arrived(self, policy: Policy, op: Op) -> None:
        """The outcome of one of its ops is known: park the job before any of those behind it counts, if need be."""
        error = op.done.result.error if op.done else None
        if self.ended or self.parked or op.record.kind != self.step_kind:
            return
        vetoed = error is not None and error.code is ErrorCode.NON_FINITE
        self._vetoes = self._vetoes + 1 if vetoed else 0
        if error is not None and (self._vetoes >= self.tools.config.vetoes or error.code is ErrorCode.POISON):
            self._park(policy, error)

    def op_finished(self, policy: Policy, op: Op) -> None:
        """One of its ops is done, and that is durable."""
        self._note(policy, op)
        error = op.done.result.error if op.done else None
        if error is not None and not (op.record.kind == self.step_kind and error.code in _LEAVES_A_HOLE):
            self.fail(error)
        self.advance()

    def resume(self) -> None:
        """Go on where it was parked, as if no step had been vetoed."""
        if not self.parked:
            super().resume()
            return
        policy = self.tools.policies.get(self.tenant, self.policy_name)
        self._vetoes = 0
        self.change(state="running", error=None, resumed=policy.applied + 1 - self._first_step)
        self.tools.outbox.log("info", "job_resumed", tenant=self.tenant, job=self.id)
        self.tools.training.release(policy)
        self.advance()

    @abstractmethod
    def fold(self, ops: Sequence[Op]) -> Sequence[Record]:
        """A checkpoint is about to cover these of its ops: give what of them is not written down yet."""

    @abstractmethod
    def restore_curve(self, record: CurveRecord) -> None:
        """Take a part of the curve back; they come in order."""

    def restore_ops(self) -> None:
        """Take back what the ops above the checkpoint say; the policy is restored."""
        policy = self.tools.policies.find(self.tenant, self.policy_name)
        if policy is None or not self.record.first_seq:
            return
        if not self.ended:
            self._drive(policy)
        self._restored(policy)
        for seq in range(max(self.record.first_seq, policy.forgotten + 1), policy.next_seq):
            op = policy.ops[seq]
            if op.record.job == self.id:
                self._note(policy, op)
        if self.ended:
            self._give_up(policy)
            return
        self._vetoes = self._holes(policy)
        if self.parked:
            self.tools.training.hold(policy)
        elif self._vetoes >= self.tools.config.vetoes:  # it was about to be parked when the master went down
            self._park(policy, failure(ErrorCode.NON_FINITE, "the loss or a gradient was not finite"))

    # What it does

    def _step(self) -> None:
        if self._busy:
            return
        if not self.record.first_seq:
            if not self.paused:
                self._start()
            return
        policy = self.tools.policies.get(self.tenant, self.policy_name)
        if not self.paused:
            self._produce(policy)
            self._issue(policy)
        last = self.record.first_seq + self._plan.total - 1
        if policy.next_seq <= last or policy.applied < last:
            return
        if policy.covered < last:
            self.tools.training.want_checkpoint(policy)
        elif self._complete:
            self._conclude(policy)

    def _comes_later(self, policy: Policy | None, create: Recipe) -> bool:
        """Wait if a job that was submitted earlier is to make the policy, as this one does not say how."""
        earlier = self.tools.earlier(self) if policy is None and says_nothing(create) else None
        if earlier is None:
            self.waiting_for = ""
            return False
        self.waiting_for = f"job '{earlier.id}', which makes policy '{self.policy_name}'"
        self.tools.wait(self, policy_key(self.tenant, self.policy_name))
        return True

    def _create(self, spec: PolicySpec) -> None:
        """Create the policy, then go on."""
        self._busy = True

        def then(outcome: Policy | str) -> None:
            self._busy = False
            self._go_on(failed=not isinstance(outcome, Policy))

        try:
            self.tools.policies.create(self.tenant, self.policy_name, spec, then)
        except BaseException:
            self._busy = False
            raise

    def _take(self, policy: Policy, **fields: object) -> None:
        """Take the lease once it is free, and fix where the job's ops begin, durably, before the first of them."""
        if policy.driver:
            driver = f"job '{policy.job}'" if policy.job else "the loop"
            self.waiting_for = f"{driver}, which drives policy '{policy.name}'"
            self.tools.wait(self, policy_key(*policy.key))
            return
        record = msgspec.structs.replace(self.record, state="running", first_seq=policy.next_seq, **fields)
        self._drive(policy)
        self._busy = True

        def saved() -> None:
            self._busy = False
            if not self.ended:
                self.record = record
                self.waiting_for = ""
                self._restored(policy)
                self.advance()

        def lost(reason: str) -> None:
            self._busy = False
            self._let_go(policy)
            self._go_on(failed=True)

        self.tools.outbox.save([record], saved, lost)

    def _issue(self, policy: Policy) -> None:
        """Have as many of the next ops accepted as may wait and as there is something for."""
        records: list[OpRecord] = []
        publishes = 0
        while True:
            seq = policy.next_seq + len(records)
            index = seq - self.record.first_seq
            if index >= self._plan.total or seq - 1 - policy.applied >= self.tools.config.job_ops:
                break
            planned = self._plan.op(index)
            record = OpRecord(tenant=self.tenant, policy=policy.name, seq=seq, kind=planned.kind, job=self.id)
            if planned.kind == "publish":
                record = msgspec.structs.replace(record, version=policy.next_version + publishes)
                publishes += 1
            else:
                filled = self._fill(policy, planned, record)
                if filled is None:
                    break
                record = filled
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

    # What each kind does its own way

    @property
    @abstractmethod
    def _plan(self) -> Plan:
        """The ops, once it drives the policy."""

    @property
    @abstractmethod
    def _first_step(self) -> int:
        """Seq of the first op that counts for `JobRecord.resumed`."""

    @property
    @abstractmethod
    def _complete(self) -> bool:
        """Every outcome is noted; all ops are done and covered."""

    @property
    @abstractmethod
    def _checkpoint_every(self) -> int:
        """Optimizer ops between checkpoints."""

    @abstractmethod
    def _start(self) -> None:
        """Find or create the policy, then `_take` it."""

    @abstractmethod
    def _restored(self, policy: Policy) -> None:
        """It drives the policy (again), or did before it ended: hold what it needs."""

    def _produce(self, policy: Policy) -> None:
        """Have made what the ops need, as far ahead as that may be."""

    @abstractmethod
    def _fill(self, policy: Policy, planned: PlannedOp, record: OpRecord) -> OpRecord | None:
        """Complete the record of an op (not of a publish); None while what it needs is being made."""

    @abstractmethod
    def _note(self, policy: Policy, op: Op) -> None:
        """An outcome is durable: continue the curve with it and what follows, note a version."""

    @abstractmethod
    def _holes(self, policy: Policy) -> int:
        """Return how many steps in a row were vetoed last, since the job was resumed."""

    # Details

    def _go_on(self, *, failed: bool) -> None:
        """Something is in the journal, or could not be written: try again a little later."""
        if failed:
            self.tools.outbox.after(self.tools.config.retry_s, self.advance)
        else:
            self.advance()

    def _drive(self, policy: Policy) -> None:
        policy.job = self.id
        policy.checkpoint_every = self._checkpoint_every

    def _let_go(self, policy: Policy) -> None:
        if policy.job == self.id:
            policy.job = ""
            policy.checkpoint_every = 0
            self.tools.freed(policy)

    def _release(self) -> None:
        policy = self.tools.policies.find(self.tenant, self.policy_name)
        if policy is not None and policy.job == self.id:
            self._give_up(policy)
            self.tools.training.release(policy)
            self._let_go(policy)

    def _give_up(self, policy: Policy) -> None:
        """Nobody needs what was not sent to a trainer yet."""
        sentence = f"job '{self.id}' has ended before this op was done"
        self.tools.training.abandon(policy, self.id, failure(ErrorCode.CONFLICT, sentence))

    def _missing_trainer(self, policy: Policy) -> str:
        """Name the trainer that is needed now and not there."""
        backbone = policy.spec.backbone
        if policy.applied + 1 >= policy.next_seq or self.tools.training.serves(backbone):
            return ""
        others = ", ".join(f"'{name}'" for name in self.tools.training.backbones())
        return f"a trainer with backbone '{backbone}'" + (f" (there are {others})" if others else "")

    def _versions_of(self, policy: Policy) -> list[int]:
        """Return the versions that this job has published and that are kept, in order."""
        return sorted(version for version, record in policy.versions.items() if record.job == self.id)

    def _settled(self, policy: Policy, seq: int) -> Op | None:
        """Return an op of this job whose outcome is durable and counts."""
        op = policy.ops.get(seq)
        return op if op is not None and op.record.job == self.id and op.told and is_outcome(op) else None


def to_be_created(policy: Policy | None, create: Recipe) -> bool:
    """Tell whether a job makes its policy: there is none, or nobody could ever use the one there is (a wrong size)."""
    return policy is None or (policy.never_opened and recipe_difference(policy.spec, create) is not None)


def check_recipe(policy: Policy, create: Recipe) -> None:
    """Refuse to train a policy that exists with another recipe; a `create` that says nothing takes it as it is."""
    difference = recipe_difference(policy.spec, create)
    if difference is not None:
        raise refuse(
            ErrorCode.CONFLICT,
            f"policy '{policy.name}' exists with another recipe: {difference}; use another name, or leave 'create' out",
        )
