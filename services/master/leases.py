"""One driver per policy: a lease, held by a tenant's own loop or by a job.

In: requests for leases, ops that keep them alive. Out: leases, and word to the jobs that wait for a policy. Never: two
drivers at once. A loop's lease survives a restart of the master; a job's follows from the job.
"""

from __future__ import annotations

from collections.abc import Callable

from common.journal.records import LeaseRecord
from joynexus.wire import ErrorCode, JoyNexusError
from joynexus.wire.front import AcquireLease, Done, Lease, ReleaseLease
from services.master.events import FrontMessage
from services.master.outbox import Outbox, not_saved, refuse
from services.master.policies import Policies
from services.master.policy import Loop, Policy

MIN_TTL_MS, MAX_TTL_MS = 1_000, 3_600_000
_LOOK_S = 5.0
"""A lease is looked at so often: what waits for the end of a long one would be kept that long after the next one."""


class Leases:
    """Who drives what.

    Args:
        freed: called with a policy that nobody drives any more.
    """

    def __init__(self, outbox: Outbox, policies: Policies, freed: Callable[[Policy], None]) -> None:
        self._outbox = outbox
        self._policies = policies
        self._freed = freed

    def on_acquire(self, asked: FrontMessage, message: AcquireLease) -> None:
        """Give the lease to a loop, unless somebody else has it."""
        policy = self._policies.get(asked.tenant, message.policy)
        if not message.holder or len(message.holder) > 200:
            raise refuse(ErrorCode.INVALID, "holder must be a name of 1 to 200 characters that this loop keeps")
        if not MIN_TTL_MS <= message.ttl_ms <= MAX_TTL_MS:
            raise refuse(
                ErrorCode.INVALID, f"ttl_ms must lie between {MIN_TTL_MS} and {MAX_TTL_MS}, not {message.ttl_ms}"
            )
        if policy.job or (policy.loop is not None and policy.loop.holder != message.holder):
            raise self._driven(policy)
        before = policy.loop
        lease = before.lease if before else self._outbox.new_id()
        policy.loop = loop = Loop(message.holder, lease, message.ttl_ms / 1000, self._outbox.now)
        self._watch(policy, loop)

        def lost(reason: str) -> None:
            if policy.loop is loop:
                policy.loop = before
                if before is not None:
                    self._watch(policy, before)
            self._outbox.answer(asked, not_saved("the lease", reason).failure)

        record = LeaseRecord(
            tenant=policy.tenant, policy=policy.name, holder=loop.holder, lease=loop.lease, ttl_s=loop.ttl_s
        )
        answer = Lease(policy=policy.name, lease=lease, next_seq=policy.next_seq)
        self._outbox.save([record], lambda: self._outbox.answer(asked, answer), lost)

    def on_release(self, asked: FrontMessage, message: ReleaseLease) -> None:
        """End a loop's lease; a lease that has ended already is fine."""
        policy = self._policies.get(asked.tenant, message.policy)
        if policy.loop is not None and policy.loop.lease == message.lease:
            self._end(policy, lambda: self._outbox.answer(asked, Done()))
        else:
            self._outbox.answer(asked, Done())

    def check(self, policy: Policy, lease: str) -> None:
        """Refuse an op of somebody who does not drive the policy; else note that its driver lives."""
        loop = policy.loop
        if loop is None and not policy.job:
            raise refuse(
                ErrorCode.CONFLICT, f"nobody holds the lease of policy '{policy.name}' now: acquire it again first"
            )
        if loop is None or loop.lease != lease:
            raise self._driven(policy)
        loop.heard = self._outbox.now

    def hear(self, policy: Policy, lease: str) -> None:
        """Somebody asked again for an op's result: if it is the driver, it lives."""
        if policy.loop is not None and policy.loop.lease == lease:
            policy.loop.heard = self._outbox.now

    def restore(self, record: LeaseRecord) -> None:
        """A loop drove this policy when the master went down; its silence counts from now."""
        policy = self._policies.get(record.tenant, record.policy)
        policy.loop = Loop(record.holder, record.lease, record.ttl_s, self._outbox.now)
        self._watch(policy, policy.loop)

    def _end(self, policy: Policy, saved: Callable[[], None] | None = None) -> None:
        policy.loop = None
        self._outbox.save([LeaseRecord(tenant=policy.tenant, policy=policy.name, gone=True)], saved)
        self._freed(policy)

    def _watch(self, policy: Policy, loop: Loop) -> None:
        def look() -> None:
            if policy.loop is not loop:
                return
            left = loop.heard + loop.ttl_s - self._outbox.now
            if left > 0:
                self._outbox.after(min(left, _LOOK_S), look)
            else:
                self._end(policy)

        self._outbox.after(min(loop.ttl_s, _LOOK_S), look)

    def _driven(self, policy: Policy) -> JoyNexusError:
        if policy.job:
            return refuse(
                ErrorCode.CONFLICT,
                f"job '{policy.job}' drives policy '{policy.name}': wait until it ends, or cancel it",
            )
        ttl = policy.loop.ttl_s if policy.loop else 0
        return refuse(
            ErrorCode.CONFLICT,
            f"another loop drives policy '{policy.name}': release its lease there, or wait until it was silent for "
            f"{ttl:g} s",
        )
