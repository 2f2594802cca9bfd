"""A world for the core without processes: a journal in memory, tenants, workers, a clock that tests move.

`World` delivers events and runs commands. Messages to actors (fake workers) wait in queues until the test lets them
run, so that any interleaving can be played.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from common.journal.records import Base, OpDone, OpRecord, OpsCovered, Record, key_of
from joynexus.contract import Camera, Contract, Statistics, VectorStatistics
from joynexus.datasets import DatasetManifest, EpisodeEntry
from joynexus.specs import PolicySpec
from joynexus.wire import Buffer, Failure, Header, Message, kind_of
from joynexus.wire.back import Beat, Register
from joynexus.wire.front import AcquireLease, CreatePolicy, Lease, PolicyInfo
from services.master.commands import Command, DeleteBlobs, Log, Persist, Send
from services.master.config import CoreConfig
from services.master.core import MasterCore
from services.master.events import (
    BackMessage,
    BlobStored,
    Event,
    FrontMessage,
    Peer,
    Persisted,
    PersistFailed,
    Tick,
    Undeliverable,
)

T = TypeVar("T", bound=Message)

CONTRACT = Contract(robot="arm", cameras=(Camera(name="c", height=4, width=4),), state_dim=2, action_dim=2)
_VECTOR = VectorStatistics(
    mean=(0.0,) * 2, std=(1.0,) * 2, min=(0.0,) * 2, max=(1.0,) * 2, q01=(0.0,) * 2, q99=(1.0,) * 2
)
STATISTICS = Statistics(count=1, state=_VECTOR, action=_VECTOR)
SPEC = PolicySpec(backbone="lite", contract=CONTRACT, statistics=STATISTICS)
MANIFEST = DatasetManifest(
    source_format="lerobot-v3.0",
    source_digest="s",
    fps=10.0,
    contract=CONTRACT,
    statistics=STATISTICS,
    episodes=tuple(EpisodeEntry(length=50, instruction="go", blob="b" * 64, nbytes=10) for _ in range(4)),
)


class MemoryJournal:
    """What `Journal` does, in dictionaries; `full` makes it refuse."""

    def __init__(self) -> None:
        self.rows: dict[tuple[object, ...], Record] = {}
        self.ops: defaultdict[tuple[str, str], dict[int, list[Record]]] = defaultdict(dict)  # op, and its outcome
        self.payloads: dict[tuple[str, str, int], bytes] = {}
        self.full = False

    def append(self, records: Iterable[Record]) -> None:
        for record in records:
            match record:
                case OpRecord():
                    if record.payload:
                        self.payloads[record.tenant, record.policy, record.seq] = record.payload
                    slim = msgspec.structs.replace(record, payload=b"")
                    self.ops[record.tenant, record.policy][record.seq] = [slim]
                case OpDone():
                    row = self.ops[record.tenant, record.policy].get(record.seq)
                    if row is not None:
                        row[1:] = [record]
                case OpsCovered():
                    rows = self.ops[record.tenant, record.policy]
                    for seq in [seq for seq in rows if seq <= record.covered]:
                        self.payloads.pop((record.tenant, record.policy, seq), None)
                        if seq <= record.forget:
                            del rows[seq]
                case _ if getattr(record, "gone", False):
                    self.rows.pop(key_of(record), None)
                case _:
                    self.rows[key_of(record)] = record

    def load(self) -> list[Record]:
        order = {type_: index for index, type_ in enumerate(Record.__args__)}  # type: ignore[attr-defined]
        rows = sorted(self.rows.values(), key=lambda record: (order[type(record)], *key_of(record)[1:]))
        for policy in sorted(self.ops):
            for seq in sorted(self.ops[policy]):
                rows += self.ops[policy][seq]
        return rows

    def payload(self, tenant: str, policy: str, seq: int) -> bytes:
        return self.payloads[tenant, policy, seq]

    def of(self, type_: type[Base]) -> list[Any]:
        return [record for record in self.load() if type(record) is type_]


class World:
    """A master core and everything around it."""

    def __init__(self, config: CoreConfig | None = None, journal: MemoryJournal | None = None) -> None:
        self.config = config or CoreConfig()
        self.journal = journal or MemoryJournal()
        self.manifests: dict[str, DatasetManifest] = {"m" * 64: MANIFEST}
        self.now = 1_000_000.0
        self.auto_persist = True
        self.unwritten: deque[Persist] = deque()
        self.sent: defaultdict[Peer, list[Send]] = defaultdict(list)
        self._answers: defaultdict[str, list[Message]] = defaultdict(list)  # by id of the request
        self.told: list[Send] = []  # all that tenants were sent, in order
        self.deleted: list[str] = []
        self.logs: list[Log] = []
        self.actors: dict[Peer, Callable[[Send], None]] = {}
        self.unreachable: set[Peer] = set()
        self.revoked: set[str] = set()
        self.standing: list[Event] = []  # limits and prices, told to each master before its journal
        self._ids = itertools.count(1)
        self._secrets = itertools.count(1)
        self._peers = itertools.count(1)
        self._requests = itertools.count(1)
        self._client: dict[str, Peer] = {}
        self.core = self._start()

    # The master

    def _start(self) -> MasterCore:
        core = MasterCore(
            self.config,
            new_id=lambda: f"id{next(self._ids)}",
            new_secret=lambda: f"secret{next(self._secrets)}",
            sources=self,
            now=self.now,
            key_is_valid=lambda key: key not in self.revoked,
        )
        for event in self.standing:
            core.handle(event, self.now)
        self._run(core.restore(self.journal.load()))
        return core

    def payload(self, tenant: str, policy: str, seq: int) -> bytes:
        return self.journal.payload(tenant, policy, seq)

    def manifest(self, digest: str) -> DatasetManifest:
        return self.manifests[digest]

    def crash(self) -> None:
        """Kill the master: what was not written is lost, all connections are new."""
        self.unwritten.clear()
        self.actors.clear()
        self._client.clear()
        self.now += 0.5
        self.core = self._start()
        self.settle()

    def event(self, event: Event) -> None:
        """Have the core handle an event, and a tick if it wants one; write the journal at once or when told."""
        self._run(self.core.handle(event, self.now))
        due = self.core.next_deadline()
        if due is not None and due <= self.now:
            self._run(self.core.handle(Tick(), self.now))
        self.settle()

    def settle(self) -> None:
        while self.auto_persist and self.unwritten:
            self.write()

    def write(self) -> None:
        """Write what the core wants written first."""
        command = self.unwritten.popleft()
        if self.journal.full:
            outcome: Event = PersistFailed(token=command.token, reason="the disk is full")
        else:
            self.journal.append(command.records)
            outcome = Persisted(token=command.token)
        self._run(self.core.handle(outcome, self.now))

    def _run(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Send():
                    if command.peer in self.unreachable:
                        self._run(self.core.handle(Undeliverable(peer=command.peer, id=command.id), self.now))
                        continue
                    self.sent[command.peer].append(command)
                    self._answers[command.re].append(command.message)
                    if command.peer.door == "front":
                        self.told.append(command)
                    actor = self.actors.get(command.peer)
                    if actor is not None:
                        actor(command)
                case Persist():
                    self.unwritten.append(command)
                case DeleteBlobs():
                    self.deleted += command.digests
                case Log():
                    self.logs.append(command)

    def wait(self, seconds: float, *, step: float = 0.25) -> None:
        """Let time pass, with ticks."""
        end = self.now + seconds
        while self.now < end:
            due = self.core.next_deadline()
            self.now = min(end, self.now + step, max(due, self.now + 1e-6) if due is not None else end)
            self.event(Tick())

    # Tenants

    def client(self, tenant: str) -> Peer:
        if tenant not in self._client:
            self._client[tenant] = self.new_peer("front")
        return self._client[tenant]

    def new_peer(self, door: str) -> Peer:
        return Peer(door, f"peer{next(self._peers)}".encode())  # type: ignore[arg-type]

    def tell(
        self,
        message: Message,
        *,
        tenant: str = "a",
        buffers: tuple[Buffer, ...] = (),
        id: str = "",
        peer: Peer | None = None,
        operator: bool = False,
        deadline_ms: int = 0,
    ) -> str:
        """Have a tenant send a message; return its request id."""
        id = id or f"r{next(self._requests)}"
        self.event(
            FrontMessage(
                peer=peer or self.client(tenant),
                tenant=tenant,
                scope="all",
                operator=operator,
                key=f"key-of-{tenant}",
                header=Header(kind=kind_of(message), id=id, deadline_ms=deadline_ms),
                message=message,
                body=msgspec.msgpack.encode(message),
                buffers=buffers,
            )
        )
        return id

    def answers(self, id: str) -> list[Message]:
        """All answers to a request so far."""
        return self._answers[id]

    def ask(self, message: Message, expect: type[T], **how: Any) -> T:
        """Send a message and return its one answer."""
        answers = self.answers(self.tell(message, **how))
        assert len(answers) == 1, answers
        assert isinstance(answers[0], expect), answers[0]
        return answers[0]

    def refused(self, message: Message, **how: Any) -> Failure:
        return self.ask(message, Failure, **how)

    def create(self, policy: str = "p", *, tenant: str = "a", spec: PolicySpec = SPEC) -> PolicyInfo:
        return self.ask(CreatePolicy(policy=policy, spec=spec), PolicyInfo, tenant=tenant)

    def lease(self, policy: str = "p", *, tenant: str = "a", holder: str = "loop") -> str:
        return self.ask(AcquireLease(policy=policy, holder=holder), Lease, tenant=tenant).lease

    def upload(self, digest: str, nbytes: int = 10, *, tenant: str = "a") -> list[Message]:
        peer = self.new_peer("front_bulk")
        self.event(BlobStored(peer=peer, tenant=tenant, request="u", digest=digest, nbytes=nbytes))
        return [send.message for send in self.sent[peer]]

    # Workers

    def say(self, peer: Peer, message: Message, *, buffers: tuple[Buffer, ...] = (), key: str = "k") -> str:
        """Have a worker send a message; return its id."""
        id = f"w{next(self._requests)}"
        self.event(
            BackMessage(
                peer=peer,
                key_name=key,
                roles=("trainer", "inference", "env", "health", "dashboard"),
                header=Header(kind=kind_of(message), id=id),
                message=message,
                body=msgspec.msgpack.encode(message),
                buffers=buffers,
            )
        )
        return id


class FakeWorker:
    """What fake workers have in common: a life, a connection, an inbox that the test empties.

    Attributes:
        busy_s: what its answers took, and what else a test says that it took.
    """

    role = ""

    def __init__(self, world: World, incarnation: str, *, key: str = "k", **register: Any) -> None:
        self.world = world
        self.key = key
        self.incarnation = incarnation
        self.inbox: deque[Send] = deque()
        self.received: list[Message] = []
        self.busy_s = 0.0
        self.register_with: dict[str, Any] = {"role": self.role, "pid": 1, "backbone_name": "lite", **register}
        self.peer = world.new_peer("back")
        self.connect()

    def connect(self) -> None:
        """Connect (again): a new connection, what was in flight is lost."""
        self.world.actors.pop(self.peer, None)
        self.peer = self.world.new_peer("back")
        self.inbox.clear()
        self.world.actors[self.peer] = self._take
        self.world.say(self.peer, Register(incarnation=self.incarnation, **self.register_with), key=self.key)

    def die(self) -> None:
        """kill -9."""
        self.world.actors.pop(self.peer, None)
        self.inbox.clear()

    def beat(self) -> None:
        self.world.say(self.peer, Beat(progress=1, phase="working" if self.inbox else "idle", busy_s=self.busy_s))

    def work(self, count: int | None = None) -> int:
        """Do what is in the inbox (or so many pieces of it)."""
        done = 0
        while self.inbox and (count is None or done < count):
            self.do(self.inbox.popleft())
            done += 1
        return done

    def do(self, send: Send) -> None:
        raise NotImplementedError  # a bare worker is only looked at: it is given nothing

    def _take(self, send: Send) -> None:
        self.received.append(send.message)
        if not send.re:
            self.inbox.append(send)


def run(*workers: FakeWorker) -> None:
    """Let workers work until nothing is left to do."""
    while sum([worker.work() for worker in workers]):
        pass
