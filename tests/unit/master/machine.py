"""Clients' cores, the master's core and workers' sessions on links that lose, repeat and reorder what they carry."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from typing import Any, cast

import msgspec

from common.journal.records import OpRecord
from common.session import Drop, Work, WorkerSession
from joynexus.client._core import ClientCore
from joynexus.client._events import Answer, Connected, Event, Fail, Op, Received
from joynexus.client._events import Send as ClientSend
from joynexus.keys import KeyEntry
from joynexus.wire import Buffer, Message, Packet, decode, encode, split
from joynexus.wire.back import Beat, Register, TrainItem
from joynexus.wire.front import ForwardBackward, OpResult, OptimStep, Publish, SaveState
from services.master.commands import Send
from services.master.config import CoreConfig
from services.master.events import Peer
from services.master.gate import BlobMessage, Refused, admit
from tests.unit.master.actors import FakeTrainer, Weights, apply, new_incarnation
from tests.unit.master.ops import BUFFERS, SAMPLES
from tests.unit.master.world import MemoryJournal, World

CONFIG = CoreConfig(
    checkpoint_steps=3,
    turn_ops=2,
    group_ops=4,
    kept_replies=10_000,
    kills=10_000,
    payload_memory_bytes=200,
    stuck_s=2.0,
)
TENANTS = ("a", "b")
PATIENCE_S = 45.0
"""All the time that a play takes: a minute without a word would end a lease, and with it ops."""

Frames = list[Buffer]


def policy_of(tenant: str) -> str:
    return f"only-of-{tenant}"


class Ledger(MemoryJournal):
    """A journal that remembers all ops that were ever written, with what they carried."""

    def __init__(self) -> None:
        super().__init__()
        self.history: defaultdict[str, dict[int, OpRecord]] = defaultdict(dict)

    def append(self, records: Any) -> None:
        records = list(records)
        for record in records:
            if isinstance(record, OpRecord):
                self.history[record.tenant][record.seq] = record
        super().append(records)


class Link:
    """One connection to the master."""

    def __init__(self, world: World, entry: KeyEntry) -> None:
        self.world, self.entry = world, entry
        self.peer = world.new_peer("front" if entry.domain == "tenant" else "back")
        self.up: deque[Frames] = deque()  # on its way to the master
        self.down: deque[Frames] = deque()
        world.actors[self.peer] = self._send

    def deliver(self, index: int = 0) -> None:
        """The master receives something."""
        frames = self.up[index]
        del self.up[index]
        self.receive(frames)

    def receive(self, frames: Frames) -> None:
        event = admit(self.peer, frames, self.entry)
        assert not isinstance(event, Refused | BlobMessage), event
        self.world.event(event)

    def cut(self) -> None:
        """Nobody hears the master any more; what was said may still arrive."""
        self.world.actors.pop(self.peer, None)
        self.down.clear()

    def _send(self, send: Send) -> None:
        frames = encode(send.message, id=send.id, re=send.re, buffers=send.buffers)
        self.down.append([bytes(frame) for frame in frames])


class Desk:
    """What a fake trainer takes for the world: it speaks through its session."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._ids = itertools.count(1)
        self.actors: dict[Peer, Any] = {}

    def new_peer(self, door: str) -> Peer:
        return Peer("back", b"desk")

    def say(self, peer: Peer, message: Message, *, buffers: tuple[Buffer, ...] = (), key: str = "") -> None:
        if isinstance(message, Register):
            self._session.register(message)
        else:
            self._session.say(encode(message, id=f"d{next(self._ids)}", buffers=buffers))


class Trainer:
    """A trainer behind a real session."""

    def __init__(self, world: World, key: str) -> None:
        self.world = world
        self.entry = KeyEntry(name=key, public="", domain="worker", roles=("trainer",))
        self.session = WorkerSession(beat=lambda: Beat(progress=1, phase="working", busy_s=0.0))
        self.fake = FakeTrainer(cast(Any, Desk(self.session)), new_incarnation(), key=key)
        self.connect()

    def connect(self) -> None:
        self.link = Link(self.world, self.entry)
        self.session.came_up(bulk=False, now=self.world.now)
        self.pump()

    def pump(self) -> None:
        """Put on the socket whatever the session wants there."""
        self._react(self.session.expire(self.world.now))
        while (send := self.session.next_send(self.world.now, bulk=False)) is not None:
            self.link.up.append(send.frames)
            self.session.sent(send, self.world.now)

    def hear(self) -> None:
        packet = decode(self.link.down.popleft())
        self._react(self.session.received(packet, self.world.now))
        self.pump()

    def work(self, count: int) -> None:
        self.fake.work(count)
        self.pump()

    def _react(self, events: Any) -> None:
        for event in events:
            match event:
                case Work(packet=packet):
                    given = Send(
                        peer=self.fake.peer, message=packet.message, id=packet.header.id, buffers=packet.buffers
                    )
                    self.fake.inbox.append(given)
                case Drop(tasks=tasks):
                    kept = [send for send in self.fake.inbox if getattr(send.message, "task", "") not in tasks]
                    self.fake.inbox.clear()
                    self.fake.inbox.extend(kept)


class Loop:
    """A tenant's loop behind a real client core."""

    def __init__(self, world: World, tenant: str) -> None:
        self.world, self.tenant = world, tenant
        self.entry = KeyEntry(name=tenant, public="", domain="tenant", tenant=tenant)
        self.core = ClientCore(address="a", holder=f"loop-of-{tenant}", jitter=lambda: 0.5)
        self.core.lanes.window = 4
        self.ordered: list[str] = []
        self.resolved: dict[str, OpResult] = {}
        self.link = Link(world, self.entry)

    def connect(self) -> None:
        self.link = Link(self.world, self.entry)
        self.handle(Connected(channel="control"))

    def order(self, kind: str) -> None:
        name = f"op{len(self.ordered)}"
        self.ordered.append(name)
        place: dict[str, Any] = {"policy": policy_of(self.tenant), "lease": "", "seq": 0}
        message: Message
        match kind:
            case "forward_backward":
                samples = msgspec.structs.replace(SAMPLES, instructions=(f"{name} of {self.tenant}",))
                message = ForwardBackward(**place, samples=samples)
            case "publish":
                message = Publish(**place)
            case "save_state":
                message = SaveState(**place, state="s")
            case _:
                message = OptimStep(**place)
        buffers = BUFFERS if isinstance(message, ForwardBackward) else ()
        self.handle(Op(id=name, policy=policy_of(self.tenant), message=message, buffers=buffers))

    def hear(self, index: int = 0) -> None:
        frames = self.link.down[index]
        del self.link.down[index]
        self.handle(Received(packet=decode(frames)))

    def handle(self, event: Event) -> None:
        for command in self.core.handle(event, self.world.now):
            match command:
                case ClientSend():
                    frames = encode(
                        command.message, id=command.id, deadline_ms=command.deadline_ms, buffers=command.buffers
                    )
                    self.link.up.append(frames)
                case Answer(id=id, packet=Packet(message=OpResult() as result)):
                    assert id not in self.resolved, "an op is resolved once"
                    self.resolved[id] = result
                case Fail():
                    raise AssertionError(f"{command.id} failed: {command.error}")


def reference(ops: dict[int, OpRecord], upto: int) -> Weights:
    """What an undisturbed trainer comes to after these ops."""
    weights = Weights()
    for seq in range(1, upto + 1):
        op = ops[seq]
        item = TrainItem(tenant=op.tenant, policy=op.policy, seq=seq, kind=cast(Any, op.kind))
        weights, _ = apply(weights, item, b"".join(split(op.payload)) if op.payload else b"")
    return weights
