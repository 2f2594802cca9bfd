"""The picture of the cluster: what the dashboard shows, what scaling goes by, and what health knows of processes.

The master makes the picture, and cuts it to what a viewer may see. Whoever shows it has no rights of its own: it hands
on the session of the person who looks.
"""

from __future__ import annotations

from joynexus.bounds import Few, Short, Table, Text
from joynexus.wire.base import Wire
from joynexus.wire.front import LaneStatus, RoleStatus


class RedeemCode(Wire, frozen=True, kw_only=True):
    """Somebody came to the dashboard with this code. Answer: `Viewer`; `NOT_FOUND` if it is wrong, used or too old."""

    code: Short


class Viewer(Wire, frozen=True, kw_only=True):
    """Who looks.

    Attributes:
        session: unguessable; whoever has it sees what this viewer may see.
        tenant: whose work they see.
        operator: they see everybody's.
        valid_s: how long the session lasts, if neither the key is revoked nor the master started anew before.
    """

    session: str
    tenant: str
    operator: bool
    valid_s: float


class CloseSession(Wire, frozen=True, kw_only=True):
    """The viewer has gone: end the session. Answer: `BeatAck`, also for one that has ended already."""

    session: Short


class ViewCluster(Wire, frozen=True, kw_only=True):
    """How is everything? Answer: `ClusterView` of what the session may see; `FORBIDDEN` if the session is over.

    Health asks without a session, and sees the whole.
    """

    session: Short = ""


class ViewJob(Wire, frozen=True, kw_only=True):
    """How is a job? As `GetJob` of the session's tenant, or of any tenant for an operator. Answer: `JobInfo`."""

    session: Short
    tenant: Short
    job: Short
    since: int = 0


class InstanceRow(Wire, frozen=True, kw_only=True):
    """One process, as health knows it.

    Attributes:
        name: what health calls it, e.g. `trainer-2` or a container's name.
        instance: what it registers with; empty if that is not known.
        state: `starting`, `running`, `restarting`, `crash-loop` or `leaving`.
        restarts: since health has known it.
        reason: why it was last restarted, in a clause.
        pid: of its process, where that means something to people; else 0.
    """

    name: Short
    instance: Short = ""
    role: Short = ""
    state: Short = ""
    restarts: int = 0
    reason: Text = ""
    pid: int = 0


class Decision(Wire, frozen=True, kw_only=True):
    """Scaling changed how many processes are wanted.

    Attributes:
        at: when, in seconds since the Unix epoch.
        group: as in `DemandRow`.
        before, after: processes wanted.
        reason: one sentence.
    """

    at: float
    group: Short
    before: int
    after: int
    reason: Text


class Supervised(Wire, frozen=True, kw_only=True):
    """All that health knows; each one takes the place of the one before. Answer: `BeatAck`.

    Attributes:
        instances: the processes that it looks after.
        decisions: the last ones, oldest first.
        desired: processes wanted, by group.
    """

    instances: Few[InstanceRow] = ()
    decisions: Few[Decision] = ()
    desired: Table[int] = {}


class GroupRow(Wire, frozen=True, kw_only=True):
    """Who shares a worker's backbone or processes now: one piece of work.

    Attributes:
        kind: `train`, `act`, `rollout` or `data`.
        members: tenant, policy, and rows: ops of a training group, rows to act on, episodes; 1 of a data set. To a
            tenant, others are one member without names.
        since_s: how long the worker has had it.
    """

    worker: str
    kind: str
    members: tuple[tuple[str, str, int], ...]
    since_s: float = 0.0


class DemandRow(Wire, frozen=True, kw_only=True):
    """What waits for workers of one kind.

    Attributes:
        group: `env:<simulator family>`, `env:datasets`, `inference:<backbone>` or `training:<backbone>`.
        role: of the workers.
        need: what they must serve.
        workers, credit: that serve it and take new work, and the pieces (of requests to act: groups) that these take at
            once.
        running, waiting: pieces of work: tasks, requests to act, ops.
        oldest_s: how long the oldest of those that wait has waited.
        cost_s: seconds that a piece takes a worker; 0 while nobody knows.
        starved: a trainer would go on, and waits for this.
    """

    group: str
    role: str
    need: str
    workers: int = 0
    credit: int = 0
    running: int = 0
    waiting: int = 0
    oldest_s: float = 0.0
    cost_s: float = 0.0
    starved: bool = False


class JobRow(Wire, frozen=True, kw_only=True):
    """A job in one line.

    Attributes:
        kind: `sft`, `rl`, `evaluate`, `evaluate_dataset` or `pipeline`.
        state, done, total, seconds, message: as in `JobInfo`.
        value, value_of: its newest number, and what that is: `loss`, `success`, or empty if there is none yet.
        rate: of `done`, per second, since it began; 0 while that is not known.
        eta_s: seconds until it is done at that rate; 0 while that is not known.
    """

    tenant: str
    job: str
    policy: str
    kind: str
    state: str
    done: int = 0
    total: int = 0
    seconds: float = 0.0
    value: float = 0.0
    value_of: str = ""
    rate: float = 0.0
    eta_s: float = 0.0
    message: str = ""


class PolicyRow(Wire, frozen=True, kw_only=True):
    """A policy in one line.

    Attributes:
        version: the newest that serves; 0 if none does.
        versions_in_service: versions that may be asked to act.
        step: optimizer steps applied.
        resident: it is in a trainer's memory.
        waiting: ops not answered yet.
        nbytes: that it takes there.
    """

    tenant: str
    policy: str
    backbone: str
    version: int = 0
    versions_in_service: int = 0
    step: int = 0
    resident: bool = False
    waiting: int = 0
    nbytes: int = 0


class UseRow(Wire, frozen=True, kw_only=True):
    """What a tenant uses.

    Attributes:
        trainer_s, inference_s, env_s: since the first day, as in `UsageLine`.
        recent_s: device seconds of the last minute.
        month_cost, budget: of this month, with their currency; empty without prices, or without a budget.
    """

    tenant: str
    trainer_s: float = 0.0
    inference_s: float = 0.0
    env_s: float = 0.0
    recent_s: float = 0.0
    month_cost: str = ""
    budget: str = ""


class RecentRow(Wire, frozen=True, kw_only=True):
    """Something that went wrong lately.

    Attributes:
        at: when, in seconds since the Unix epoch.
        level: `warning` or `error`.
        event: its short name in the log.
        tenant: whose work it concerns; empty if nobody's alone.
        text: what happened.
    """

    at: float
    level: str
    event: str
    tenant: str = ""
    text: str = ""


class ClusterView(Wire, frozen=True, kw_only=True):
    """The cluster at one moment. A tenant's holds nothing of others: no name, no figure but how full shared queues are.

    Attributes:
        at: when, in seconds since the Unix epoch.
        tenant: whose view it is; empty for the whole.
        operator: of the viewer.
        instances, decisions, desired: as health told last; empty without health, and to tenants.
        jobs: the newest first, at most 500; `jobs_total` says of how many.
        policies: by name, at most 500; `policies_total` says of how many.
        recent: oldest first.
        counts: as in `ClusterStatus`.
    """

    at: float
    server: str
    uptime_s: float
    tenant: str = ""
    operator: bool = False
    roles: tuple[RoleStatus, ...] = ()
    instances: tuple[InstanceRow, ...] = ()
    lanes: tuple[LaneStatus, ...] = ()
    groups: tuple[GroupRow, ...] = ()
    demand: tuple[DemandRow, ...] = ()
    desired: dict[str, int] = {}
    decisions: tuple[Decision, ...] = ()
    jobs: tuple[JobRow, ...] = ()
    jobs_total: int = 0
    policies: tuple[PolicyRow, ...] = ()
    policies_total: int = 0
    use: tuple[UseRow, ...] = ()
    recent: tuple[RecentRow, ...] = ()
    counts: dict[str, int] = {}
