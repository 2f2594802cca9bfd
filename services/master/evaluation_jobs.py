"""Evaluations: pages of episodes in a simulator, or recorded steps of a data set, with one fixed version.

In: a published version, answers of env workers. Out: success rates with their intervals, action errors. Never: a write
to the policy, or an episode that counts twice: a page is journaled once, and done again from its seeds if its worker
died.
"""

from __future__ import annotations

import msgspec

from common.journal.records import JobRecord, PageRecord, Record
from joynexus.contract import first_difference
from joynexus.specs import EvaluateDatasetSpec, EvaluateSpec
from joynexus.wire import ErrorCode, failure
from joynexus.wire.back import ActionsEvaluated, EvaluateActions, Rollout, RolloutDone
from joynexus.wire.front import EpisodeResult, EvaluationResult, JobInfo
from services.master.catalog import contract_of
from services.master.intake import feature_scope
from services.master.job import Job, Tools, mismatch
from services.master.outbox import refuse
from services.master.plan import compile_evaluation, summarize
from services.master.tasks import DATASETS, EnvAnswer, Task, simulator_need, whoever_serves


class Pin:
    """Keeps the version that a job evaluates."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._held = False

    def hold(self) -> None:
        """Keep it from now on."""
        record, policies = self._job.record, self._job.tools.policies
        if not self._held:
            policies.pin(policies.get(record.tenant, record.spec.policy), record.version)
            self._held = True

    def release(self) -> None:
        """It may go."""
        record, policies = self._job.record, self._job.tools.policies
        if self._held:
            policies.unpin(policies.get(record.tenant, record.spec.policy), record.version)
            self._held = False


class EvaluationJob(Job):
    """Episodes of one version in a simulator.

    Attributes:
        pin: keeps the version until the end.
    """

    spec: EvaluateSpec

    def __init__(self, record: JobRecord, tools: Tools) -> None:
        super().__init__(record, tools)
        if not isinstance(record.spec, EvaluateSpec):
            raise TypeError(f"job {record.job} is no evaluation")
        self.spec = record.spec
        self._plan = compile_evaluation(record.spec, page_episodes=tools.config.page_episodes)
        self._pages: dict[int, PageRecord] = {}
        self._tasks: dict[int, Task] = {}
        self._next = 0  # pages before it were given out or are done
        self._result: EvaluationResult | None = None
        self.pin = Pin(self)

    def restore_page(self, record: PageRecord) -> None:
        """Take a page back from the journal."""
        self._keep(record)

    def forget(self) -> list[Record]:
        """Give up its pages and their videos."""
        pages = [PageRecord(tenant=self.tenant, job=self.id, page=page, gone=True) for page in self._pages]
        for record in self._pages.values():
            for digest, _ in record.videos:
                self.tools.holdings.release(self.tenant, digest)
        return [*super().forget(), *pages]

    def pause(self) -> None:
        """Pages that no worker has begun are given out again later."""
        waiting = [page for page, task in self._tasks.items() if not task.attempt]
        self.tools.env.cancel([self._tasks.pop(page) for page in waiting])
        self._next = 0

    def _step(self) -> None:
        if len(self._pages) == self._plan.pages:
            self._result = self._summary()
            self.succeed()
            return
        while not self.paused and self._next < self._plan.pages and len(self._tasks) < self.tools.config.job_pages:
            page, self._next = self._next, self._next + 1
            if page not in self._pages and page not in self._tasks:
                self._run(page)

    def _run(self, page: int) -> None:
        policy = self.tools.policies.get(self.tenant, self.spec.policy)
        env, seeds = self._plan.task(page), self._plan.seeds(page)

        def make(task: str, attempt: int) -> Rollout:
            return Rollout(
                task=task,
                attempt=attempt,
                tenant=self.tenant,
                policy=policy.name,
                version=self.record.version,
                contract=policy.spec.contract,
                chunk=policy.spec.chunk,
                env=env,
                seeds=seeds,
                videos=self._plan.recorded(page),
                episode_limit=self.spec.episode_limit,
                execute=self.spec.execute,
                trace=self.id,
            )

        def done(answer: EnvAnswer) -> None:
            if not isinstance(answer, RolloutDone) or tuple(e.seed for e in answer.episodes) != seeds:
                self.fail(
                    failure(ErrorCode.INTERNAL, "an env worker returned other episodes than asked for: see its log")
                )
                return
            record = PageRecord(
                tenant=self.tenant,
                job=self.id,
                page=page,
                episodes=answer.episodes,
                contract_digest=answer.contract_digest,
                software=answer.software,
                videos=answer.videos,
            )
            self.tools.outbox.save([record, *self.tools.meter.unwritten()], lambda: self._saved(record))

        task = Task(
            tenant=self.tenant,
            policy=policy.name,
            version=self.record.version,
            job=self.id,
            need=simulator_need(self.tenant, env),
            setup=(env, policy.spec.contract.cameras),
            answer=RolloutDone,
            make=make,
            done=done,
            failed=self.fail,
        )
        self._tasks[page] = task
        self.tools.env.submit(task)

    def _saved(self, record: PageRecord) -> None:
        self._tasks.pop(record.page, None)
        self._keep(record)
        self.advance()

    def _keep(self, record: PageRecord) -> None:
        if record.page not in self._pages:
            self._pages[record.page] = record
            for digest, nbytes in record.videos:
                self.tools.holdings.hold(self.tenant, digest, nbytes)

    def _summary(self) -> EvaluationResult:
        tasks: dict[str, list[EpisodeResult]] = {env: [] for env in self._plan.tasks}
        contracts: dict[str, str] = {}
        software: dict[str, str] = {}
        for number in range(self._plan.pages):
            env, page = self._plan.task(number), self._pages[number]
            tasks[env] += page.episodes
            contracts[env] = page.contract_digest
            software |= page.software
        return summarize(self.record.version, tasks, contracts, software)

    def _release(self) -> None:
        self.tools.env.cancel(self._tasks.values())
        self._tasks.clear()
        self.pin.release()

    def _missing(self) -> str:
        left = (page for page in range(self._plan.pages) if page not in self._pages)
        for env in dict.fromkeys(self._plan.task(page) for page in left):
            if not self.tools.env.serves(simulator_need(self.tenant, env)):
                return whoever_serves(env)
        policy = self.tools.policies.get(self.tenant, self.spec.policy)
        return missing_inference(self.tools, policy.spec.backbone)

    @property
    def newest(self) -> tuple[float, str]:
        """The rate of success so far."""
        episodes = [episode.success for page in self._pages.values() for episode in page.episodes]
        return (sum(episodes) / len(episodes), "success") if episodes else (0.0, "")

    def _describe(self, basic: JobInfo, since: int, *, brief: bool) -> JobInfo:
        if basic.state == "succeeded" and self._result is None:
            self._result = self._summary()
        return msgspec.structs.replace(
            basic,
            done=sum(len(page.episodes) for page in self._pages.values()),
            total=self.spec.episodes * len(self.spec.tasks),
            evaluation=None if brief else self._result,
        )


class DatasetEvaluationJob(Job):
    """Action error of one version on episodes of a data set.

    Attributes:
        pin: keeps the version until the end.
    """

    spec: EvaluateDatasetSpec

    def __init__(self, record: JobRecord, tools: Tools) -> None:
        super().__init__(record, tools)
        if not isinstance(record.spec, EvaluateDatasetSpec):
            raise TypeError(f"job {record.job} is no evaluation on a data set")
        self.spec = record.spec
        self._task: Task | None = None
        self.pin = Pin(self)

    def _step(self) -> None:
        if self._task is not None or self.paused:
            return
        found = self._dataset(self.spec.dataset)
        if found is None:
            return
        policy = self.tools.policies.get(self.tenant, self.spec.policy)
        outside = [episode for episode in self.spec.episodes if episode >= found.episodes]
        if outside:
            raise refuse(
                ErrorCode.INVALID,
                f"data set '{self.spec.dataset}' has episodes 0 to {found.episodes - 1}, so there is no {outside[0]}",
            )
        difference = first_difference(policy.spec.contract, contract_of(found))
        if difference is not None:
            raise mismatch(f"policy '{policy.name}' does not fit data set '{self.spec.dataset}': {difference}")

        def make(task: str, attempt: int) -> EvaluateActions:
            return EvaluateActions(
                task=task,
                attempt=attempt,
                tenant=self.tenant,
                policy=policy.name,
                version=self.record.version,
                spec=policy.spec,
                manifest=found.manifest,
                episodes=self.spec.episodes,
                trace=self.id,
            )

        def done(answer: EnvAnswer) -> None:
            if not isinstance(answer, ActionsEvaluated) or answer.result is None:
                self.fail(failure(ErrorCode.INTERNAL, "an env worker returned no action error: see its log"))
                return
            self.succeed(action_error=answer.result)

        self._task = Task(
            tenant=self.tenant,
            policy=policy.name,
            version=self.record.version,
            job=self.id,
            need=DATASETS,
            answer=ActionsEvaluated,
            scope=feature_scope(self.tenant, found.tenant, found.dataset),
            make=make,
            done=done,
            failed=self.fail,
        )
        if found.tenant == self.tenant:
            self._hold(found.blobs)
        if self.record.state == "waiting":
            self.change(state="running")
        self.tools.env.submit(self._task)

    def _release(self) -> None:
        if self._task is not None:
            self.tools.env.cancel([self._task])
        self.pin.release()

    def _missing(self) -> str:
        if self._task is None:
            return ""
        if not self.tools.env.serves(DATASETS):
            return "an env worker that reads data sets"
        policy = self.tools.policies.get(self.tenant, self.spec.policy)
        return missing_inference(self.tools, policy.spec.backbone)

    def _describe(self, basic: JobInfo, since: int, *, brief: bool) -> JobInfo:
        total = len(self.spec.episodes)
        return msgspec.structs.replace(basic, done=total if basic.state == "succeeded" else 0, total=total)


def missing_inference(tools: Tools, backbone: str) -> str:
    """Name the inference worker that an evaluation needs, if it is not there."""
    return "" if tools.acting.serves(backbone) else f"an inference worker with backbone '{backbone}'"
