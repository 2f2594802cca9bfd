"""The picture of the cluster, whole or cut to what one tenant may see.

In: `ViewCluster` and `ViewJob` of the dashboard and of health. Out: `ClusterView`, `JobInfo`. Never: anything of
another tenant in a tenant's picture, a change to anything, or a picture made more than once a second for all who look.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator

import msgspec

from joynexus.wire.back import (
    ClusterView,
    GroupRow,
    JobRow,
    PolicyRow,
    Rollout,
    UseRow,
    ViewCluster,
    ViewJob,
)
from services.master.acting import Acting
from services.master.demand import Demand
from services.master.env_queue import EnvQueue
from services.master.events import BackMessage
from services.master.job import Job
from services.master.jobs import Jobs
from services.master.metering import Meter
from services.master.outbox import Outbox, not_found
from services.master.policies import Policies
from services.master.policy import Policy
from services.master.reports import Reports
from services.master.roster import Roster
from services.master.serving import Serving
from services.master.supervision import Supervision
from services.master.tasks import lane_of
from services.master.training import Training
from services.master.viewers import Pass, Viewers

EVERY_S = 1.0
"""A picture is kept so long."""
SHOWN = 500
"""Jobs, policies, lanes and tenants in one picture: it is one message."""
_SCOPES = 64
"""Pictures kept."""
_MAX_MESSAGE = 300
_MINUTE_S, _MARK_S = 60.0, 5.0
_CHANGES = 16

Members = Counter[tuple[str, str]]
"""Rows, by tenant and policy."""


class Views:
    """Makes pictures.

    Attributes:
        money: gives what a tenant's month has cost and may cost, as text.
    """

    def __init__(
        self,
        outbox: Outbox,
        roster: Roster,
        policies: Policies,
        jobs: Jobs,
        training: Training,
        acting: Acting,
        env: EnvQueue,
        serving: Serving,
        meter: Meter,
        reports: Reports,
        viewers: Viewers,
        supervision: Supervision,
    ) -> None:
        self._outbox = outbox
        self._roster = roster
        self._policies = policies
        self._jobs = jobs
        self._training = training
        self._acting = acting
        self._env = env
        self._serving = serving
        self._meter = meter
        self._reports = reports
        self._viewers = viewers
        self._supervision = supervision
        self._demand = Demand(outbox, env, acting, training, jobs)
        self._kept: OrderedDict[str | None, ClusterView] = OrderedDict()
        self._progress = _Progress()
        self._spent: deque[tuple[float, dict[str, float]]] = deque()  # device seconds of tenants, now and then
        self.money: Callable[[str], tuple[str, str]] = lambda tenant: ("", "")

    # Messages

    def on_view(self, said: BackMessage, message: ViewCluster) -> None:
        """Describe the cluster: to health as a whole, else as far as the session may see it."""
        worker = self._roster.of(said)
        if message.session or worker.role != "health":
            seen = self._viewers.of(message.session)
            self._outbox.answer(said, self.cluster(None if seen.operator else seen.tenant))
        else:
            self._outbox.answer(said, self.cluster(None))

    def on_view_job(self, said: BackMessage, message: ViewJob) -> None:
        """Describe a job that the session may see."""
        self._roster.of(said)
        seen: Pass = self._viewers.of(message.session)
        job = self._jobs.find(message.tenant, message.job) if seen.operator or message.tenant == seen.tenant else None
        if job is None:
            raise not_found("job", message.job)
        self._outbox.answer(said, job.info(message.since))

    # Pictures

    def cluster(self, tenant: str | None) -> ClusterView:
        """Return the picture for a tenant, or the whole; what health goes by in that is of this moment."""
        kept = self._kept.get(tenant)
        if kept is None or not 0 <= self._outbox.now - kept.at < EVERY_S:
            kept = self._kept[tenant] = self._make(tenant)
        self._kept.move_to_end(tenant)
        if len(self._kept) > _SCOPES:
            self._kept.popitem(last=False)
        if tenant is not None:
            return kept
        told = self._supervision.told
        return msgspec.structs.replace(
            kept,
            roles=self._reports.roles(None),
            instances=told.instances,
            decisions=told.decisions,
            desired=told.desired,
        )

    def measured(self) -> ClusterView:
        """Return the whole picture with the use of all tenants, however many, and of the service itself (``)."""
        rows = (
            UseRow(tenant=name, trainer_s=use.trainer_s, inference_s=use.inference_s, env_s=use.env_s)
            for name, use in self._meter.totals().items()
        )
        return msgspec.structs.replace(self.cluster(None), use=tuple(rows))

    def _make(self, tenant: str | None) -> ClusterView:
        everything = tenant is None
        policies = list(self._policies.everywhere() if tenant is None else self._policies.of(tenant))
        jobs = list(self._jobs.every(tenant))
        return ClusterView(
            at=self._outbox.now,
            server=self._reports.server,
            uptime_s=self._reports.uptime_s,
            tenant=tenant or "",
            operator=everything,
            roles=self._reports.roles(tenant),
            lanes=tuple(self._reports.lanes(tenant, policies))[:SHOWN],
            groups=tuple(self._groups(tenant)),
            demand=tuple(self._demand.rows(policies)) if everything else (),
            jobs=tuple(map(self._job, heapq.nlargest(SHOWN, jobs, key=_newness))),
            jobs_total=len(jobs),
            policies=tuple(map(self._policy, heapq.nsmallest(SHOWN, policies, key=lambda policy: policy.key))),
            policies_total=len(policies),
            use=tuple(self._use(tenant)),
            recent=self._outbox.recent.of(tenant),
            counts=self._reports.counts() if everything else {},
        )

    def _job(self, job: Job) -> JobRow:
        info = job.info(brief=True)
        value, value_of = job.newest
        rate, eta_s = 0.0, 0.0
        if not job.ended:
            rate = self._progress.rate((job.tenant, job.id), info.done, info.seconds, self._outbox.now)
            eta_s = max(0, info.total - info.done) / rate if rate > 0 else 0.0
        return JobRow(
            tenant=job.tenant,
            job=info.job,
            policy=info.spec.policy,
            kind=str(info.spec.__struct_config__.tag),
            state=info.state,
            done=info.done,
            total=info.total,
            seconds=info.seconds,
            value=value,
            value_of=value_of,
            rate=rate,
            eta_s=eta_s,
            message=info.message[:_MAX_MESSAGE],
        )

    def _policy(self, policy: Policy) -> PolicyRow:
        newest = self._serving.newest(policy)
        return PolicyRow(
            tenant=policy.tenant,
            policy=policy.name,
            backbone=policy.spec.backbone,
            version=newest.version if newest else 0,
            versions_in_service=sum(not version.refused for version in policy.versions.values()),
            step=policy.step,
            resident=policy.resident,
            waiting=policy.next_seq - 1 - policy.applied,
            nbytes=self._training.nbytes(policy),
        )

    # Who shares what

    def _groups(self, tenant: str | None) -> Iterator[GroupRow]:
        """Describe what workers have now; to a tenant, that in which it has a part, without the others' names."""
        for worker, kind, members, since in self._pieces():
            if tenant is None:
                mine = members
            elif any(key[0] == tenant for key in members):
                mine = Members()
                for key, rows in members.items():
                    mine[key if key[0] == tenant else ("", "")] += rows
            else:
                continue
            listed = tuple((*key, rows) for key, rows in sorted(mine.items()))
            yield GroupRow(worker=worker, kind=kind, members=listed, since_s=max(0.0, self._outbox.now - since))

    def _pieces(self) -> Iterator[tuple[str, str, Members, float]]:
        for trainer in self._training.trainers():
            for task, items in trainer.groups.items():
                members = Members(item.trainee.policy.key for item in items.values())
                if task in trainer.worker.given and members:
                    yield trainer.name, "train", members, trainer.worker.given[task].since
        for _, _, stations in self._acting.by_backbone():
            for station in stations:
                for task, group in station.groups.items():
                    members = Members()
                    for request in group:
                        members[request.policy.key] += request.rows
                    yield station.worker.name, "act", members, station.worker.given[task].since
        for piece in self._env.at_work():
            if piece.worker is None:
                continue
            given = piece.worker.given[piece.id]
            episodes = len(given.message.seeds) if isinstance(given.message, Rollout) else 1
            kind = "rollout" if lane_of(piece.need) == "simulator" else "data"
            yield piece.worker.name, kind, Members({(piece.tenant, piece.policy): episodes}), given.since

    # Use

    def _use(self, tenant: str | None) -> Iterable[UseRow]:
        totals = self._meter.totals()
        now = {name: use.trainer_s + use.inference_s + use.env_s for name, use in totals.items()}
        before = self._a_minute_ago(now)
        names = sorted(filter(None, totals)) if tenant is None else [tenant]
        rows = []
        for name in names:
            if name in totals:
                use, (cost, budget) = totals[name], self.money(name)
                recent_s = max(0.0, now[name] - before.get(name, 0.0))
                rows.append(
                    UseRow(
                        tenant=name,
                        trainer_s=use.trainer_s,
                        inference_s=use.inference_s,
                        env_s=use.env_s,
                        recent_s=recent_s,
                        month_cost=cost,
                        budget=budget,
                    )
                )
        return rows if len(rows) <= SHOWN else heapq.nlargest(SHOWN, rows, key=lambda row: row.recent_s)

    def _a_minute_ago(self, now: dict[str, float]) -> dict[str, float]:
        """Return what `now` was then, or when somebody looked first; note what it is now."""
        at = self._outbox.now
        while len(self._spent) > 1 and self._spent[1][0] <= at - _MINUTE_S:
            self._spent.popleft()
        if not self._spent or at - self._spent[-1][0] >= _MARK_S:
            self._spent.append((at, now))
        return self._spent[0][1]


class _Progress:
    """How fast jobs go on, from what was seen of them."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str], deque[tuple[float, int]]] = OrderedDict()

    def rate(self, job: tuple[str, str], done: int, seconds: float, now: float) -> float:
        """Return how much is done in a second: of late, or since it began if nothing was seen of it yet."""
        seen = self._seen.setdefault(job, deque(maxlen=_CHANGES))
        self._seen.move_to_end(job)
        if len(self._seen) > 2 * SHOWN:
            self._seen.popitem(last=False)
        if not seen or seen[-1][1] != done:
            if seen and done < seen[-1][1]:
                seen.clear()  # a restart took it back
            seen.append((now, done))
        if len(seen) == 1:
            return done / seconds if seconds > 0 else 0.0
        (first_at, first), (last_at, last) = seen[0], seen[-1]
        mean_gap = (last_at - first_at) / (len(seen) - 1)
        until = max(last_at, now - mean_gap)  # one that stands still slows down
        return (last - first) / (until - first_at) if until > first_at else 0.0


def _newness(job: Job) -> tuple[float, int]:
    return job.record.accepted_s, job.record.number
