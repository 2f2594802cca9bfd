"""Versions on their way into service: offered to every inference worker of their backbone, applied or refused.

In: published versions, `WeightsApplied`, `WeightsRefused`. Out: `WeightsOffer`, and word to the jobs that wait. Never:
a version taken out of service: a newer one stands beside it, and a refused one changes nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import msgspec

from common.journal.records import VersionRecord
from joynexus.wire import Failure
from joynexus.wire.back import WeightsApplied, WeightsOffer, WeightsRefused
from services.master.config import CoreConfig
from services.master.events import BackMessage
from services.master.outbox import Outbox
from services.master.policies import Policies, Policy
from services.master.roster import Roster, Worker

VersionKey = tuple[str, str, int]
"""Tenant, policy, version."""


class Serving:
    """Which versions are in memory where.

    Attributes:
        settled: called with a policy and version when inference has applied it, refused it (with the failure), or
            when nobody is left who could.
    """

    def __init__(self, outbox: Outbox, roster: Roster, policies: Policies, config: CoreConfig) -> None:
        self._outbox = outbox
        self._config = config
        self._roster = roster
        self._policies = policies
        self._applied: defaultdict[VersionKey, set[str]] = defaultdict(set)  # names of workers
        self._offered: dict[VersionKey, VersionRecord] = {}
        self._newest: dict[tuple[str, str], int] = {}
        self._faults: Counter[VersionKey] = Counter()
        self.settled: Callable[[Policy, int, Failure | None], None] = lambda policy, version, error: None
        roster.add_staff("inference", self)

    def count(self, tenant: str | None) -> int:
        """Number of versions in service, of one tenant or of all."""
        return sum(tenant in (None, key[0]) for key in self._applied)

    def offer(self, policy: Policy, version: VersionRecord) -> None:
        """A version is durable: offer it to all who serve its backbone."""
        self._offered[(*policy.key, version.version)] = version
        for worker in self._workers(policy):
            self._send(worker, version)

    def pending(self, policy: Policy, version: int) -> bool:
        """Tell whether somebody may still apply this version, and nobody has."""
        return not self._applied.get((*policy.key, version)) and any(True for _ in self._workers(policy))

    def newest(self, policy: Policy) -> VersionRecord | None:
        """The newest version in service, else the newest that was published."""
        version = policy.versions.get(self._newest.get(policy.key, 0))
        return version if version is not None and not version.refused else policy.newest

    # Messages

    def on_applied(self, said: BackMessage, message: WeightsApplied) -> None:
        """A worker has a version in memory."""
        worker = self._roster.of(said)
        self._roster.take(worker, _offer_id(message))
        policy = self._policies.find(message.tenant, message.policy)
        if policy is None or message.version not in policy.versions:
            return
        key = (*policy.key, message.version)
        self._applied[key].add(worker.name)
        self._offered.pop(key, None)
        self._newest[policy.key] = max(message.version, self._newest.get(policy.key, 0))
        self.settled(policy, message.version, None)

    def on_refused(self, said: BackMessage, message: WeightsRefused) -> None:
        """A worker cannot use a version; the older one keeps serving."""
        worker = self._roster.of(said)
        self._roster.take(worker, _offer_id(message))
        policy = self._policies.find(message.tenant, message.policy)
        version = policy.versions.get(message.version) if policy else None
        self._outbox.log(
            "error", "weights_refused", worker=worker.name, policy=message.policy, reason=message.error.message
        )
        if policy is None or version is None or self._applied.get((*policy.key, message.version)):
            return  # it serves elsewhere: that worker is at fault, not the version
        key = (*policy.key, message.version)
        if message.error.category == "server":
            self._faults[key] += 1
            if self._faults[key] < self._config.kills:
                self._outbox.after(self._config.retry_s, lambda: self._offer_again(worker, version))
                return
        del self._faults[key]
        self._offered.pop(key, None)
        refused = msgspec.structs.replace(version, refused=message.error.message)
        self._policies.add_version(policy, refused)
        self._outbox.save([refused])
        self.settled(policy, message.version, message.error)

    # Staff

    def joined(self, worker: Worker) -> None:
        """Offer a new worker what nobody has applied yet; all else it loads when it is asked for."""
        for (tenant, name, _), version in list(self._offered.items()):
            policy = self._policies.find(tenant, name)
            if policy is not None and policy.spec.backbone == worker.register.backbone_name:
                self._send(worker, version)

    def leaving(self, worker: Worker) -> None:
        """Nothing to do: what it has in memory still acts."""

    def lost(self, worker: Worker) -> None:
        """A worker is gone, and with it what it had in memory."""
        for key in [key for key, names in self._applied.items() if worker.name in names]:
            self._applied[key].discard(worker.name)
            if not self._applied[key]:
                del self._applied[key]
        for tenant, name, number in list(self._offered):
            policy = self._policies.find(tenant, name)
            if policy is not None and not self.pending(policy, number):
                del self._offered[tenant, name, number]
                self.settled(policy, number, None)

    def _workers(self, policy: Policy) -> list[Worker]:
        return [
            worker
            for worker in self._roster.living("inference")
            if worker.register.backbone_name == policy.spec.backbone and not worker.leaving
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
        if worker.alive:
            self._send(worker, version)


def _offer_id(message: WeightsOffer | WeightsApplied | WeightsRefused) -> str:
    """Name an offer among what a worker was given; it has no task id of its own."""
    return f"{message.tenant}/{message.policy}/{message.version}"
