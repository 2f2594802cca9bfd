"""Status: who is there, what waits, as far as the asker may see.

In: `Status` requests of tenants, operators and the health service. Out: `ClusterStatus`. Never: another tenant's lanes
to a tenant, a figure of a shared role from which it could tell what others do, or a change to anything. (This one may
scan: people ask, a few times a second.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from joynexus.wire.front import ClusterStatus, LaneStatus, RoleStatus, Status
from services.master.acting import Acting
from services.master.env_queue import EnvQueue
from services.master.events import BackMessage, FrontMessage
from services.master.hosted import Hosts
from services.master.jobs import Jobs
from services.master.lanes import Counters
from services.master.outbox import Outbox
from services.master.policies import Policies
from services.master.policy import Policy
from services.master.roster import Roster
from services.master.serving import Serving
from services.master.supervision import Supervision
from services.master.training import Training

Counts = Callable[[], Mapping[str, int]]
"""Gives counts by kind, as they are now."""


class Reports:
    """Describes the cluster.

    Args:
        counters: use by tenant, by queue.
        counts: gives what was refused or failed so far, by kind.

    Attributes:
        server: name of the cluster.
    """

    def __init__(
        self,
        outbox: Outbox,
        server: str,
        started: float,
        roster: Roster,
        policies: Policies,
        jobs: Jobs,
        training: Training,
        acting: Acting,
        env: EnvQueue,
        serving: Serving,
        hosts: Hosts,
        supervision: Supervision,
        counters: Mapping[str, Counters],
        counts: Counts,
    ) -> None:
        self._outbox = outbox
        self.server = server
        self._started = started
        self._roster = roster
        self._policies = policies
        self._jobs = jobs
        self._training = training
        self._acting = acting
        self._env = env
        self._serving = serving
        self._hosts = hosts
        self._supervision = supervision
        self._counters = counters
        self._counts = counts

    def on_status(self, asked: FrontMessage | BackMessage, message: Status) -> None:
        """Describe roles, hosts, lanes, policies and jobs: all to operators and workers, a tenant's own to it.

        Of the roles, which all tenants share, a tenant sees what they offer.
        """
        everything = isinstance(asked, BackMessage) or asked.operator
        tenant = None if isinstance(asked, BackMessage) or everything else asked.tenant
        policies = list(self._policies.everywhere() if tenant is None else self._policies.of(tenant))
        status = ClusterStatus(
            server=self.server,
            uptime_s=self.uptime_s,
            roles=self.roles(tenant),
            lanes=tuple(self.lanes(tenant, policies)),
            policies=len(policies),
            jobs_running=self._jobs.running(tenant),
            versions_in_service=self._serving.count(tenant),
            policies_resident=sum(policy.resident for policy in policies),
            counts=self.counts() if tenant is None else {},
        )
        self._outbox.answer(asked, status)

    @property
    def uptime_s(self) -> float:
        """Seconds since the master started."""
        return self._outbox.now - self._started

    def counts(self) -> dict[str, int]:
        """Return what was refused or failed so far, by kind."""
        return dict(self._counts())

    def roles(self, tenant: str | None) -> tuple[RoleStatus, ...]:
        """Describe workers and hosts: to a tenant what it may use, or all with their figures."""
        roles = self._roster.status(self._supervision.by_instance()) if tenant is None else self._roster.offers()
        return (*roles, *self._hosts.status(tenant))

    def lanes(self, tenant: str | None, policies: Iterable[Policy]) -> Iterator[LaneStatus]:
        """Describe a tenant's lanes, or all; `policies` are theirs."""
        yield from self._training_lanes(policies)
        for queue, part in (("inference", self._acting), ("env", self._env)):
            for name in sorted(part.tenants()):
                if tenant in (None, name):
                    yield self._lane(queue, name, part.waiting(name), part.running(name), part.oldest(name))

    def _training_lanes(self, policies: Iterable[Policy]) -> Iterable[LaneStatus]:
        waiting: Counter[str] = Counter()
        running: Counter[str] = Counter()
        oldest: dict[str, float] = {}
        for policy in policies:
            unanswered = policy.next_seq - 1 - policy.applied
            with_trainer = min(unanswered, self._training.running(policy))
            running[policy.tenant] += with_trainer
            waiting[policy.tenant] += unanswered - with_trainer
            if unanswered > with_trainer:
                since = policy.ops[policy.applied + with_trainer + 1].since or self._started
                oldest[policy.tenant] = min(since, oldest.get(policy.tenant, since))
        for name in sorted(waiting):
            if waiting[name] or running[name]:
                yield self._lane("training", name, waiting[name], running[name], oldest.get(name))

    def _lane(self, queue: str, tenant: str, waiting: int, running: int, oldest: float | None) -> LaneStatus:
        counters = self._counters[queue]
        return LaneStatus(
            queue=queue,
            tenant=tenant,
            waiting=waiting,
            running=running,
            weight=counters.weight(tenant),
            priority=counters.priority(tenant),
            used_s=max(0.0, counters.seconds(tenant)),
            oldest_s=0.0 if oldest is None else self._outbox.now - oldest,
        )
