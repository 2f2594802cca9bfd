"""All jobs: submitted once, whatever is repeated; found by their tenant alone; woken when they may go on.

In: `SubmitJob`, `GetJob`, `CancelJob`, `ResumeJob`, `ListJobs`, and what happens to policies, data sets and versions.
Out: `JobInfo`. Never: a job that is not durable acknowledged, or a scan over jobs to find whom an event concerns.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from common.journal.records import CurveRecord, JobRecord, PageRecord, Record
from joynexus.specs import EvaluateDatasetSpec, EvaluateSpec, JobSpec, PipelineSpec, RlSpec, SftSpec, StageSpec
from joynexus.wire import ErrorCode, Failure
from joynexus.wire.front import CancelJob, CancelJobs, Done, GetJob, JobInfo, JobList, ListJobs, ResumeJob, SubmitJob
from services.master.checks import check_job
from services.master.driving_job import DrivingJob
from services.master.evaluation_jobs import DatasetEvaluationJob, EvaluationJob
from services.master.events import FrontMessage
from services.master.job import Job, Tools, dataset_key, policy_key
from services.master.ops import Op
from services.master.outbox import not_found, not_saved, refuse
from services.master.pipeline_job import PipelineJob
from services.master.policy import Policy
from services.master.rl_job import RlJob
from services.master.submission import check_possible, evaluated_version, trains
from services.master.tasks import simulator_need
from services.master.training_job import TrainingJob

_LISTED = 500
_LIST_BYTES = 512 * 1024
"""The newest jobs are listed until they have so many bytes: a list is one message."""

_KINDS: dict[type, tuple[str, Callable[[JobRecord, Tools], Job]]] = {
    SftSpec: ("sft", TrainingJob),
    RlSpec: ("rl", RlJob),
    PipelineSpec: ("pipeline", PipelineJob),
    EvaluateSpec: ("evaluate", EvaluationJob),
    EvaluateDatasetSpec: ("evaluate-dataset", DatasetEvaluationJob),
}


class Jobs:
    """The registry of jobs.

    Args:
        make_tools: gives the parts of the core, once it knows the part of jobs.
    """

    def __init__(self, make_tools: Callable[[Jobs], Tools]) -> None:
        self._tools = make_tools(self)
        self._outbox = self._tools.outbox
        self._jobs: defaultdict[str, dict[str, Job]] = defaultdict(dict)
        self._by_key: dict[tuple[str, str], Job] = {}
        self._unsaved: dict[tuple[str, str], list[FrontMessage]] = {}  # (tenant, key) -> who asked
        self._numbers: defaultdict[str, int] = defaultdict(int)
        self._ended: defaultdict[str, deque[Job]] = defaultdict(deque)  # by tenant, the one that ended first in front
        self._waiting: defaultdict[tuple[str, ...], dict[str, Job]] = defaultdict(dict)

    # Requests

    def on_submit(self, asked: FrontMessage, message: SubmitJob) -> None:
        """Start a job, or find that it was started."""
        if not 1 <= len(message.key) <= 200:
            raise refuse(ErrorCode.INVALID, "key must have 1 to 200 characters, so that asking again is safe")
        place = (asked.tenant, message.key)
        known = self._by_key.get(place)
        if known is not None:
            if known.record.spec != message.spec:
                raise refuse(ErrorCode.CONFLICT, "this key was used for another job before: use a new one")
            if place in self._unsaved:
                self._unsaved[place].append(asked)
            else:
                self._outbox.answer(asked, known.info())
            return
        check_job(message.spec)
        self._check_number(asked.tenant)
        self._check(asked.tenant, message.spec)
        job = self._make(asked.tenant, message.spec, key=message.key)
        self._by_key[place] = job
        self._unsaved[place] = [asked]

        def saved() -> None:
            self._jobs[job.tenant][job.id] = job
            for waiter in self._unsaved.pop(place):
                self._outbox.answer(waiter, job.info())
            job.advance()

        def lost(reason: str) -> None:
            job.discard()
            del self._by_key[place]
            for waiter in self._unsaved.pop(place):
                self._outbox.answer(waiter, not_saved("the job", reason).failure)

        self._outbox.save([job.record], saved, lost)

    def on_get(self, asked: FrontMessage, message: GetJob) -> None:
        """Describe a job."""
        self._outbox.answer(asked, self._get(asked.tenant, message.job).info(message.since))

    def on_cancel(self, asked: FrontMessage, message: CancelJob) -> None:
        """Stop a job; one that has ended stays as it ended."""
        job = self._get(asked.tenant, message.job)
        job.cancel()
        # Once more, to learn when it is durable: a cancelled job must not be back after a restart.
        self._outbox.save([job.record], lambda: self._outbox.answer(asked, job.info()))

    def on_cancel_all(self, asked: FrontMessage, message: CancelJobs) -> None:
        """Stop all jobs of a tenant, because an operator says so; those that have ended stay as they ended."""
        if not asked.operator:
            raise refuse(ErrorCode.FORBIDDEN, "only an operator's key may cancel another tenant's jobs")
        going = [job for job in self._jobs.get(message.tenant, {}).values() if not job.ended]
        for job in going:
            job.cancel()
        if going:
            self._outbox.log("info", "jobs_cancelled", tenant=message.tenant, jobs=len(going), by=asked.tenant)
        self._outbox.save([job.record for job in going], lambda: self._outbox.answer(asked, Done()))

    def on_resume(self, asked: FrontMessage, message: ResumeJob) -> None:
        """Have a parked job go on."""
        job = self._get(asked.tenant, message.job)
        job.resume()
        self._outbox.save([job.record], lambda: self._outbox.answer(asked, job.info()))

    def on_list(self, asked: FrontMessage, message: ListJobs) -> None:
        """Describe the tenant's newest jobs."""
        jobs = sorted(self._jobs.get(asked.tenant, {}).values(), key=lambda job: -job.record.number)
        infos: list[JobInfo] = []
        nbytes = 0
        for job in jobs[:_LISTED]:
            infos.append(job.info(brief=True))
            nbytes += len(msgspec.msgpack.encode(infos[-1]))
            if nbytes > _LIST_BYTES:
                break
        self._outbox.answer(asked, JobList(jobs=tuple(infos)))

    def running(self, tenant: str | None) -> int:
        """Number of jobs that have not ended, of one tenant or of all (for status)."""
        of = self._jobs.values() if tenant is None else [self._jobs.get(tenant, {})]
        return sum(not job.ended for jobs in of for job in jobs.values())

    def every(self, tenant: str | None, *, unsaved: bool = False) -> Iterator[Job]:
        """Return the jobs of a tenant, or all; `unsaved`: those too that are on their way to the disk."""
        of = self._jobs.values() if tenant is None else [self._jobs.get(tenant, {})]
        yield from (job for jobs in of for job in jobs.values())
        if unsaved:
            yield from (self._by_key[place] for place in self._unsaved if tenant in (None, place[0]))

    def starved(self) -> set[str]:
        """Return the needs of rollouts for which trainers wait."""
        rl_jobs = (job for job in self.every(None) if isinstance(job, RlJob))
        return {simulator_need(job.tenant, job.spec.env) for job in rl_jobs if job.starved}

    # What happens

    def op_arrived(self, policy: Policy, op: Op) -> None:
        """An op's outcome is known; it may mean that those behind it must not be done."""
        job = self._jobs.get(policy.tenant, {}).get(op.record.job) if op.record.job else None
        if isinstance(job, DrivingJob):
            job.op_arrived(policy, op)

    def op_finished(self, policy: Policy, op: Op) -> None:
        """An op's outcome is durable."""
        job = self._jobs.get(policy.tenant, {}).get(op.record.job) if op.record.job else None
        if isinstance(job, DrivingJob):
            job.op_finished(policy, op)

    def covering(self, policy: Policy, seq: int) -> Sequence[Record]:
        """A checkpoint is about to cover ops up to `seq`: write the loss curves down, whose ops will be forgotten."""
        by_job: defaultdict[str, list[Op]] = defaultdict(list)
        for number in range(policy.covered + 1, seq + 1):
            op = policy.ops[number]
            if op.record.job:
                by_job[op.record.job].append(op)
        records: list[Record] = []
        for name, ops in by_job.items():
            job = self._jobs.get(policy.tenant, {}).get(name)
            if isinstance(job, DrivingJob):
                records += job.fold(ops)
        return records

    def covered(self, policy: Policy) -> None:
        """A checkpoint is durable."""
        job = self._jobs.get(policy.tenant, {}).get(policy.job)
        if job is not None:
            job.advance()

    def budget_changed(self, tenant: str) -> None:
        """A tenant is over its budget now, or is not any more."""
        for job in list(self._jobs.get(tenant, {}).values()):
            if job.paused:
                job.pause()
            else:
                job.advance()

    def dataset_settled(self, key: tuple[str, str]) -> None:
        """A data set has become ready or faulty."""
        self._wake(dataset_key(*key))

    def policy_freed(self, policy: Policy) -> None:
        """Nobody drives a policy any more."""
        self._wake(policy_key(*policy.key))

    def version_settled(self, policy: Policy, version: int, error: Failure | None) -> None:
        """Inference has applied or refused a version, or there is no inference any more."""
        record = policy.versions.get(version)
        job = self.find(policy.tenant, record.job) if record is not None else None
        if job is not None:
            job.version_settled(version, error)

    # Restart

    def restore(self, record: JobRecord | PageRecord | CurveRecord) -> None:
        """Take a record back from the journal."""
        if isinstance(record, JobRecord):
            job = _KINDS[type(record.spec)][1](record, self._tools)
            self._jobs[record.tenant][record.job] = job
            if not record.pipeline:
                self._by_key[record.tenant, record.key] = job
            self._numbers[record.tenant] = max(record.number, self._numbers[record.tenant])
            return
        owner = self._jobs.get(record.tenant, {}).get(record.job)
        if isinstance(owner, EvaluationJob | RlJob) and isinstance(record, PageRecord):
            owner.restore_page(record)
        elif isinstance(owner, DrivingJob) and isinstance(record, CurveRecord):
            owner.restore_curve(record)

    def resume(self) -> None:
        """Everything is restored: go on with every job that has not ended, the oldest first."""
        jobs = [job for jobs in self._jobs.values() for job in jobs.values()]
        for job in jobs:
            if isinstance(job, EvaluationJob | DatasetEvaluationJob) and not job.ended:
                job.pin.hold()  # before any RL job lets go of versions
        for job in jobs:
            if isinstance(job, DrivingJob):
                job.restore_ops()
        for job in sorted(jobs, key=lambda job: job.record.ended_s):
            if job.ended:
                self.note_ended(job)
        for job in sorted(jobs, key=lambda job: job.record.accepted_s):
            pipeline = self.find(job.tenant, job.record.pipeline)
            if job.record.pipeline and (pipeline is None or pipeline.ended):
                job.cancel()
            job.advance()

    # Inside

    def _check(self, tenant: str, spec: JobSpec, *, pipeline: Job | None = None) -> None:
        """Refuse a job that could never run; `pipeline` has it as a stage."""
        rank = self._numbers[tenant] + 1 if pipeline is None else pipeline.record.number
        check_possible(self._tools, tenant, spec, behind=self._earlier(tenant, spec.policy, rank) is not None)

    def _check_number(self, tenant: str) -> None:
        """Refuse one job more than may be there."""
        most = self._tools.config.max_jobs
        unsaved = sum(place[0] == tenant for place in self._unsaved)
        if self.running(tenant) + unsaved >= most:
            sentence = f"this tenant has {most} jobs that have not ended, and may have no more: wait, or cancel some"
            raise refuse(ErrorCode.OVERLOADED, sentence, retry_after_ms=5000)

    def _earlier(self, tenant: str, policy: str, rank: int) -> Job | None:
        """Return a job of lower rank that trains a policy and has not ended."""
        unsaved = (self._by_key[place] for place in self._unsaved if place[0] == tenant)
        for job in (*self._jobs.get(tenant, {}).values(), *unsaved):
            spec = job.record.spec
            if not job.ended and spec.policy == policy and trains(spec) and self._rank(job) < rank:
                return job
        return None

    def _rank(self, job: Job) -> int:
        """Return the place of a job in the order of submission; stages have that of their pipeline."""
        pipeline = self.find(job.tenant, job.record.pipeline)
        return (pipeline or job).record.number

    def _make(self, tenant: str, spec: JobSpec, *, key: str, pipeline: str = "") -> Job:
        """Give a job a number.

        Raises:
            JoyNexusError: there is no such version.
        """
        version = 0
        if isinstance(spec, EvaluateSpec | EvaluateDatasetSpec):
            version = evaluated_version(self._tools, tenant, spec)
        self._numbers[tenant] += 1
        name, kind = _KINDS[type(spec)]
        record = JobRecord(
            tenant=tenant,
            job=f"{name}-{self._numbers[tenant]}",
            key=key,
            number=self._numbers[tenant],
            spec=spec,
            accepted_s=self._outbox.now,
            state="running" if isinstance(spec, EvaluateSpec) else "waiting",
            version=version,
            pipeline=pipeline,
        )
        job = kind(record, self._tools)
        if isinstance(job, EvaluationJob | DatasetEvaluationJob):
            job.pin.hold()  # now: an RL job may let go of the version before this one is on disk
        return job

    def _get(self, tenant: str, name: str) -> Job:
        job = self.find(tenant, name)
        if job is None:
            raise not_found("job", name)
        return job

    def _wake(self, key: tuple[str, ...]) -> None:
        for job in self._waiting.pop(key, {}).values():
            job.advance()

    # For jobs

    def wait(self, job: Job, key: tuple[str, ...]) -> None:
        """Have a job advanced when something about this key happens."""
        job.waits_at = key
        self._waiting[key][f"{job.tenant}/{job.id}"] = job

    def note_ended(self, job: Job) -> None:
        """Tell its pipeline; forget the jobs that ended longest ago, if the tenant has too many."""
        if job.waits_at in self._waiting:
            self._waiting[job.waits_at].pop(f"{job.tenant}/{job.id}", None)
            if not self._waiting[job.waits_at]:
                del self._waiting[job.waits_at]
        ended = self._ended[job.tenant]
        ended.append(job)
        while len(ended) > self._tools.config.kept_jobs:
            oldest = ended.popleft()
            del self._jobs[oldest.tenant][oldest.id]
            if not oldest.record.pipeline:
                self._by_key.pop((oldest.tenant, oldest.record.key), None)
            self._outbox.save(oldest.forget())
        self._wake(policy_key(job.tenant, job.record.spec.policy))  # it may have been to make the policy
        pipeline = self.find(job.tenant, job.record.pipeline)
        if pipeline is not None:
            pipeline.advance()

    def earlier(self, job: Job) -> Job | None:
        """Return a job that was submitted before this one, has not ended, and trains the same policy."""
        return self._earlier(job.tenant, job.record.spec.policy, self._rank(job))

    def find(self, tenant: str, name: str) -> Job | None:
        """Return a job of this tenant."""
        return self._jobs.get(tenant, {}).get(name)

    def make_stage(self, pipeline: Job, spec: StageSpec) -> Job:
        """Make the job of a pipeline's stage, which is not durable yet.

        Raises:
            JoyNexusError: it could never run.
        """
        self._check(pipeline.tenant, spec, pipeline=pipeline)
        return self._make(pipeline.tenant, spec, key="", pipeline=pipeline.id)

    def begin_stage(self, job: Job) -> None:
        """A stage is durable: have it begin."""
        self._jobs[job.tenant][job.id] = job
        job.advance()
