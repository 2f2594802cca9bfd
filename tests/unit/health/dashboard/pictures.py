"""Pictures of clusters for tests of the dashboard, and a source that shows them without a master."""

from __future__ import annotations

import math

import msgspec

from joynexus.specs import RlSpec, SftSpec
from joynexus.wire import ErrorCode, JoyNexusError, failure
from joynexus.wire.back import (
    ClusterView,
    Decision,
    DemandRow,
    GroupRow,
    InstanceRow,
    JobRow,
    PolicyRow,
    RecentRow,
    UseRow,
    Viewer,
)
from joynexus.wire.front import JobInfo, LaneStatus, RoleStatus, UpdatePoint

AT = 1_796_047_402.0
TENANTS = ("arm-lab", "kitchen", "warehouse", "wheels")
WANTED = "13 pieces wait, the oldest for 13.6 s, and a trainer waits for them"
DISK = "the journal's disk took no record for 2 s: ops were refused meanwhile"
BUDGET = "kitchen has used 80 % of its budget of this month"
STATES = ("running", "running", "waiting", "succeeded", "succeeded", "succeeded", "failed", "cancelled", "parked")
KINDS = ("sft", "rl", "evaluate", "pipeline")


def job_row(number: int, at: float = AT) -> JobRow:
    """The `number`th of many jobs: all kinds and states, of all tenants."""
    kind, state = KINDS[number % len(KINDS)], STATES[number % len(STATES)]
    total = {"sft": 2000, "rl": 60, "evaluate": 100, "pipeline": 3}[kind]
    done = total if state == "succeeded" else 0 if state == "waiting" else (37 * (number + 1) + int(at - AT)) % total
    rate = {"sft": 11.5, "rl": 0.021, "evaluate": 0.4, "pipeline": 0.01}[kind] if state == "running" else 0.0
    loss = 0.04 + 0.9 * math.exp(-done / 400)
    return JobRow(
        tenant=TENANTS[number % len(TENANTS)],
        job=f"job-{1000 - number}",
        policy=("pick-place", "drawer", "reach-ppo", "peg-insert")[number % 4],
        kind=kind,
        state=state,
        done=done,
        total=total,
        seconds=40.0 + 13 * number,
        value=loss if kind == "sft" else done / total if kind != "pipeline" else 0.0,
        value_of="" if state == "waiting" or kind == "pipeline" else "loss" if kind == "sft" else "success",
        rate=rate,
        eta_s=(total - done) / rate if rate else 0.0,
        message={
            "waiting": "it waits for an env worker that serves metaworld",
            "parked": "three steps in a row were vetoed: the loss was not finite; resume or cancel it",
            "failed": "the data set 'drawer-v2' has no episode that can be read",
        }.get(state, ""),
    )


def cluster(at: float = AT, *, jobs: int = 24) -> ClusterView:
    """Four tenants at work, as an operator sees it."""
    since = at - AT
    return ClusterView(
        at=at,
        server="joynexus 0.1.0",
        uptime_s=93_784.0 + since,
        tenant="",
        operator=True,
        roles=(
            role(
                "trainer",
                "trainer-1",
                "working",
                0.71,
                "host/trainer",
                {"backbone": "lite", "device": "cpu", "dtype": "float32"},
            ),
            role(
                "inference",
                "inference-1",
                "working",
                0.43,
                "host/inference",
                {"backbone": "lite", "device": "cpu", "dtype": "float32"},
            ),
            role("env", "env-1", "working", 0.88, "host/env", {"simulators": "metaworld"}),
            role("env", "env-2", "loading", 0.12, "host/env-2", {"simulators": "metaworld"}),
            role("env", "env-3", "lost", 0.0, "host/env-3", {"simulators": "maniskill"}),
            role("health", "health-1", "idle", 0.01, "host/health", {}),
            role("dashboard", "dashboard-1", "working", 0.02, "host/dashboard", {}),
        ),
        instances=(
            InstanceRow(name="master", role="master", state="running", pid=4100),
            InstanceRow(name="trainer", instance="host/trainer", role="trainer", state="running", pid=4101),
            InstanceRow(
                name="env",
                instance="host/env",
                role="env",
                state="running",
                restarts=2,
                reason="it exited with code 124 (its watchdog found it wedged)",
                pid=4103,
            ),
            InstanceRow(name="env-3", instance="host/env-3", role="env", state="restarting", restarts=1, pid=0),
        ),
        lanes=tuple(
            LaneStatus(
                queue=queue,
                tenant=tenant,
                waiting=waiting,
                running=1 + index % 3,
                weight=2.0 if tenant == "kitchen" else 1.0,
                priority=1 if tenant == "wheels" and queue == "env" else 0,
                used_s=1234.5 * (index + 1) + since,
                oldest_s=1.7 * waiting,
            )
            for index, (queue, tenant, waiting) in enumerate(
                [
                    ("training", TENANTS[0], 12),
                    ("training", TENANTS[1], 3),
                    ("training", TENANTS[2], 0),
                    ("inference", TENANTS[0], 2),
                    ("inference", TENANTS[3], 0),
                    ("env", TENANTS[1], 5),
                    ("env", TENANTS[3], 8),
                ]
            )
        ),
        groups=(
            GroupRow(
                worker="trainer-1",
                kind="train",
                members=(("arm-lab", "pick-place", 4), ("kitchen", "drawer", 2), ("warehouse", "totes", 2)),
                since_s=0.4,
            ),
            GroupRow(
                worker="inference-1",
                kind="act",
                members=(("arm-lab", "reach-ppo", 5), ("wheels", "dock", 3)),
                since_s=0.0,
            ),
            GroupRow(worker="env-1", kind="rollout", members=(("wheels", "dock", 4),), since_s=11.8),
        ),
        demand=(
            DemandRow(
                group="env:metaworld",
                role="env",
                need="metaworld",
                workers=2,
                credit=4,
                running=4,
                waiting=13,
                oldest_s=13.6,
                cost_s=6.1,
                starved=True,
            ),
            DemandRow(group="env:maniskill", role="env", need="maniskill", workers=1, credit=2, running=0, waiting=0),
            DemandRow(
                group="inference:lite",
                role="inference",
                need="lite",
                workers=1,
                credit=8,
                running=2,
                waiting=2,
                oldest_s=0.1,
                cost_s=0.05,
            ),
        ),
        desired={"env": 4, "env-maniskill": 1, "inference": 1, "trainer": 1},
        decisions=(
            Decision(at=AT - 184, group="env", before=1, after=2, reason="9 pieces wait, the oldest for 7.2 s"),
            Decision(at=AT - 12, group="env", before=2, after=4, reason=WANTED),
        ),
        jobs=tuple(job_row(number, at) for number in range(jobs)),
        jobs_total=jobs,
        policies=tuple(
            PolicyRow(
                tenant=tenant,
                policy=policy,
                backbone="lite",
                version=index,
                versions_in_service=min(index, 2),
                step=400 * index,
                resident=index % 2 == 0,
                waiting=index % 3,
                nbytes=2_500_000 * (index + 1),
            )
            for index, (tenant, policy) in enumerate(
                (tenant, policy) for tenant in TENANTS for policy in ("drawer", "pick-place", "reach-ppo")
            )
        ),
        policies_total=12,
        use=(
            UseRow(
                tenant="arm-lab",
                trainer_s=5210.0 + since,
                inference_s=804.0,
                env_s=1630.0,
                recent_s=31.4,
                month_cost="18.20 EUR",
                budget="50.00 EUR",
            ),
            UseRow(
                tenant="kitchen",
                trainer_s=2105.0,
                inference_s=310.0,
                env_s=2960.0,
                recent_s=22.0,
                month_cost="9.75 EUR",
                budget="10.00 EUR",
            ),
            UseRow(
                tenant="warehouse", trainer_s=980.0, inference_s=45.0, env_s=120.0, recent_s=4.2, month_cost="3.10 EUR"
            ),
            UseRow(
                tenant="wheels", trainer_s=410.0, inference_s=1210.0, env_s=2015.0, recent_s=17.9, month_cost="7.44 EUR"
            ),
        ),
        recent=(
            RecentRow(at=AT - 6120, level="warning", event="budget_nearly_used", tenant="kitchen", text=BUDGET),
            RecentRow(at=AT - 184, level="error", event="disk_full", text=DISK),
            RecentRow(at=AT - 31, level="warning", event="worker_lost", text="env-3 is lost: silent for 6 s"),
        ),
        counts={"handshake": 2, "malformed": 1},
    )


def role(role: str, worker: str, phase: str, busy: float, instance: str, detail: dict[str, str]) -> RoleStatus:
    """A worker that is up for an hour."""
    return RoleStatus(
        role=role,
        worker=worker,
        phase=phase,
        progress=1,
        busy_s=3600 * busy,
        uptime_s=3600,
        instance=instance,
        detail=detail,
    )


def of_tenant(view: ClusterView, tenant: str) -> ClusterView:
    """What the master would show of it to one tenant."""
    return msgspec.structs.replace(
        view,
        tenant=tenant,
        operator=False,
        roles=tuple(
            RoleStatus(
                role=row.role, worker=row.worker, phase=row.phase, progress=0, busy_s=0, uptime_s=0, detail=row.detail
            )
            for row in view.roles
        ),
        instances=(),
        decisions=(),
        demand=(),
        desired={},
        lanes=tuple(row for row in view.lanes if row.tenant == tenant),
        groups=tuple(
            msgspec.structs.replace(
                row,
                members=(
                    *(member for member in row.members if member[0] == tenant),
                    ("", "", sum(rows for owner, _, rows in row.members if owner != tenant)),
                ),
            )
            for row in view.groups
        ),
        jobs=tuple(row for row in view.jobs if row.tenant == tenant),
        jobs_total=sum(row.tenant == tenant for row in view.jobs),
        policies=tuple(row for row in view.policies if row.tenant == tenant),
        policies_total=sum(row.tenant == tenant for row in view.policies),
        use=tuple(row for row in view.use if row.tenant == tenant),
        recent=tuple(row for row in view.recent if row.tenant == tenant),
        counts={},
    )


def sft(done: int, *, since: int = 0, total: int = 2000, state: str = "running") -> JobInfo:
    """A training job; its loss falls, with noise."""
    losses = [0.05 + 0.9 * math.exp(-step / 300) * (1 + 0.15 * math.sin(1.7 * step)) for step in range(done)]
    return JobInfo(
        job="job-1000",
        spec=SftSpec(policy="pick-place", dataset="drawer-v2", steps=total, batch_size=32),
        state=state,  # type: ignore[arg-type]  # a literal, of the caller's choice
        done=done,
        total=total,
        losses=tuple(losses[since:]),
        initial_version=1,
        version=1,
        samples=32 * done,
        backbone_forwards=9 * done,
        seconds=done / 11.5,
    )


def rl(done: int, *, since: int = 0, total: int = 60) -> JobInfo:
    """A job of reinforcement learning that gets better."""
    updates = [
        UpdatePoint(
            update=number,
            version=number + 2,
            episodes=32,
            steps=1600,
            success=min(0.97, 0.04 + number / 45),
            reward=80 + 12 * number + 20 * math.sin(number),
            length=120.0,
        )
        for number in range(done)
    ]
    return JobInfo(
        job="job-999",
        spec=RlSpec(policy="reach-ppo", env="metaworld/reach-v3", updates=total),
        state="running",
        done=done,
        total=total,
        updates=tuple(updates[since:]),
        version=done + 1,
        samples=1600 * done,
        seconds=48.0 * done,
    )


def refused(code: ErrorCode, message: str = "no") -> JoyNexusError:
    """What the master answers instead."""
    return JoyNexusError(failure(code, message))


class FakeSource:
    """Answers from pictures that a test sets.

    Attributes:
        whole: what operators see; `at` of it is the time of the picture.
        sessions: tenant of each valid session; empty: an operator's.
        codes: session of each code that is good.
        jobs: by tenant and name.
        failing: raised instead of any answer.
        asked: sessions that asked for the cluster, in order.
        since: from where each curve was asked for.
    """

    def __init__(self) -> None:
        self.whole = cluster()
        self.sessions = {"operator": "", "arm": "arm-lab", "kitchen": "kitchen"}
        self.codes = {"open-sesame": "operator", "arm-code": "arm"}
        self.jobs: dict[tuple[str, str], JobInfo] = {("arm-lab", "job-1000"): sft(700), ("kitchen", "job-999"): rl(31)}
        self.failing: JoyNexusError | None = None
        self.asked: list[str] = []
        self.since: list[int] = []

    async def view(self, session: str) -> ClusterView:
        """Show the cluster."""
        self.asked.append(session)
        tenant = self._tenant(session)
        return of_tenant(self.whole, tenant) if tenant else self.whole

    async def job(self, session: str, tenant: str, job: str, since: int) -> JobInfo:
        """Show a job."""
        self.since.append(since)
        who = self._tenant(session)
        info = self.jobs.get((tenant, job))
        if info is None or who not in ("", tenant):
            raise refused(ErrorCode.NOT_FOUND)
        return msgspec.structs.replace(info, losses=info.losses[since:], updates=info.updates[since:])

    async def redeem(self, code: str) -> Viewer:
        """Let somebody in, once."""
        if self.failing is not None:
            raise self.failing
        session = self.codes.pop(code, None)
        if session is None:
            raise refused(ErrorCode.NOT_FOUND)
        tenant = self.sessions[session]
        return Viewer(session=session, tenant=tenant, operator=not tenant, valid_s=43_200.0)

    async def close(self, session: str) -> None:
        """End a session."""
        self.sessions.pop(session, None)

    def _tenant(self, session: str) -> str:
        if self.failing is not None:
            raise self.failing
        if session not in self.sessions:
            raise refused(ErrorCode.FORBIDDEN)
        return self.sessions[session]
