"""Status: who is there, what waits, as far as the asker may see.

In: `Status` requests of tenants, operators and the health service. Out: `ClusterStatus`. Never: another tenant's lanes
to a tenant, or a change to anything. (This one may scan: people ask, a few times a second.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from joynexus.wire.front import ClusterStatus, LaneStatus, Status
from services.master.acting import Acting
from services.master.events import BackMessage, FrontMessage
from services.master.jobs import Jobs
from services.master.outbox import Outbox
from services.master.policies import Policies, Policy
from services.master.roster import Roster
from services.master.serving import Serving
from services.master.tasks import EnvQueue
from services.master.training import Training


class Reports:
    """Describes the cluster."""

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
    ) -> None:
        self._outbox = outbox
        self._server = server
        self._started = started
        self._roster = roster
        self._policies = policies
        self._jobs = jobs
        self._training = training
        self._acting = acting
        self._env = env
        self._serving = serving

    def on_status(self, asked: FrontMessage | BackMessage, message: Status) -> None:
        """Describe roles to all; lanes, policies and jobs of the asker, or of all to operators and workers."""
        everything = isinstance(asked, BackMessage) or asked.operator
        tenant = None if isinstance(asked, BackMessage) or everything else asked.tenant
        policies = list(self._policies.everywhere() if tenant is None else self._policies.of(tenant))
        status = ClusterStatus(
            server=self._server,
            uptime_s=self._outbox.now - self._started,
            roles=self._roster.status(),
            lanes=tuple(self._lanes(tenant, policies)),
            policies=len(policies),
            jobs_running=self._jobs.running(tenant),
            versions_in_service=self._serving.count(tenant),
        )
        self._outbox.answer(asked, status)

    def _lanes(self, tenant: str | None, policies: Iterable[Policy]) -> Iterable[LaneStatus]:
        waiting: Counter[str] = Counter()
        running: Counter[str] = Counter()
        for policy in policies:
            unanswered = policy.next_seq - 1 - policy.applied
            with_trainer = min(unanswered, self._training.running(policy))
            running[policy.tenant] += with_trainer
            waiting[policy.tenant] += unanswered - with_trainer
        for name in sorted(waiting):
            if waiting[name] or running[name]:
                yield LaneStatus(queue="training", tenant=name, waiting=waiting[name], running=running[name])
        for name in sorted(self._acting.tenants()):
            if tenant in (None, name):
                counts = self._acting.waiting(name), self._acting.running(name)
                yield LaneStatus(queue="inference", tenant=name, waiting=counts[0], running=counts[1])
        for name in sorted(self._env.tenants()):
            if tenant in (None, name):
                counts = self._env.waiting(name), self._env.running_of(name)
                yield LaneStatus(queue="env", tenant=name, waiting=counts[0], running=counts[1])
