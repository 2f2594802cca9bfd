"""Policies: which there are, and what changes of their versions, states and checkpoints.

In: requests to create and describe. Out: `PolicyInfo`, and the `Policy` objects that the other parts work on. Never: a
policy that is not durable shown to anybody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import msgspec

from common.journal.records import (
    CheckpointRecord,
    OpDone,
    OpRecord,
    OpsCovered,
    PolicyRecord,
    Record,
    StateRecord,
    VersionRecord,
)
from joynexus.specs import PolicySpec
from joynexus.wire import ErrorCode, JoyNexusError
from joynexus.wire.front import CreatePolicy, GetPolicy, GetVersion, ListPolicies, PolicyInfo, PolicyList
from services.master.checks import check_policy, check_policy_name
from services.master.events import FrontMessage
from services.master.holdings import Holdings
from services.master.limits import Limits
from services.master.ops import Op, OpState
from services.master.outbox import Outbox, not_found, not_saved, refuse
from services.master.policy import Policy, PolicyKey, version_info

_LIST_BYTES = 512 * 1024


class Policies:
    """All policies, by tenant.

    Args:
        known_heads: tells which action modules the trainers of a backbone have; empty if none says.
        known_backbones: tells which backbones there are trainers for; empty if there is no trainer now.

    Attributes:
        gone: called with a policy and a version of it that was let go of.
    """

    def __init__(
        self,
        outbox: Outbox,
        holdings: Holdings,
        limits: Limits,
        known_heads: Callable[[str], Iterable[str]],
        known_backbones: Callable[[], Iterable[str]],
    ) -> None:
        self._outbox = outbox
        self._holdings = holdings
        self._limits = limits
        self._known_heads = known_heads
        self._known_backbones = known_backbones
        self._policies: defaultdict[str, dict[str, Policy]] = defaultdict(dict)
        self._creating: dict[PolicyKey, tuple[PolicySpec, list[Callable[[Policy | str], None]]]] = {}
        self._count = 0
        self.gone: Callable[[Policy, int], None] = lambda policy, version: None

    def __len__(self) -> int:
        """Number of policies of all tenants."""
        return self._count

    def find(self, tenant: str, name: str) -> Policy | None:
        """Return a policy of this tenant."""
        return self._policies.get(tenant, {}).get(name)

    def get(self, tenant: str, name: str) -> Policy:
        """Return a policy of this tenant.

        Raises:
            JoyNexusError: `NOT_FOUND`, also for another tenant's.
        """
        policy = self.find(tenant, name)
        if policy is None:
            raise not_found("policy", name)
        return policy

    def of(self, tenant: str) -> Iterable[Policy]:
        """Return a tenant's policies."""
        return self._policies.get(tenant, {}).values()

    def everywhere(self) -> Iterable[Policy]:
        """Return every policy (for restoring only)."""
        return (policy for policies in self._policies.values() for policy in policies.values())

    # Requests

    def on_create(self, asked: FrontMessage, message: CreatePolicy) -> None:
        """Create a policy; the answer leaves once it is durable."""

        def answer(outcome: Policy | str) -> None:
            if isinstance(outcome, Policy):
                self._outbox.answer(asked, outcome.info())
            else:
                self._outbox.answer(asked, not_saved(f"policy '{message.policy}'", outcome).failure)

        self.create(asked.tenant, message.policy, message.spec, answer)

    def on_get(self, asked: FrontMessage, message: GetPolicy) -> None:
        """Describe a policy."""
        self._outbox.answer(asked, self.get(asked.tenant, message.policy).info())

    def on_list(self, asked: FrontMessage, message: ListPolicies) -> None:
        """Describe the tenant's policies; in brief if all together would not fit into one message."""
        policies = sorted(self.of(asked.tenant), key=lambda policy: policy.name)
        infos = [policy.info() for policy in policies]
        if len(msgspec.msgpack.encode(infos)) > _LIST_BYTES:
            infos = [_brief(info) for info in infos]
        self._outbox.answer(asked, PolicyList(policies=tuple(infos)))

    def on_get_version(self, asked: FrontMessage, message: GetVersion) -> None:
        """Describe a version."""
        self._outbox.answer(asked, version_info(self.version(asked.tenant, message.policy, message.version)))

    # For other parts

    def create(self, tenant: str, name: str, spec: PolicySpec, then: Callable[[Policy | str], None]) -> None:
        """Create a policy, or find that it exists with the same spec; one that no trainer could build gets another.

        Args:
            then: called with the policy once it is durable, or with the reason if it could not be written down.

        Raises:
            JoyNexusError: `INVALID`, or `CONFLICT` if it exists with another spec.
        """
        check_policy_name(name)
        known = self.find(tenant, name)
        creating = self._creating.get((tenant, name))
        if known is not None or creating is not None:
            existing = known.spec if known else creating[0] if creating else spec
            anew = known is not None and creating is None and known.never_opened
            if existing != spec and not anew:
                raise spec_conflict(name, existing, spec)
            if existing == spec:
                if known:
                    then(known)
                elif creating:
                    creating[1].append(then)
                return
        check_policy(spec)
        self._check_number(tenant)
        self.check_module(spec.backbone, spec.head)
        waiting = [then]
        self._creating[tenant, name] = (spec, waiting)
        life = known.life if known else self._outbox.new_id()
        record = PolicyRecord(tenant=tenant, policy=name, spec=spec, life=life)

        def saved() -> None:
            del self._creating[tenant, name]
            policy = self._add(record) if known is None else known
            policy.take(spec)
            for call in waiting:
                call(policy)

        def lost(reason: str) -> None:
            del self._creating[tenant, name]
            for call in waiting:
                call(reason)

        self._outbox.save([record], saved, lost)

    def _check_number(self, tenant: str) -> None:
        """Refuse one policy more than a tenant may have."""
        limit = self._limits.max_policies(tenant)
        if len(self._policies.get(tenant, ())) + sum(key[0] == tenant for key in self._creating) >= limit:
            raise refuse(
                ErrorCode.TOO_LARGE,
                f"this tenant may have {limit} policies and has them: train one of those, or ask the operator for more",
            )

    def version(self, tenant: str, name: str, number: int) -> VersionRecord:
        """Return a version; 0 means the newest.

        Raises:
            JoyNexusError: `NOT_FOUND`.
        """
        policy = self.get(tenant, name)
        version = policy.versions.get(number) if number else policy.newest
        if version is None:
            if number and number < policy.next_version and policy.versions:
                raise refuse(
                    ErrorCode.NOT_FOUND,
                    f"policy '{name}' has no version {number} any more: of those that an RL job publishes on its way, "
                    f"only the first and the last are kept; the newest is {max(policy.versions)}",
                )
            what = f"version {number}" if number else "published version"
            do = f"the newest is {max(policy.versions)}" if policy.versions else "publish one first"
            raise refuse(ErrorCode.NOT_FOUND, f"policy '{name}' has no {what}: {do}")
        return version

    def check_module(self, backbone: str, head: str) -> None:
        """Refuse a backbone that no trainer has, and an action module that its trainers say they do not have."""
        backbones = list(self._known_backbones())
        if backbones and backbone not in backbones:
            here = " or ".join(f"'{name}'" for name in backbones)
            raise refuse(ErrorCode.INVALID, f"no trainer here has backbone '{backbone[:80]}': use {here}")
        heads = sorted(self._known_heads(backbone))
        if heads and head not in heads:
            raise refuse(ErrorCode.INVALID, f"there is no action module '{head[:80]}': use one of {', '.join(heads)}")

    def add_version(self, policy: Policy, record: VersionRecord) -> None:
        """A version is durable (or is now known to be refused)."""
        if record.version not in policy.versions:
            self._holdings.hold(policy.tenant, record.digest, record.nbytes)
        policy.versions[record.version] = record
        usable = (version for version in policy.versions.values() if not version.refused)
        policy.newest = max(usable, key=lambda version: version.version, default=None)
        policy.next_version = max(policy.next_version, record.version + 1)

    def pin(self, policy: Policy, version: int) -> None:
        """Something needs a version until it calls `unpin`."""
        policy.pins[version] += 1

    def unpin(self, policy: Policy, version: int) -> None:
        """It does not need it any more."""
        policy.pins[version] -= 1
        if policy.pins[version] <= 0:
            del policy.pins[version]
            if version in policy.retired:
                self.retire(policy, version)

    def retire(self, policy: Policy, version: int) -> None:
        """A newer version has taken the place of one for good: let go of it, unless it is the newest that can be used.

        One that an evaluation needs goes when that has ended.
        """
        record = policy.versions.get(version)
        if record is None or record is policy.newest or version == max(policy.versions):
            return
        if policy.pins[version]:
            policy.retired.add(version)
            return
        policy.retired.discard(version)
        del policy.versions[version]
        self._outbox.save([msgspec.structs.replace(record, gone=True)])
        self._holdings.release(policy.tenant, record.digest)
        self.gone(policy, version)

    def forget_version(self, policy: Policy, version: int) -> list[Record]:
        """Let go of a version; return the records by which it goes from the journal."""
        record = policy.versions.pop(version)
        policy.retired.discard(version)
        self._holdings.release(policy.tenant, record.digest)
        self.gone(policy, version)
        return [msgspec.structs.replace(record, gone=True)]

    def forget(self, policy: Policy) -> list[Record]:
        """Let go of a policy and all that belongs to it; return the records by which it goes from the journal."""
        del self._policies[policy.tenant][policy.name]
        self._count -= 1
        records: list[Record] = []
        for version in list(policy.versions):
            records += self.forget_version(policy, version)
        for seq in range(policy.covered + 1, policy.next_seq):
            for digest, _ in policy.ops[seq].blobs:
                self._holdings.release(policy.tenant, digest)
        policy.ops.clear()
        states: list[StateRecord | CheckpointRecord] = [*policy.states.values()]
        for kept in (*states, policy.checkpoint):
            if kept is not None:
                self._holdings.release(policy.tenant, kept.digest)
                records.append(msgspec.structs.replace(kept, gone=True))
        last = policy.next_seq - 1
        covered = OpsCovered(tenant=policy.tenant, policy=policy.name, covered=last, forget=last)
        gone = PolicyRecord(tenant=policy.tenant, policy=policy.name, spec=policy.spec, gone=True)
        return [*records, covered, gone]

    def check_settled(self, tenant: str, name: str) -> None:
        """Refuse while a policy is on its way to the disk.

        Raises:
            JoyNexusError: `UNAVAILABLE`.
        """
        if (tenant, name) in self._creating:
            raise refuse(ErrorCode.UNAVAILABLE, f"policy '{name}' is being created: try again", retry_after_ms=100)

    def add_state(self, policy: Policy, record: StateRecord) -> None:
        """A saved state is durable; it replaces an older one of that name."""
        self._holdings.hold(policy.tenant, record.digest, record.nbytes)
        old = policy.states.get(record.state)
        if old is not None:
            self._holdings.release(policy.tenant, old.digest)
        policy.states[record.state] = record

    def set_checkpoint(self, policy: Policy, record: CheckpointRecord) -> None:
        """A checkpoint is durable; the one before it is not needed any more."""
        self._holdings.hold(policy.tenant, record.digest, record.nbytes)
        if policy.checkpoint is not None:
            self._holdings.release(policy.tenant, policy.checkpoint.digest)
        policy.checkpoint = record

    # Restart

    def restore(self, record: PolicyRecord | VersionRecord | CheckpointRecord | StateRecord) -> None:
        """Take a record back from the journal."""
        if isinstance(record, PolicyRecord):
            self._add(record)
            return
        policy = self.get(record.tenant, record.policy)
        match record:
            case VersionRecord():
                self.add_version(policy, record)
            case StateRecord():
                self.add_state(policy, record)
                policy.promised[record.state] = record.seq
            case CheckpointRecord():
                self.set_checkpoint(policy, record)
                policy.journaled = policy.applied = policy.seen_seq = policy.forgotten = policy.told = record.seq
                policy.next_seq = record.seq + 1
                policy.step = record.step

    def restore_op(self, record: OpRecord) -> None:
        """Take an op back; they come in order of seq."""
        policy = self.get(record.tenant, record.policy)
        if record.seq > policy.next_seq or record.refusals < policy.refusals:
            # An op before it was refused because the disk was full, so this one was refused too, whatever is on disk.
            policy.refusals = max(policy.refusals, record.refusals + 1)
            return
        policy.refusals = record.refusals
        op = policy.ops[record.seq] = Op(record, state=OpState.JOURNALED)
        policy.forgotten = min(policy.forgotten, record.seq - 1)
        policy.next_version = max(policy.next_version, record.version + 1)
        if record.kind == "save_state":
            policy.promised[record.state] = max(record.seq, policy.promised.get(record.state, 0))
        if record.seq > policy.covered:
            policy.journaled = policy.seen_seq = record.seq
            policy.next_seq = record.seq + 1
            for digest, nbytes in op.blobs:
                self._holdings.hold(record.tenant, digest, nbytes)

    def restore_done(self, done: OpDone) -> None:
        """Take an op's outcome back; it comes right after the op."""
        policy = self.get(done.tenant, done.policy)
        op = policy.ops.get(done.seq)
        if op is None:
            return
        op.done = done
        op.move(OpState.APPLIED, "restored")
        op.move(OpState.FAILED if done.result.error else OpState.REPLIED, "restored")
        policy.note_applied()
        if done.seq > policy.told:
            policy.told, policy.step = done.seq, done.step

    def _add(self, record: PolicyRecord) -> Policy:
        policy = self._policies[record.tenant][record.policy] = Policy(record)
        self._count += 1
        return policy


def _brief(info: PolicyInfo) -> PolicyInfo:
    """Leave out what takes much room: statistics, and all versions but the newest."""
    spec = msgspec.structs.replace(info.spec, statistics=None)
    return msgspec.structs.replace(info, spec=spec, versions=info.versions[-1:])


def spec_conflict(name: str, existing: PolicySpec, asked: PolicySpec) -> JoyNexusError:
    """A policy exists with another spec; say where they differ."""
    field = next(f for f in PolicySpec.__struct_fields__ if getattr(existing, f) != getattr(asked, f))
    return refuse(
        ErrorCode.CONFLICT,
        f"policy '{name}' exists with another '{field}': use another name, or the spec it was created with",
    )
