"""One policy: what exists of it, and the ops that are kept.

In: what the other parts note. Out: its state, and `PolicyInfo`. Never: a decision, or anything durable by itself.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from common.journal.records import CheckpointRecord, PolicyRecord, Record, StateRecord, VersionRecord
from joynexus.specs import PolicySpec
from joynexus.wire.front import PolicyInfo, VersionInfo
from services.master.ops import Op

PolicyKey = tuple[str, str]
"""Tenant and policy."""

_SHOWN_VERSIONS = 1000


class Loop(msgspec.Struct):
    """A tenant's own loop that drives a policy."""

    holder: str
    lease: str
    ttl_s: float
    heard: float


class Policy:
    """One policy.

    Attributes:
        life: tells it from another one of its name that was deleted.
        ops: ops above the checkpoint, and before it those whose replies are kept; by seq.
        next_seq: seq of the next op.
        seen_seq: highest seq that was ever received since the master started.
        journaled: highest op that is durable and may be dispatched.
        applied: highest op whose outcome is known.
        forgotten: highest op of which nothing is kept.
        refusals: how often ops were taken back because the disk refused one.
        newest: newest version that inference did not refuse.
        checkpoint: the newest that is durable; `covering` the newest that was taken.
        uncovered: records that belong to checkpoints, parts of curves for instance, and are not durable yet.
        step: optimizer steps after op `told`, the highest whose outcome was told.
        loop, job: who drives it, if anybody.
        checkpoint_every: optimizer steps between checkpoints.
        home, resident: its trainer, and whether it is in that one's memory.
        pins: how many evaluations need a version; `retired` are those that go when the last of them has ended.
    """

    def __init__(self, record: PolicyRecord) -> None:
        self.tenant = record.tenant
        self.name = record.policy
        self.key: PolicyKey = (record.tenant, record.policy)
        self.life = record.life
        self.take(record.spec)
        self.ops: dict[int, Op] = {}
        self.next_seq = 1
        self.seen_seq = 0
        self.journaled = 0
        self.applied = 0
        self.forgotten = 0
        self.refusals = 0
        self.told = 0
        self.step = 0
        self.versions: dict[int, VersionRecord] = {}
        self.newest: VersionRecord | None = None
        self.next_version = 1
        self.states: dict[str, StateRecord] = {}
        self.promised: dict[str, int] = {}  # state -> the accepted op that saves it last
        self.checkpoint: CheckpointRecord | None = None
        self.covering: CheckpointRecord | None = None
        self.uncovered: list[Record] = []
        self.loop: Loop | None = None
        self.job = ""
        self.checkpoint_every = 0
        self.home = ""
        self.resident = False
        self.pins: Counter[int] = Counter()
        self.retired: set[int] = set()

    def take(self, spec: PolicySpec) -> None:
        """Have this spec from now on."""
        self.spec = spec
        self.contract_digest = spec.contract.digest()
        self.spec_nbytes = len(msgspec.msgpack.encode(spec))

    @property
    def never_opened(self) -> bool:
        """It was to be trained, and no trainer could build it: nothing would be lost with its spec."""
        return (
            self.checkpoint is None
            and 0 < self.applied == self.next_seq - 1
            and not self.driver
            and all(op.done is not None and op.done.skipped for op in self.ops.values())
        )

    @property
    def covered(self) -> int:
        """Last op that the checkpoint covers."""
        return self.checkpoint.seq if self.checkpoint else 0

    @property
    def driver(self) -> str:
        """Who drives it, as in `PolicyInfo`."""
        return f"job:{self.job}" if self.job else "loop" if self.loop else ""

    def note_applied(self) -> None:
        """Advance `applied` over the ops whose outcome is known."""
        while (op := self.ops.get(self.applied + 1)) is not None and op.done is not None:
            self.applied += 1

    def info(self) -> PolicyInfo:
        """Describe it."""
        return PolicyInfo(
            policy=self.name,
            spec=self.spec,
            next_seq=self.next_seq,
            step=self.step,
            driver=self.driver,
            contract_digest=self.contract_digest,
            versions=tuple(version_info(version) for version in list(self.versions.values())[-_SHOWN_VERSIONS:]),
            states=tuple(self.states),
            home=self.home,
            resident=self.resident,
        )


def version_info(version: VersionRecord) -> VersionInfo:
    """Describe a version."""
    return VersionInfo(version=version.version, digest=version.digest, nbytes=version.nbytes, step=version.step)
