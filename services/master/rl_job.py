"""An RL job: rollouts of the newest version and epochs over them, two loops that meet in the Training queue.

In: a simulator task, pages of finished episodes, outcomes of its ops. Out: rollouts as far ahead as tickets allow, ops
under the policy's sequence, a version for each update, the learning curve. Never: a page that is trained on twice or
left out, or a version kept that nobody needs any more.

A page of episodes goes when a checkpoint covers the last epoch of its update, in the transaction that writes the
update's point of the learning curve.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from common.journal.records import CurveRecord, JobRecord, OpRecord, PageRecord, Record
from joynexus.contract import Camera, why_unfit
from joynexus.specs import PolicySpec, PpoSpec, RlPolicy, RlSpec
from joynexus.wire import ErrorCode, Failure, failure
from joynexus.wire.back import DescribeSimulator, RlBegin, RlEpoch, SimulatorDescribed
from joynexus.wire.front import JobInfo, UpdatePoint
from services.master.checks import check_decisions, check_execute
from services.master.curve import LearningCurve, is_outcome
from services.master.driving_job import DrivingJob, check_recipe, to_be_created
from services.master.evaluation_jobs import missing_inference
from services.master.job import Tools, mismatch
from services.master.ops import Op
from services.master.outbox import refuse
from services.master.plan import PlannedOp, RlPlan, compile_rl, mean
from services.master.policy import Policy
from services.master.rollouts import Rollouts, episodes_of
from services.master.tasks import EnvAnswer, Task, simulator_need, whoever_serves

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
        plan = compile_rl(record.spec, rollout_episodes=tools.config.rollout_episodes)
        self._rollouts = Rollouts(self, record.spec, plan, self._page_finished)
        self._curve = LearningCurve(record.tenant, record.job)
        self._folded_seq = 0  # ops up to it were folded since the master started
        self._ahead: dict[int, UpdatePoint] = {}  # of updates that a checkpoint covers before their outcome is durable
        self._published = -1  # updates whose version is published
        self._describing: Task | None = None
        self._described: PolicySpec | None = None
        self._described_with: tuple[tuple[Camera, ...], int] = ((), 0)

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
            records += self._rollouts.drop_update(planned.update)
        curve = self._curve.fold(points, [op.done for op in epochs if op.done is not None])
        return records if curve is None else [curve, *records]

    def version_settled(self, version: int, error: Failure | None) -> None:
        """Inference has applied or refused a version: the one that served until now may not be needed any more."""
        super().version_settled(version, error)
        self._retire(self.tools.policies.get(self.tenant, self.policy_name))

    def pause(self) -> None:
        """Pages that no worker has begun are given out again later."""
        self._rollouts.pause()

    def restore_curve(self, record: CurveRecord) -> None:
        """Take a part of the curve back; they come in order."""
        self._curve.restore(record)
        for point in record.updates:
            self._rollouts.look_whether_to_stop(point.update, point.success)

    def restore_page(self, record: PageRecord) -> None:
        """Take a page back from the journal."""
        self._rollouts.restore(record)

    # Beginning

    def _start(self) -> None:
        spec = self.spec
        policy = self.tools.policies.find(self.tenant, spec.policy)
        if self._comes_later(policy, spec.create):
            return
        if policy is None or to_be_created(policy, spec.create):
            check_execute(spec.execute, spec.create.chunk, spec.policy)  # as it was not known before
            warm_up = 0 if spec.create.normalization == "none" else spec.warmup_episodes
            described = self._describe_simulator(spec.create.cameras, warm_up)
            if described is not None:
                check_decisions(spec, described.chunk, described.contract.episode_limit)
                self._create(described)
            return
        check_recipe(policy, spec.create)
        check_execute(spec.execute, policy.spec.chunk, policy.name)
        # Before anything of the policy changes: its optimizer starts anew with the first op.
        described = self._describe_simulator(policy.spec.contract.cameras, 0)
        if described is None:
            return
        limit = spec.episode_limit or policy.spec.contract.episode_limit or described.contract.episode_limit
        check_decisions(spec, policy.spec.chunk, limit)
        difference = why_unfit(policy.spec.contract, described.contract)
        if difference is not None:
            raise mismatch(f"policy '{policy.name}' does not fit '{spec.env}': {difference}")
        self._take(policy)

    def _describe_simulator(self, cameras: tuple[Camera, ...], warm_up: int) -> PolicySpec | None:
        """Return the policy that the task would have created, with the statistics of random actions; None until known.

        Args:
            cameras: pictures wanted.
            warm_up: episodes with random actions.
        """
        if self._describing is not None:
            return None
        if self._described is not None and self._described_with == (cameras, warm_up):
            return self._described
        self._described_with = (cameras, warm_up)  # a policy may have been made meanwhile, with pictures of its own
        spec = self.spec

        def make(task: str, attempt: int) -> DescribeSimulator:
            return DescribeSimulator(
                task=task,
                attempt=attempt,
                tenant=self.tenant,
                env=spec.env,
                cameras=cameras,
                episode_limit=spec.episode_limit,
                warmup_episodes=warm_up,
                seed=spec.first_seed,
                trace=self.id,
            )

        def done(answer: EnvAnswer) -> None:
            self._describing = None
            if not isinstance(answer, SimulatorDescribed) or answer.contract is None:
                self.fail(failure(ErrorCode.INTERNAL, f"an env worker did not describe '{spec.env}': see its log"))
                return
            fields = {name: getattr(spec.create, name) for name in RlPolicy.__struct_fields__ if name != "cameras"}
            self._described = PolicySpec(**fields, contract=answer.contract, statistics=answer.statistics)
            self.advance()

        self._describing = Task(
            tenant=self.tenant,
            policy=self.policy_name,
            job=self.id,
            need=simulator_need(self.tenant, spec.env),
            answer=SimulatorDescribed,
            make=make,
            done=done,
            failed=self.fail,
        )
        self.tools.env.submit(self._describing)
        return None

    # Rollouts

    def _produce(self, policy: Policy) -> None:
        if self._published >= 0:
            self._rollouts.produce(policy, self.record.initial_version, self._published, self._curve.folded)

    def _page_finished(self) -> None:
        self._retire(self.tools.policies.get(self.tenant, self.policy_name))
        self.advance()

    # Ops

    @property
    def _plan(self) -> RlPlan:
        return self._rollouts.plan

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
        pages = self._rollouts.of_update(planned.update)
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
            self.tools.outbox.save(self._rollouts.drop_all())
        for version in self._versions_of(policy):
            self._note_version(policy, version)

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
        served = self.tools.serving.newest(policy)  # until a worker has the newest one in memory
        needed = {self.record.initial_version, self.record.version, *self._rollouts.acting}
        for version in self._versions_of(policy):
            if version not in needed and not (served is not None and version == served.version):
                self.tools.policies.retire(policy, version)

    def _point(self, update: int, last: Op) -> UpdatePoint:
        """Describe an update, whose last epoch is done."""
        if update < len(self._curve):
            return self._curve.points[update]
        if update in self._ahead:
            return self._ahead[update]
        pages = self._rollouts.of_update(update) or []
        episodes = episodes_of(pages)
        first = self.record.initial_version
        acted = min((page.version for page in pages if page.trajectories), default=first + update)
        return UpdatePoint(
            update=update,
            version=first + update + 1,
            episodes=len(episodes),
            steps=sum(episode.steps for episode in episodes),
            success=mean([episode.success for episode in episodes]),
            reward=mean([episode.reward for episode in episodes]),
            length=mean([episode.steps for episode in episodes]),
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
        self._rollouts.stop()
        super()._park(policy, error)

    def _release(self) -> None:
        self._rollouts.stop()
        if self._describing is not None:
            self.tools.env.cancel([self._describing])
        curve = self._curve.close()
        records: list[Record] = [*([curve] if curve is not None else []), *self._rollouts.drop_all()]
        if records:
            self.tools.outbox.save(records)
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
        if not self._rollouts.acting:
            return ""
        return missing_inference(tools, policy.spec.backbone) if env_is_there else whoever_serves(self.spec.env)

    @property
    def newest(self) -> tuple[float, str]:
        """The rate of success of its last update."""
        return (self._curve.points[-1].success, "success") if self._curve.points else (0.0, "")

    @property
    def starved(self) -> bool:
        """Its trainer would go on, and waits for rollouts."""
        policy = self.tools.policies.find(self.tenant, self.policy_name)
        return bool(self._rollouts.acting) and policy is not None and policy.applied == policy.next_seq - 1

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
