"""Versions on their way into service: offered to every inference worker of their backbone, applied or refused.

In: published versions, `WeightsApplied`, `WeightsRefused`. Out: `WeightsOffer`, and word to the jobs that wait. Never:
a version that acts taken out of service: a newer one stands beside it, and a refused one changes nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable

import msgspec

from common.journal.records import VersionRecord
from joynexus.wire import ErrorCode, Failure
from joynexus.wire.back import WeightsApplied, WeightsOffer, WeightsRefused
from services.master.config import CoreConfig
from services.master.events import BackMessage
from services.master.metering import LOADING, Meter
from services.master.outbox import Outbox, refuse
from services.master.policies import Policies
from services.master.policy import Policy, PolicyKey
from services.master.roster import Roster
from services.master.worker import Worker

VersionKey = tuple[str, str, int]
"""Tenant, policy, version."""

_REMEMBERED = 64
"""Policies whose newest version the next worker of a backbone is offered; all else it loads when it is asked for."""


class InService(msgspec.Struct):
    """The newest version of a policy that is in memory somewhere, and the workers that have it."""

    version: int
    workers: set[str]


class Serving:
    """Which versions are in memory where.

    Attributes:
        settled: called with a policy and version when inference has applied it, refused it (with the failure), or
            when nobody is left who could.
    """

    def __init__(self, outbox: Outbox, roster: Roster, policies: Policies, config: CoreConfig, meter: Meter) -> None:
        self._outbox = outbox
        self._meter = meter
        self._config = config
        self._roster = roster
        self._policies = policies
        self._serving: dict[PolicyKey, InService] = {}
        self._with: defaultdict[str, set[PolicyKey]] = defaultdict(set)  # worker -> policies that it serves
        self._offered: dict[VersionKey, VersionRecord] = {}  # to workers that live, and nobody has answered
        self._unserved: defaultdict[str, OrderedDict[PolicyKey, Policy]] = defaultdict(OrderedDict)  # by backbone
        self._faults: Counter[VersionKey] = Counter()
        self.settled: Callable[[Policy, int, Failure | None], None] = lambda policy, version, error: None
        roster.add_staff("inference", self)

    def count(self, tenant: str | None) -> int:
        """Number of policies with a version in service, of one tenant or of all (for status)."""
        return sum(tenant in (None, key[0]) for key in self._serving)

    def offer(self, policy: Policy, version: VersionRecord) -> None:
        """A version is durable: offer it to all who serve its backbone."""
        workers = self._workers(policy.spec.backbone)
        if not workers:
            self._remember(policy)
            return
        self._offered[*policy.key, version.version] = version
        for worker in workers:
            self._send(worker, version)

    def pending(self, policy: Policy, version: int) -> bool:
        """Tell whether somebody may still apply this version, and nobody has."""
        return (*policy.key, version) in self._offered

    def newest(self, policy: Policy) -> VersionRecord | None:
        """The newest version in service; where none is, the newest that was published: it has to be loaded anyway."""
        served = self._serving.get(policy.key)
        version = policy.versions.get(served.version) if served else None
        return version if version is not None and not version.refused else policy.newest

    def withdraw(self, policy: Policy, version: int) -> None:
        """A version is gone: offer it to nobody any more."""
        self._offered.pop((*policy.key, version), None)
        self._faults.pop((*policy.key, version), None)

    def forget(self, policy: Policy) -> None:
        """A policy is deleted: none of its versions serves any more."""
        self._serving.pop(policy.key, None)
        for served in self._with.values():
            served.discard(policy.key)
        self._unserved[policy.spec.backbone].pop(policy.key, None)

    # Messages

    def on_applied(self, said: BackMessage, message: WeightsApplied) -> None:
        """A worker has a version in memory."""
        worker = self._roster.of(said)
        if _offer_id(message) in worker.given:  # not said again
            self._meter.worked(worker, LOADING, {"inference_s": message.busy_s})
        self._roster.take(worker, _offer_id(message))
        policy = self._policies.find(message.tenant, message.policy)
        if policy is None or message.version not in policy.versions:
            return
        key = (*policy.key, message.version)
        self._offered.pop(key, None)
        self._faults.pop(key, None)
        served = self._serving.get(policy.key)
        if served is None or served.version < message.version:
            served = self._serving[policy.key] = InService(message.version, set())
        if served.version == message.version:
            served.workers.add(worker.name)
            self._with[worker.name].add(policy.key)
        self.settled(policy, message.version, None)

    def on_refused(self, said: BackMessage, message: WeightsRefused) -> None:
        """A worker cannot use a version; the older one keeps serving."""
        worker = self._roster.of(said)
        if _offer_id(message) not in worker.given:  # it is said again, or that was never offered to this one
            raise refuse(
                ErrorCode.STALE,
                f"version {message.version} of policy '{message.policy[:80]}' is not offered to this worker (any "
                "more): drop it",
            )
        self._meter.worked(worker, LOADING, {"inference_s": message.busy_s})
        self._roster.take(worker, _offer_id(message))
        policy = self._policies.find(message.tenant, message.policy)
        version = policy.versions.get(message.version) if policy else None
        if policy is None or version is None:
            return  # it was let go of meanwhile
        self._outbox.log(
            "error",
            "weights_refused",
            tenant=policy.tenant,
            policy=policy.name,
            worker=worker.name,
            reason=message.error.message,
        )
        key = (message.tenant, message.policy, message.version)
        if key not in self._offered:
            return  # it serves elsewhere: that worker is at fault, not the version
        if message.error.category == "server":
            self._faults[key] += 1
            if self._faults[key] < self._config.kills:
                self._outbox.after(self._config.retry_s, lambda: self._offer_again(worker, version))
                return
        self._faults.pop(key, None)
        del self._offered[key]
        refused = msgspec.structs.replace(version, refused=message.error.message)
        self._policies.add_version(policy, refused)
        self._outbox.save([refused])
        self.settled(policy, message.version, message.error)

    # Staff

    def joined(self, worker: Worker) -> None:
        """Offer a new worker what others were offered and have not applied, and what nobody was there to serve."""
        if worker.leaving:
            return
        backbone = worker.register.backbone_name
        for policy in self._unserved.pop(backbone, {}).values():
            if policy.newest is not None:
                self._offered[*policy.key, policy.newest.version] = policy.newest
        for policy, version in self._outstanding(backbone):
            self._send(worker, policy.versions[version])

    def leaving(self, worker: Worker) -> None:
        """Nothing to do: what it has in memory still acts."""

    def lost(self, worker: Worker) -> None:
        """A worker is gone, and with it what it had in memory."""
        for key in self._with.pop(worker.name, ()):
            served = self._serving.get(key)
            if served is not None:
                served.workers.discard(worker.name)
                if not served.workers:
                    del self._serving[key]
                    self._remember(self._policies.get(*key))
        backbone = worker.register.backbone_name
        if not self._workers(backbone):
            for policy, version in self._outstanding(backbone):
                del self._offered[*policy.key, version]
                self._remember(policy)
                self.settled(policy, version, None)

    def _outstanding(self, backbone: str) -> list[tuple[Policy, int]]:
        """Return what living workers were offered and have not answered."""
        offered = [(self._policies.get(tenant, name), version) for tenant, name, version in self._offered]
        return [(policy, version) for policy, version in offered if policy.spec.backbone == backbone]

    def _remember(self, policy: Policy) -> None:
        """Have the next worker load a policy's newest version before it is asked for it."""
        unserved = self._unserved[policy.spec.backbone]
        unserved[policy.key] = policy
        unserved.move_to_end(policy.key)
        if len(unserved) > _REMEMBERED:
            unserved.popitem(last=False)

    def _workers(self, backbone: str) -> list[Worker]:
        return [
            worker
            for worker in self._roster.living("inference")
            if worker.register.backbone_name == backbone and not worker.leaving
        ]

    def _send(self, worker: Worker, version: VersionRecord) -> None:
        offer = WeightsOffer(
            tenant=version.tenant,
            policy=version.policy,
            version=version.version,
            digest=version.digest,
            nbytes=version.nbytes,
        )
        self._roster.give(worker, _offer_id(offer), 1, offer)

    def _offer_again(self, worker: Worker, version: VersionRecord) -> None:
        if worker.alive and (version.tenant, version.policy, version.version) in self._offered:
            self._send(worker, version)


def _offer_id(message: WeightsOffer | WeightsApplied | WeightsRefused) -> str:
    """Name an offer among what a worker was given; it has no task id of its own."""
    return f"{message.tenant}/{message.policy}/{message.version}"
