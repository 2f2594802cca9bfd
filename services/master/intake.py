"""The front desk of ops: exactly one effect for every `(tenant, policy, seq)`, whatever is lost or repeated.

In: `ForwardBackward`, `OptimStep`, `Publish`, `SaveState`, `LoadState`, `LoadWeights`, and the ops of jobs. Out:
journaled ops, and `Accepted` once they are; stored results for what was asked before. Never: an acknowledgement before
the journal has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import blake3
import msgspec

from common.journal.records import OpRecord
from joynexus.wire import ErrorCode, Failure, join, kind_of, limits
from joynexus.wire.front import Accepted, ForwardBackward, LoadState, LoadWeights, OptimStep, Publish, SaveState
from services.master.catalog import Catalog
from services.master.checks import check_any_name
from services.master.config import CoreConfig
from services.master.events import FrontMessage
from services.master.holdings import Holdings
from services.master.leases import Leases
from services.master.limits import Limits, Pace
from services.master.metering import Account, Meter
from services.master.ops import Op, OpState
from services.master.outbox import Outbox, not_saved, refuse
from services.master.policies import Policies
from services.master.policy import Policy
from services.master.training import Training

TenantOp = ForwardBackward | OptimStep | Publish | SaveState | LoadState | LoadWeights

_MAX_BUFFERS = 64
_MAX_INDICES = 4096
_RETRY_MS = 100


class Intake:
    """Accepts ops.

    Args:
        check_budget: refuses what a tenant over its budget asks for.
    """

    def __init__(
        self,
        outbox: Outbox,
        config: CoreConfig,
        policies: Policies,
        leases: Leases,
        catalog: Catalog,
        holdings: Holdings,
        meter: Meter,
        training: Training,
        limits: Limits,
        check_budget: Callable[[str], None],
    ) -> None:
        self._outbox = outbox
        self._config = config
        self._policies = policies
        self._leases = leases
        self._catalog = catalog
        self._holdings = holdings
        self._meter = meter
        self._training = training
        self._limits = limits
        self._check_budget = check_budget
        self._pace = Pace()
        self._payload_bytes = 0  # held in memory

    def on_op(self, asked: FrontMessage, message: TenantOp) -> None:
        """A tenant's loop sent an op."""
        policy = self._policies.get(asked.tenant, message.policy)
        fingerprint = _fingerprint(message, asked)
        known = policy.ops.get(message.seq)
        if known is not None:
            self._leases.hear(policy, message.lease)
            self._repeat(asked, policy, known, fingerprint)
            return
        self._check_budget(asked.tenant)
        self._check_order(policy, message)
        record, payload = self._record(policy, message, asked, fingerprint)
        op = Op(record, payload)
        op.attach(asked.peer, asked.header.id)
        self._admit(policy, [op])
        self._meter.add(Account(*policy.key), {"bytes_in": len(asked.body) + len(payload)})

    def accept_of_job(self, policy: Policy, records: Sequence[OpRecord], lost: Callable[[], None]) -> None:
        """Accept the next ops of the job that drives a policy; `lost` is called if they could not be journaled."""
        self._admit(policy, [Op(record) for record in records], lost)

    def op_finished(self, policy: Policy) -> None:
        """An op of this policy was answered."""
        self._pace.moved(policy.key, self._outbox.now)

    def payload(self, op: Op, read: Callable[[str, str, int], bytes]) -> bytes:
        """Give an op's inline samples: from memory (for the last time) or from the journal."""
        if not op.payload:
            return read(op.record.tenant, op.record.policy, op.record.seq)
        payload, op.payload = op.payload, b""
        self._payload_bytes -= len(payload)
        return payload

    # Checks

    def _repeat(self, asked: FrontMessage, policy: Policy, op: Op, fingerprint: str) -> None:
        """The op is known: give what is known of it, and have the rest follow."""
        if op.record.fingerprint != fingerprint:
            raise refuse(
                ErrorCode.CONFLICT,
                f"op {op.record.seq} of policy '{policy.name}' was something else before: "
                f"use a new sequence number (the next one is {policy.next_seq})",
            )
        if op.done is not None and op.state in (OpState.REPLIED, OpState.FAILED):
            self._outbox.answer(asked, op.done.result)
            return
        op.attach(asked.peer, asked.header.id)
        if op.state is not OpState.RECEIVED:
            self._outbox.answer(asked, Accepted(policy=policy.name, seq=op.record.seq))

    def _check_order(self, policy: Policy, message: TenantOp) -> None:
        seq = message.seq
        if seq < 1:
            raise refuse(ErrorCode.INVALID, f"sequence numbers count from 1, so {seq} is none")
        if seq < policy.next_seq:
            raise refuse(
                ErrorCode.FORGOTTEN,
                f"op {seq} of policy '{policy.name}' was applied, but its reply is not kept any more: "
                f"the last {self._config.kept_replies} before a checkpoint are",
            )
        self._leases.check(policy, message.lease)
        if seq > policy.next_seq:
            sentence = f"op {seq} of policy '{policy.name}' comes too early: expected {policy.next_seq}"
            if seq <= policy.seen_seq:  # it was here, and those before it were refused because of the disk
                raise refuse(ErrorCode.UNAVAILABLE, sentence, retry_after_ms=_RETRY_MS)
            raise refuse(ErrorCode.GAP, sentence)
        limit = self._limits.max_inflight_ops(policy.tenant)
        unanswered = policy.next_seq - 1 - policy.applied
        if unanswered >= limit:
            running = self._training.running(policy)
            raise self._pace.overloaded(
                policy.key,
                self._outbox.now,
                f"{unanswered} ops of policy '{policy.name}' wait already, {limit} may: wait for a result",
                limit=limit,
                waiting=max(0, unanswered - running),
                running=running,
            )
        too_many = policy.next_seq - policy.covered > self._config.uncheckpointed_ops
        if too_many and isinstance(message, ForwardBackward):
            raise refuse(
                ErrorCode.OVERLOADED,
                f"{self._config.uncheckpointed_ops} ops of policy '{policy.name}' lie above its checkpoint: "
                "send optim_step now and then, checkpoints are taken behind it",
                retry_after_ms=1000,
            )

    # From message to record

    def _record(
        self, policy: Policy, message: TenantOp, asked: FrontMessage, fingerprint: str
    ) -> tuple[OpRecord, bytes]:
        record = OpRecord(
            tenant=policy.tenant,
            policy=policy.name,
            seq=message.seq,
            kind="optim_step",
            fingerprint=fingerprint,
            trace=asked.header.id,
        )
        match message:
            case ForwardBackward():
                return self._samples(policy, message, asked, msgspec.structs.replace(record, kind="forward_backward"))
            case Publish():
                self._holdings.check_room(policy.tenant, "another version")
                return msgspec.structs.replace(record, kind="publish", version=policy.next_version), b""
            case SaveState():
                check_any_name("state", message.state)
                if message.state not in policy.promised:
                    self._check_states(policy)
                return msgspec.structs.replace(record, kind="save_state", state=message.state), b""
            case LoadState():
                return self._load(policy, message, msgspec.structs.replace(record, kind="load_state")), b""
            case LoadWeights():
                return self._refer(policy, message.weights, msgspec.structs.replace(record, kind="load_weights")), b""
            case OptimStep():
                return record, b""

    def _check_states(self, policy: Policy) -> None:
        """Refuse one state more than a policy may have."""
        if len(policy.promised) >= self._config.max_states:
            sentence = f"policy '{policy.name}' has {self._config.max_states} states and may have no more: reuse a name"
            raise refuse(ErrorCode.TOO_LARGE, sentence)
        self._holdings.check_room(policy.tenant, "another state")

    def _load(self, policy: Policy, message: LoadState, record: OpRecord) -> OpRecord:
        source = policy.promised.get(message.state)
        if source is None:
            raise refuse(
                ErrorCode.NOT_FOUND, f"policy '{policy.name}' has no state '{message.state[:80]}': save it first"
            )
        saved, saving = policy.states.get(message.state), policy.ops.get(source)
        if saved is not None and saved.seq == source:
            record = msgspec.structs.replace(record, blob=saved.digest, blob_nbytes=saved.nbytes)
        elif saving is not None and saving.done is not None:  # it is on its way to the disk
            record = msgspec.structs.replace(record, blob=saving.done.result.digest, blob_nbytes=saving.done.nbytes)
        return msgspec.structs.replace(record, state=message.state, state_seq=source)

    def _samples(
        self, policy: Policy, message: ForwardBackward, asked: FrontMessage, record: OpRecord
    ) -> tuple[OpRecord, bytes]:
        given = [message.samples is not None, bool(message.payload), message.dataset is not None]
        if sum(given) != 1:
            raise refuse(ErrorCode.INVALID, "give exactly one of samples, payload and dataset")
        scope = f"tenant:{policy.tenant}"
        if message.dataset is not None:
            found = self._catalog.ready(policy.tenant, message.dataset.dataset)
            indices = message.dataset.indices
            if not 1 <= len(indices) <= _MAX_INDICES:
                raise refuse(ErrorCode.INVALID, f"give 1 to {_MAX_INDICES} indices, not {len(indices)}")
            if min(indices) < 0 or max(indices) >= found.steps:
                raise refuse(
                    ErrorCode.INVALID,
                    f"indices must lie between 0 and {found.steps - 1}, the steps of data set '{found.dataset}'",
                )
            return msgspec.structs.replace(
                record,
                manifest=found.manifest,
                indices=indices,
                feature_scope=feature_scope(policy.tenant, found.tenant, found.dataset),
            ), b""
        if message.payload:
            return self._refer(policy, message.payload, msgspec.structs.replace(record, feature_scope=scope)), b""
        body = msgspec.msgpack.encode(message.samples)
        nbytes = sum(memoryview(buffer).nbytes for buffer in asked.buffers)
        if max(nbytes, len(body)) > limits.INLINE_BYTES or len(asked.buffers) > _MAX_BUFFERS:
            raise refuse(
                ErrorCode.TOO_LARGE,
                f"inline samples have at most {limits.INLINE_BYTES} bytes in {_MAX_BUFFERS} arrays, "
                f"these have {nbytes} in {len(asked.buffers)}: send them as a blob",
            )
        payload = join([body, *asked.buffers])
        return msgspec.structs.replace(
            record, payload=payload, payload_nbytes=len(payload), body_nbytes=len(body), feature_scope=scope
        ), payload

    def _refer(self, policy: Policy, digest: str, record: OpRecord) -> OpRecord:
        """Have an op refer to a blob that its tenant uploaded."""
        if not self._holdings.may_read(policy.tenant, digest):
            sentence = f"there is no blob {digest[:64]} here: upload it, then send the op again"
            raise refuse(ErrorCode.NOT_FOUND, sentence)
        nbytes = self._holdings.size(policy.tenant, digest)
        return msgspec.structs.replace(record, blob=digest, blob_nbytes=nbytes)

    # Journal

    def _admit(self, policy: Policy, ops: Sequence[Op], lost: Callable[[], None] | None = None) -> None:
        records = [msgspec.structs.replace(op.record, refusals=policy.refusals) for op in ops]
        for op, record in zip(ops, records, strict=True):
            op.record = record
            op.since = self._outbox.now
            self._enter(policy, op)

        def saved() -> None:
            for op in ops:
                if policy.ops.get(op.record.seq) is op:  # else it was rolled back together with one before it
                    op.move(OpState.JOURNALED, "durable")
                    policy.journaled = op.record.seq
                    for peer, request in op.waiters:
                        self._outbox.send(peer, Accepted(policy=policy.name, seq=op.record.seq), re=request)
            self._training.ready(policy)

        def failed(reason: str) -> None:
            if policy.ops.get(records[0].seq) is ops[0]:
                self._roll_back(policy, records[0].seq, not_saved("the op", reason).failure)
            if lost is not None:
                lost()

        self._outbox.save(records, saved, failed)

    def _enter(self, policy: Policy, op: Op) -> None:
        record = op.record
        policy.ops[record.seq] = op
        policy.next_seq = record.seq + 1
        policy.seen_seq = max(policy.seen_seq, record.seq)
        if record.version:
            policy.next_version = record.version + 1
        if record.kind == "save_state":
            policy.promised[record.state] = record.seq
        for digest, nbytes in op.blobs:
            self._holdings.hold(policy.tenant, digest, nbytes)
        if record.payload:
            op.record = msgspec.structs.replace(record, payload=b"")
            if self._payload_bytes + len(op.payload) > self._config.payload_memory_bytes:
                op.payload = b""
            self._payload_bytes += len(op.payload)

    def _roll_back(self, policy: Policy, first: int, reason: Failure) -> None:
        """The journal refused an op: neither it nor any after it was ever there.

        Those after it may be on disk nevertheless; `refusals` tells them from what is accepted from now on.
        """
        policy.refusals += 1
        for seq in range(policy.next_seq - 1, first - 1, -1):
            op = policy.ops.pop(seq)
            policy.next_seq = seq
            self._payload_bytes -= len(op.payload)
            for digest, _ in op.blobs:
                self._holdings.release(policy.tenant, digest)
            if op.record.version:
                policy.next_version = op.record.version
            if op.record.kind == "save_state":
                self._forget_promise(policy, op.record)
            for peer, request in op.waiters:
                self._outbox.send(peer, reason, re=request)

    def _forget_promise(self, policy: Policy, record: OpRecord) -> None:
        """Go back to the state's last save before this one."""
        before = [
            op.record.seq
            for op in policy.ops.values()
            if op.record.kind == "save_state" and op.record.state == record.state and not _failed(op)
        ]
        saved = policy.states.get(record.state)
        before += [saved.seq] if saved else []
        if before:
            policy.promised[record.state] = max(before)
        else:
            policy.promised.pop(record.state, None)


def feature_scope(tenant: str, owner: str, dataset: str) -> str:
    """Name whose features may be shared: a mounted set's by all, a tenant's own only by itself."""
    return f"tenant:{tenant}" if owner else f"shared:{dataset}"


def _failed(op: Op) -> bool:
    return op.done is not None and op.done.result.error is not None


def _fingerprint(message: TenantOp, asked: FrontMessage) -> str:
    """Hash what the tenant wants done; the lease under which it asks is not part of that."""
    hasher = blake3.blake3(kind_of(message).encode())
    hasher.update(msgspec.msgpack.encode(msgspec.structs.replace(message, lease="")))
    for buffer in asked.buffers:
        hasher.update(memoryview(buffer).nbytes.to_bytes(8, "little"))
        hasher.update(buffer)
    return hasher.hexdigest()[:32]
