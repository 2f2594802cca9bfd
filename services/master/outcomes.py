"""What becomes of an op's outcome: written down first, then told; and what a checkpoint makes superfluous.

In: outcomes of ops and checkpoints that count. Out: records, then `OpResult`s, versions, states, freed blobs. Never: a
result that anybody hears of before it is durable, or a second outcome of the same op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from common.journal.records import CheckpointRecord, OpDone, OpsCovered, Record, StateRecord, VersionRecord
from joynexus.wire import Failure
from joynexus.wire.back import TrainDone
from joynexus.wire.front import OpResult
from services.master.config import CoreConfig
from services.master.holdings import Holdings
from services.master.metering import Meter
from services.master.ops import Op, OpState
from services.master.outbox import Outbox
from services.master.policies import Policies
from services.master.policy import Policy


class Outcomes:
    """Makes outcomes durable and tells those who wait.

    Attributes:
        arrived: called when an op's outcome is known, but not durable yet.
        finished: called when an op's outcome is durable and was told.
        published: called when a new version is durable.
        covering: asked, when a checkpoint is about to cover ops up to a seq, for records to be written with it.
        covered: called when a checkpoint is durable.
    """

    def __init__(
        self, outbox: Outbox, config: CoreConfig, policies: Policies, holdings: Holdings, meter: Meter
    ) -> None:
        self._outbox = outbox
        self._config = config
        self._policies = policies
        self._holdings = holdings
        self._meter = meter
        self.arrived: Callable[[Policy, Op], None] = lambda policy, op: None
        self.finished: Callable[[Policy, Op], None] = lambda policy, op: None
        self.published: Callable[[Policy, VersionRecord], None] = lambda policy, version: None
        self.covering: Callable[[Policy, int], Sequence[Record]] = lambda policy, seq: ()
        self.covered: Callable[[Policy], None] = lambda policy: None

    def decided(self, policy: Policy, op: Op, error: Failure) -> None:
        """The master itself decides that an op fails; trainers will skip it."""
        before = policy.ops.get(op.record.seq - 1)
        step = before.done.step if before and before.done else policy.checkpoint.step if policy.checkpoint else 0
        result = OpResult(policy=policy.name, seq=op.record.seq, error=error)
        self._save(
            policy,
            op,
            OpDone(tenant=policy.tenant, policy=policy.name, seq=op.record.seq, result=result, step=step, skipped=True),
            [],
        )

    def applied(self, policy: Policy, op: Op, done: TrainDone) -> None:
        """A trainer has applied an op, for the first time or again."""
        if op.done is not None:
            self._compare(op, op.done.result, done)
            return
        result, record = done.result, op.record
        extra: list[Record] = []
        if result.error is None and record.kind == "publish":
            extra.append(
                VersionRecord(
                    tenant=policy.tenant,
                    policy=policy.name,
                    version=record.version,
                    digest=result.digest,
                    nbytes=done.nbytes,
                    step=done.step,
                    job=record.job,
                )
            )
        elif record.kind == "save_state":
            extra += self._state_saved(policy, op, done)
        outcome = OpDone(
            tenant=policy.tenant,
            policy=policy.name,
            seq=record.seq,
            result=result,
            nbytes=done.nbytes,
            step=done.step,
            samples=done.samples,
            backbone_forwards=done.backbone_forwards,
            busy_s=done.busy_s,
        )
        self._save(policy, op, outcome, extra)

    def checkpointed(self, policy: Policy, done: TrainDone, then: Callable[[], None]) -> None:
        """A checkpoint is written; call `then` once that is in the journal."""
        newest = policy.covering or policy.checkpoint
        if newest is not None and done.seq <= newest.seq:  # of a replay that began before the newest was durable
            if done.checkpoint != newest.digest:
                self._holdings.discard_orphan(done.checkpoint)
            return
        record = CheckpointRecord(
            tenant=policy.tenant,
            policy=policy.name,
            digest=done.checkpoint,
            nbytes=done.nbytes,
            seq=done.seq,
            step=done.step,
        )
        policy.covering = record
        # A job's ops have nobody who could ask for their replies again.
        forget = done.seq if policy.ops[done.seq].record.job else done.seq - self._config.kept_replies
        forget = max(forget, policy.forgotten)
        covered = OpsCovered(tenant=policy.tenant, policy=policy.name, covered=done.seq, forget=forget)

        span = [policy.ops[seq] for seq in range(policy.covered + 1, done.seq + 1)]
        # Their outcomes are on their way to the disk, each in a transaction of its own that may fail alone. So may the
        # one of the checkpoint before this one, with what belongs to it.
        outcomes = [record for op in span for record in op.unsaved]
        policy.uncovered = parts = [*policy.uncovered, *self.covering(policy, done.seq)]

        def saved() -> None:
            durable = set(map(id, parts))
            policy.uncovered = [part for part in policy.uncovered if id(part) not in durable]
            first = policy.covered + 1
            if first > record.seq:
                return  # a full disk held this up, and a newer one overtook it
            self._policies.set_checkpoint(policy, record)
            then()  # before anybody is told, who may have something sent: a slot that is behind has to be opened again
            for seq in range(first, record.seq + 1):
                op = policy.ops[seq]
                self._finish(policy, op)
                op.payload = b""
                for digest, _ in op.blobs:
                    self._holdings.release(policy.tenant, digest)
            for seq in range(policy.forgotten + 1, forget + 1):
                policy.ops.pop(seq, None)
            policy.forgotten = max(policy.forgotten, forget)
            self.covered(policy)

        self._outbox.save([*outcomes, record, covered, *parts, *self._meter.unwritten()], saved)

    def _save(self, policy: Policy, op: Op, outcome: OpDone, extra: Sequence[Record]) -> None:
        op.done = outcome
        op.unsaved = (outcome, *extra)
        op.move(OpState.APPLIED, "error" if outcome.result.error else "done")
        policy.note_applied()
        self._outbox.save([*op.unsaved, *self._meter.unwritten()], lambda: self._finish(policy, op))
        self.arrived(policy, op)

    def _finish(self, policy: Policy, op: Op) -> None:
        """An op's outcome is durable (or was already): tell it."""
        outcome, records = op.done, op.unsaved
        if outcome is None or op.state is not OpState.APPLIED:
            return
        op.unsaved = ()
        op.move(OpState.FAILED if outcome.result.error else OpState.REPLIED, "durable")
        if op.record.seq > policy.told:
            policy.told, policy.step = op.record.seq, outcome.step
        for record in records:
            if isinstance(record, VersionRecord):
                self._policies.add_version(policy, record)
                self.published(policy, record)
            elif isinstance(record, StateRecord):
                self._policies.add_state(policy, record)
        for peer, request in op.waiters:
            self._outbox.send(peer, outcome.result, re=request)
        op.waiters = []
        self.finished(policy, op)

    def _state_saved(self, policy: Policy, op: Op, done: TrainDone) -> list[Record]:
        """A state is saved (or not): fill it into the ops that wait to load it."""
        record = op.record
        if done.result.error is not None:
            if policy.promised.get(record.state) == record.seq:
                old = policy.states.get(record.state)
                if old is not None:
                    policy.promised[record.state] = old.seq
                else:
                    del policy.promised[record.state]
            return []
        digest = done.result.digest
        state = StateRecord(
            tenant=policy.tenant,
            policy=policy.name,
            state=record.state,
            digest=digest,
            nbytes=done.nbytes,
            seq=record.seq,
        )
        records: list[Record] = [state]
        for seq in range(record.seq + 1, policy.next_seq):
            load = policy.ops[seq]
            if load.record.kind == "load_state" and load.record.state_seq == record.seq and not load.record.blob:
                load.record = msgspec.structs.replace(load.record, blob=digest, blob_nbytes=done.nbytes)
                self._holdings.hold(policy.tenant, digest, done.nbytes)
                records.append(load.record)
        return records

    def _compare(self, op: Op, known: OpResult, done: TrainDone) -> None:
        """An op was applied again after a crash; what the tenant was told stands."""
        again = done.result
        same = known.metrics == again.metrics and (known.error is None) == (again.error is None)
        if known.digest and again.digest and known.digest != again.digest:
            self._holdings.discard_orphan(again.digest)
            same = False
        elif op.told:  # a version that was let go of meanwhile has been made again
            self._holdings.discard_orphan(again.digest)
        if not same:
            loss, loss_again = known.metrics.get("loss", 0.0), again.metrics.get("loss", 0.0)
            if loss != loss and loss_again != loss_again:
                return  # both NaN
            self._outbox.log(
                "warning",
                "replay_differs",
                tenant=done.tenant,
                policy=done.policy,
                seq=done.seq,
                loss=loss,
                loss_again=loss_again,
            )
