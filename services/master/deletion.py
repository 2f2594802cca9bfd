"""Letting go of policies, versions and data sets because their tenant does not need them any more.

In: `DeletePolicy`, `DeleteVersion`, `DeleteDataset`. Out: records that take them from the journal, blobs freed, `Done`
once that is durable. Never: something deleted that a job, a loop or a trainer still needs, or a deletion that is told
before it is on disk. What is not there is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.journal.records import Record
from joynexus.specs import JobSpec, PipelineSpec
from joynexus.wire import ErrorCode
from joynexus.wire.front import DeleteDataset, DeletePolicy, DeleteVersion, Done
from services.master.catalog import Catalog
from services.master.checks import check_any_name, check_policy_name
from services.master.events import FrontMessage
from services.master.job import Job
from services.master.jobs import Jobs
from services.master.outbox import Outbox, refuse
from services.master.policies import Policies
from services.master.policy import Policy
from services.master.serving import Serving
from services.master.training import Training

Key = tuple[str | int, ...]


class Deletions:
    """Deletes what nothing needs."""

    def __init__(
        self,
        outbox: Outbox,
        policies: Policies,
        jobs: Jobs,
        catalog: Catalog,
        serving: Serving,
        training: Training,
    ) -> None:
        self._outbox = outbox
        self._policies = policies
        self._jobs = jobs
        self._catalog = catalog
        self._serving = serving
        self._training = training
        self._under_way: dict[Key, list[FrontMessage]] = {}

    def on_policy(self, asked: FrontMessage, message: DeletePolicy) -> None:
        """Delete a policy with all that belongs to it."""
        check_policy_name(message.policy)
        key, policy = ("policy", asked.tenant, message.policy), self._policies.find(asked.tenant, message.policy)
        if policy is None:
            self._policies.check_settled(asked.tenant, message.policy)
            self._gone_already(asked, key)
            return
        what = f"policy '{policy.name}'"
        if policy.driver:
            who = f"job '{policy.job}'" if policy.job else "a loop"
            raise refuse(ErrorCode.CONFLICT, f"{who} drives {what}: end that first")
        self._check_jobs(what, self._about(asked.tenant, policy=policy.name))
        if policy.told + 1 < policy.next_seq or policy.covering is not policy.checkpoint:
            sentence = f"something of {what} is still on its way to a trainer or to the disk: try again soon"
            raise refuse(ErrorCode.UNAVAILABLE, sentence, retry_after_ms=500)
        self._training.forget(policy)
        self._serving.forget(policy)
        self._delete(asked, key, self._policies.forget(policy))
        self._outbox.log("info", "policy_deleted", tenant=policy.tenant, policy=policy.name)

    def on_version(self, asked: FrontMessage, message: DeleteVersion) -> None:
        """Delete a version that is not the one that serves."""
        policy, number = self._policies.get(asked.tenant, message.policy), message.version
        key = ("version", asked.tenant, policy.name, number)
        if number not in policy.versions:
            self._gone_already(asked, key)
            return
        what = f"version {number} of policy '{policy.name}'"
        self._check_needed(policy, number, what)
        self._delete(asked, key, self._policies.forget_version(policy, number))
        self._outbox.log("info", "version_deleted", tenant=policy.tenant, policy=policy.name, version=number)

    def on_dataset(self, asked: FrontMessage, message: DeleteDataset) -> None:
        """Delete a data set of the tenant's own."""
        check_any_name("data set", message.dataset)
        key, record = ("dataset", asked.tenant, message.dataset), self._catalog.own(asked.tenant, message.dataset)
        if record is None:
            if self._catalog.is_mounted(message.dataset):
                raise refuse(ErrorCode.FORBIDDEN, f"data set '{message.dataset}' is the operator's: it is not yours")
            self._gone_already(asked, key)
            return
        what = f"data set '{record.dataset}'"
        self._check_jobs(what, self._about(asked.tenant, dataset=record.dataset))
        for policy in self._policies.of(asked.tenant):
            above = (policy.ops[seq] for seq in range(policy.covered + 1, policy.next_seq))
            if self._catalog.alone(record) and any(op.record.manifest == record.manifest for op in above):
                raise refuse(
                    ErrorCode.CONFLICT,
                    f"policy '{policy.name}' was trained on {what}, and no checkpoint covers that yet: delete the set "
                    "later, or the policy first",
                )
        self._delete(asked, key, self._catalog.forget(record))
        self._outbox.log("info", "dataset_deleted", tenant=record.tenant, dataset=record.dataset)

    # Inside

    def _check_needed(self, policy: Policy, number: int, what: str) -> None:
        """Refuse to delete a version that serves whoever asks for the newest, or that a job needs."""
        newest = {max(policy.versions)} | {v.version for v in (self._serving.newest(policy), policy.newest) if v}
        if number in newest:
            raise refuse(ErrorCode.CONFLICT, f"{what} is the newest, or serves: publish another one first")
        if policy.pins[number]:
            raise refuse(ErrorCode.CONFLICT, f"{what} is being evaluated: wait until that job ends, or cancel it")
        jobs = self._about(policy.tenant, policy=policy.name)
        self._check_jobs(what, [job for job in jobs if number in (job.record.version, job.record.initial_version)])

    def _check_jobs(self, what: str, jobs: Sequence[Job]) -> None:
        if jobs:
            raise refuse(ErrorCode.CONFLICT, f"job '{jobs[0].id}' needs {what}: wait until it ends, or cancel it")

    def _about(self, tenant: str, *, policy: str = "", dataset: str = "") -> list[Job]:
        """Return the jobs that have not ended and are about a policy or a data set."""
        going = (job for job in self._jobs.every(tenant, unsaved=True) if not job.ended)
        return [job for job in going if any(_names(spec, policy, dataset) for spec in _specs(job.record.spec))]

    def _delete(self, asked: FrontMessage, key: Key, records: Sequence[Record]) -> None:
        """Have something gone: it is not there any more for whoever asks; tell so once that is durable."""
        self._under_way.setdefault(key, []).append(asked)

        def saved() -> None:
            for each in self._under_way.pop(key, ()):
                self._outbox.answer(each, Done())

        self._outbox.save(records, saved)

    def _gone_already(self, asked: FrontMessage, key: Key) -> None:
        if key in self._under_way:
            self._under_way[key].append(asked)
        else:
            self._outbox.answer(asked, Done())


def _specs(spec: JobSpec) -> Sequence[JobSpec]:
    return (spec, *spec.stages) if isinstance(spec, PipelineSpec) else (spec,)


def _names(spec: JobSpec, policy: str, dataset: str) -> bool:
    return spec.policy == policy if policy else getattr(spec, "dataset", None) == dataset
