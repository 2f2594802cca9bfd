"""An RL job: rollouts of the newest version and epochs over them, two loops that meet in the Training queue.

In: a simulator task, pages of finished episodes, outcomes of its ops. Out: rollouts as far ahead as tickets allow, ops
under the policy's sequence, a version for each update, the learning curve. Never: a page that is trained on twice or
left out, one that is too old, or a version kept that nobody needs any more.

Page `n` of the job (a rollout) belongs to update `n // pages`; it is journaled once it is finished, with the version
that acted, and goes when a checkpoint covers the last epoch of its update. So what is finished is never done again, and
what is not is done again from the same seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from common.journal.records import CurveRecord, JobRecord, OpRecord, PageRecord, Record
from joynexus.specs import PolicySpec, PpoSpec, RlPolicy, RlSpec
from joynexus.wire import ErrorCode, Failure, failure
from joynexus.wire.back import Collect, DescribeSimulator, RlBegin, RlEpoch, Rollout, RolloutDone, SimulatorDescribed
from joynexus.wire.front import EpisodeResult, JobInfo, UpdatePoint
from services.master.checks import recipe_difference
from services.master.curve import LearningCurve, is_outcome
from services.master.driving_job import DrivingJob, check_recipe
from services.master.evaluation_jobs import missing_inference
from services.master.job import Tools
from services.master.ops import Op
from services.master.outbox import refuse
from services.master.plan import PlannedOp, RlPlan, compile_rl, has_ended
from services.master.policies import Policy
from services.master.tasks import EnvAnswer, Task, simulator_need, whoever_serves
from services.master.tickets import Tickets

_CURVE_POINTS = 500
"""Points of the curve in one answer; whoever wants more asks again with `since`."""


class RlJob(DrivingJob):
    """Reinforcement learning of one policy in a simulator."""

    spec: RlSpec
    step_kind = "rl_epoch"

    def __init__(self, record: JobRecord, tools: Tools) -> None:
        super().__init__(record, tools)
        if not isinstance(record.spec, RlSpec):
            raise TypeError(f"job {record.job} is no RL job")
        self.spec = record.spec
        self._rl_plan = compile_rl(record.spec, rollout_episodes=tools.config.rollout_episodes)
        self._tickets = Tickets(batch=self._rl_plan.pages, max_staleness=record.spec.max_staleness)
        self._curve = LearningCurve(record.tenant, record.job)
        self._folded_seq = 0  # ops up to it were folded since the master started
        self._ahead: dict[int, UpdatePoint] = {}  # of updates that a checkpoint covers before their outcome is durable
        self._pages: dict[int, PageRecord] = {}
        self._running: dict[int, Task] = {}
        self._saving: set[int] = set()
        self._next = 0  # pages before it were given out or are done
        self._published = -1  # updates whose version is published
        self._describing: Task | None = None
        self._described: PolicySpec | None = None

    # What happens to it

    def forget(self) -> list[Record]:
        """Give up its curve."""
        return [*super().forget(), *self._curve.forget()]

    def fold(self, ops: Sequence[Op]) -> Sequence[Record]:
        """Give the updates that these complete; their pages are not needed any more."""
        if self.ended:
            return []
        # A full disk may hold a checkpoint up, and the next one then covers the same ops once more.
        ops, self._folded_seq = [op for op in ops if op.record.seq > self._folded_seq], ops[-1].record.seq
        epochs = [op for op in ops if op.record.kind == "rl_epoch" and is_outcome(op)]
        points: list[UpdatePoint] = []
        records: list[Record] = []
        for op in epochs:
            planned = self._plan.op(op.record.seq - self.record.first_seq)
            if planned.epoch < self._plan.epochs - 1:
                continue
            points.append(self._point(planned.update, op))
            if planned.update >= len(self._curve):
                self._ahead[planned.update] = points[-1]
            records += self._drop(self._numbers(planned.update))
        curve = self._curve.fold(points, [op.done for op in epochs if op.done is not None])
        return records if curve is None else [curve, *records]

    def restore_curve(self, record: CurveRecord) -> None:
        """Take a part of the curve back; they come in order."""
        self._curve.restore(record)
        for point in record.updates:
            self._look_whether_to_stop(point.update, point.success)

    def restore_page(self, record: PageRecord) -> None:
        """Take a page back from the journal."""
        self._keep(record)

    # Beginning

    def _start(self) -> None:
        policy = self.tools.policies.find(self.tenant, self.spec.policy)
        create = self.spec.create
        if policy is None or (policy.never_opened and recipe_difference(policy.spec, create) is not None):
            if self._described is None:
                self._describe_simulator()
            else:
                self._create(self._described)
            return
        check_recipe(policy, create)
        if self.spec.execute > policy.spec.chunk:
            raise refuse(
                ErrorCode.INVALID,
                f"execute is {self.spec.execute}, but policy '{policy.name}' predicts chunks of {policy.spec.chunk}",
            )
        self._take(policy)

    def _describe_simulator(self) -> None:
        """Learn the contract of the task, and the statistics of what random actions lead to."""
        if self._describing is not None:
            return
        spec = self.spec

        def make(task: str, attempt: int) -> DescribeSimulator:
            return DescribeSimulator(
                task=task,
                attempt=attempt,
                tenant=self.tenant,
                env=spec.env,
                cameras=spec.create.cameras,
                episode_limit=spec.episode_limit,
                warmup_episodes=0 if spec.create.normalization == "none" else spec.warmup_episodes,
                seed=spec.first_seed,
            )

        def done(answer: EnvAnswer) -> None:
            self._describing = None
            if not isinstance(answer, SimulatorDescribed) or answer.contract is None:
                self.fail(failure(ErrorCode.INTERNAL, f"an env worker did not describe '{spec.env}': see its log"))
                return
            self.tools.meter.add(self.tenant, self.policy_name, {"env_s": answer.busy_s})
            fields = {name: getattr(spec.create, name) for name in RlPolicy.__struct_fields__ if name != "cameras"}
            statistics = None if spec.create.normalization == "none" else answer.statistics
            self._described = PolicySpec(**fields, contract=answer.contract, statistics=statistics)
            self.advance()

        self._describing = Task(
            tenant=self.tenant,
            need=simulator_need(self.tenant, spec.env),
            answer=SimulatorDescribed,
            make=make,
            done=done,
            failed=self.fail,
        )
        self.tools.env.submit(self._describing)

    # Rollouts

    def _produce(self, policy: Policy) -> None:
        """Give out pages, as many as there are tickets for."""
        end = self._plan.updates * self._plan.pages
        self._stop_rolling([number for number in self._running if number >= end])
        if self._published < 0:
            return
        self._next = max(self._next, self._curve.folded * self._plan.pages)
        while (
            self._next < end
            and len(self._running) < self.tools.config.job_pages
            and self._tickets.may_begin(self._next, self._published)
        ):
            number, self._next = self._next, self._next + 1
            if number not in self._pages and number not in self._running and number not in self._saving:
                self._roll(policy, number)

    def _roll(self, policy: Policy, number: int) -> None:
        """Have a page's episodes run, by the newest version."""
        version = self.record.initial_version + self._published
        seeds, draws = self._plan.page(number)
        spec = self.spec
        ppo = isinstance(spec.algorithm, PpoSpec)

        def make(task: str, attempt: int) -> Rollout:
            return Rollout(
                task=task,
                attempt=attempt,
                tenant=self.tenant,
                policy=policy.name,
                version=version,
                contract=policy.spec.contract,
                chunk=policy.spec.chunk,
                env=spec.env,
                seeds=seeds,
                draws=draws,
                episode_limit=spec.episode_limit,
                execute=spec.execute,
                collect=Collect(reward=spec.reward, value=ppo),
            )

        def done(answer: EnvAnswer) -> None:
            asked = isinstance(answer, RolloutDone) and tuple(e.seed for e in answer.episodes) == seeds
            if not isinstance(answer, RolloutDone) or not asked:
                sentence = "an env worker returned other episodes than asked for: see its log"
                self.fail(failure(ErrorCode.INTERNAL, sentence))
                return
            self.tools.meter.add(self.tenant, policy.name, {"env_s": answer.busy_s})
            self._save_page(number, version, answer)

        def failed(error: Failure) -> None:
            if error.category == "user" and error.code is not ErrorCode.POISON:
                self.fail(error)
                return
            nothing = EpisodeResult(seed=0, success=False, steps=0, reward=0.0, failure=error.message)
            lost = tuple(msgspec.structs.replace(nothing, seed=seed) for seed in seeds)
            self._save_page(number, version, RolloutDone(task="", attempt=0, episodes=lost))

        task = Task(
            tenant=self.tenant,
            policy=policy.name,
            version=version,
            need=simulator_need(self.tenant, spec.env),
            setup=(spec.env, policy.spec.contract.cameras),
            answer=RolloutDone,
            make=make,
            done=done,
            failed=failed,
        )
        self._running[number] = task
        self.tools.env.submit(task)

    def _save_page(self, number: int, version: int, answer: RolloutDone) -> None:
        """A page is finished (or cannot be run at all, and the update goes on without it): write it down."""
        self._running.pop(number, None)
        self._saving.add(number)
        record = PageRecord(
            tenant=self.tenant,
            job=self.id,
            page=number,
            episodes=answer.episodes,
            contract_digest=answer.contract_digest,
            software=answer.software,
            version=version,
            trajectories=answer.trajectories if any(map(has_ended, answer.episodes)) else "",
            trajectories_nbytes=answer.trajectories_nbytes,
        )

        def saved() -> None:
            self._saving.discard(number)
            self._keep(record)
            if self.ended:
                self.tools.outbox.save(self._drop([number]))
                return
            self._retire(self.tools.policies.get(self.tenant, self.policy_name))
            self.advance()

        self.tools.outbox.save([record], saved)

    def _keep(self, record: PageRecord) -> None:
        if record.page in self._pages:
            return
        self._pages[record.page] = record
        self.tools.holdings.hold(self.tenant, record.trajectories, record.trajectories_nbytes)
        update = self._tickets.update(record.page)
        pages = self._experience(update)
        if pages is not None:
            episodes = [episode for page in pages for episode in page.episodes if has_ended(episode)]
            self._look_whether_to_stop(update, _mean([episode.success for episode in episodes]))

    def _drop(self, numbers: Sequence[int]) -> list[PageRecord]:
        """Let go of pages; return the records by which they go from the journal."""
        gone = [self._pages.pop(number) for number in numbers if number in self._pages]
        for record in gone:
            self.tools.holdings.release(self.tenant, record.trajectories)
        return [PageRecord(tenant=self.tenant, job=self.id, page=record.page, gone=True) for record in gone]

    def _stop_rolling(self, numbers: Sequence[int]) -> None:
        self.tools.env.cancel([self._running.pop(number) for number in numbers])

    def _numbers(self, update: int) -> range:
        """Return the numbers of an update's pages."""
        return range(update * self._plan.pages, (update + 1) * self._plan.pages)

    def _experience(self, update: int) -> list[PageRecord] | None:
        """Return an update's pages, once all are finished."""
        pages = [self._pages.get(number) for number in self._numbers(update)]
        return None if None in pages else [page for page in pages if page is not None]

    def _look_whether_to_stop(self, update: int, success: float) -> None:
        """An update whose episodes succeed often enough is the last one; a function of what is in the journal."""
        if 0 < self.spec.stop_at <= success and update + 1 < self._rl_plan.updates:
            self._rl_plan = msgspec.structs.replace(self._rl_plan, updates=update + 1)

    # Ops

    @property
    def _plan(self) -> RlPlan:
        return self._rl_plan

    @property
    def _first_step(self) -> int:
        return self.record.first_seq

    @property
    def _complete(self) -> bool:
        return len(self._curve) == self._plan.updates and self._published == self._plan.updates

    @property
    def _checkpoint_every(self) -> int:
        return self.spec.checkpoint_every * self._plan.epochs

    def _fill(self, policy: Policy, planned: PlannedOp, record: OpRecord) -> OpRecord | None:
        if planned.kind == "rl_begin":
            return msgspec.structs.replace(record, rl=self._begin_with(policy.spec))
        pages = self._experience(planned.update)
        if pages is None:
            return None
        rollouts = tuple((page.trajectories, page.trajectories_nbytes) for page in pages if page.trajectories)
        if not rollouts:
            why = pages[0].episodes[0].failure
            raise refuse(ErrorCode.UNAVAILABLE, f"no episode of update {planned.update} could be run: {why}")
        epoch = RlEpoch(
            algorithm=self.spec.algorithm,
            rollouts=tuple(digest for digest, _ in rollouts),
            update=planned.update,
            epoch=planned.epoch,
            seed=self.spec.seed,
            reward_scale=self.spec.reward_scale,
            weight_limit=self.spec.weight_limit if self.spec.max_staleness else 0.0,
        )
        # What the policy explored from was stored under this scope, so that training needs no forward.
        scope = f"tenant:{self.tenant}"
        return msgspec.structs.replace(record, rl=epoch, rollouts=rollouts, feature_scope=scope)

    def _begin_with(self, policy: PolicySpec) -> RlBegin:
        algorithm = self.spec.algorithm
        critic = algorithm.critic if isinstance(algorithm, PpoSpec) else None
        return RlBegin(
            exploration=self.spec.exploration,
            critic=critic,
            values=0 if critic is None else policy.chunk if algorithm.level == "action" else 1,
            optimizer=self.spec.optimizer or policy.optimizer,
        )

    def _restored(self, policy: Policy) -> None:
        if self.ended:
            self.tools.outbox.save(self._drop(list(self._pages)))
        mine = [version for version, record in policy.versions.items() if record.job == self.id]
        if mine and self.record.initial_version:
            self._note_version(policy, max(mine))

    def _note(self, policy: Policy, op: Op) -> None:
        published = op.record.kind == "publish" and op.done is not None and op.done.result.error is None
        if published:
            self._note_version(policy, op.record.version)
        if self.ended:
            return
        if op.record.kind == "rl_epoch" and op.done is not None and is_outcome(op):
            self._curve.count(op.done)
        while len(self._curve) < self._plan.updates:
            update = len(self._curve)
            last = self._settled(policy, self.record.first_seq + self._plan.last_epoch(update))
            if last is None:
                break
            self._curve.points.append(self._point(update, last))
            self._ahead.pop(update, None)

    def _note_version(self, policy: Policy, version: int) -> None:
        """A version is published; the one before it is not needed once no page acts with it any more."""
        if not self.record.initial_version:
            self.change(initial_version=version)
        if self.record.version < version:
            self.change(version=version)
        self._published = self.record.version - self.record.initial_version
        self._retire(policy)

    def _retire(self, policy: Policy) -> None:
        needed = {self.record.initial_version, self.record.version, *(task.version for task in self._running.values())}
        mine = [version for version, record in policy.versions.items() if record.job == self.id]
        for version in mine:
            if version not in needed:
                self.tools.policies.retire(policy, version)

    def _point(self, update: int, last: Op) -> UpdatePoint:
        """Describe an update, whose last epoch is done."""
        if update < len(self._curve):
            return self._curve.points[update]
        if update in self._ahead:
            return self._ahead[update]
        pages = self._experience(update) or []
        episodes = [episode for page in pages for episode in page.episodes if has_ended(episode)]
        first = self.record.initial_version
        acted = min((page.version for page in pages if page.trajectories), default=first + update)
        return UpdatePoint(
            update=update,
            version=first + update + 1,
            episodes=len(episodes),
            steps=sum(episode.steps for episode in episodes),
            success=_mean([episode.success for episode in episodes]),
            reward=_mean([episode.reward for episode in episodes]),
            length=_mean([episode.steps for episode in episodes]),
            staleness=update - (acted - first),
            metrics=last.done.result.metrics if last.done is not None else {},
        )

    def _holes(self, policy: Policy) -> int:
        """Count vetoed epochs above the checkpoint: those below are forgotten."""
        count = 0
        for seq in range(policy.applied, max(policy.forgotten, self._first_step + self.record.resumed - 1), -1):
            op = policy.ops[seq]
            if op.record.kind == "publish":
                continue
            error = op.done.result.error if op.done else None
            if op.record.job != self.id or error is None or error.code is not ErrorCode.NON_FINITE:
                break
            count += 1
        return count

    # Ends

    def _park(self, policy: Policy, error: Failure) -> None:
        self._stop_rolling(list(self._running))
        self._next = 0
        super()._park(policy, error)

    def _release(self) -> None:
        self._stop_rolling(list(self._running))
        if self._describing is not None:
            self.tools.env.cancel([self._describing])
        curve = self._curve.close()
        self.tools.outbox.save([*([curve] if curve is not None else []), *self._drop(list(self._pages))])
        policy = self.tools.policies.find(self.tenant, self.policy_name)
        if policy is not None:
            self._retire(policy)
        super()._release()

    # Status

    def _missing(self) -> str:
        tools = self.tools
        policy = tools.policies.find(self.tenant, self.policy_name)
        env_is_there = tools.env.serves(simulator_need(self.tenant, self.spec.env))
        if policy is None or not self.record.first_seq:
            return whoever_serves(self.spec.env) if self._describing is not None and not env_is_there else ""
        if missing := self._missing_trainer(policy):
            return missing
        if not self._running:
            return ""
        return missing_inference(tools, policy.spec.backbone) if env_is_there else whoever_serves(self.spec.env)

    def _describe(self, basic: JobInfo, since: int, *, brief: bool) -> JobInfo:
        since = max(0, since)
        return msgspec.structs.replace(
            basic,
            done=len(self._curve),
            total=self._plan.updates,
            updates=() if brief else tuple(self._curve.points[since : since + _CURVE_POINTS]),
            samples=self._curve.samples,
            backbone_forwards=self._curve.forwards,
        )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
