"""Chance plays with all that is pure, put together: clients' cores, the master's core, and workers' sessions.

Between them is a network that loses, repeats and reorders what clients say (as changing connections do), breaks
workers' connections, and delivers late what dead workers have said. Anything may die; disks fill up; time jumps.
After each step and in the end the promises are checked, with hypothesis looking for the shortest play that breaks one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from typing import Any, cast

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.journal.records import OpRecord
from common.session import Drop, Work, WorkerSession
from joynexus.client._core import ClientCore
from joynexus.client._events import Answer, Connected, Event, Fail, Op, Received, Tick
from joynexus.client._events import Send as ClientSend
from joynexus.keys import KeyEntry
from joynexus.wire import Buffer, Message, Packet, decode, encode, split
from joynexus.wire.back import Beat, Register, TrainItem
from joynexus.wire.front import (
    Accepted,
    ForwardBackward,
    GetPolicy,
    OpResult,
    OptimStep,
    PolicyInfo,
    Publish,
    SaveState,
)
from services.master.commands import Send
from services.master.config import CoreConfig
from services.master.events import Peer
from services.master.events import Tick as MasterTick
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


class Cluster(RuleBasedStateMachine):
    """Two tenants, one master, two trainers, and everything that may happen to them."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.world = World(CONFIG, self.ledger)
        for tenant in TENANTS:
            self.world.create(policy_of(tenant), tenant=tenant)
        self.loops = {tenant: Loop(self.world, tenant) for tenant in TENANTS}
        self.trainers = [Trainer(self.world, f"t{number}") for number in range(2)]
        self.late: list[Link] = []  # of those that are gone: what they said may arrive yet
        self.spent = 0.0
        self.read = 0  # of what tenants were told

    # Tenants

    @rule(
        tenant=st.sampled_from(TENANTS),
        kinds=st.lists(
            st.sampled_from(["forward_backward", "optim_step", "optim_step", "publish", "save_state"]),
            min_size=1,
            max_size=3,
        ),
    )
    def order(self, tenant: str, kinds: list[str]) -> None:
        for kind in kinds:
            self.loops[tenant].order(kind)

    @rule(tenant=st.sampled_from(TENANTS), index=st.integers(0, 2), again=st.booleans())
    def master_hears_a_client(self, tenant: str, index: int, again: bool) -> None:
        link = self.loops[tenant].link
        if index < len(link.up):
            frames = link.up[index]
            link.deliver(index)
            if again:
                link.receive(frames)

    @rule(tenant=st.sampled_from(TENANTS), index=st.integers(0, 2))
    def client_hears(self, tenant: str, index: int) -> None:
        loop = self.loops[tenant]
        if index < len(loop.link.down):
            loop.hear(index)

    @rule(tenant=st.sampled_from(TENANTS), up=st.booleans(), index=st.integers(0, 2))
    def message_is_lost(self, tenant: str, up: bool, index: int) -> None:
        link = self.loops[tenant].link
        queue = link.up if up else link.down
        if index < len(queue):
            del queue[index]

    @rule(tenant=st.sampled_from(TENANTS))
    def clients_connection_breaks(self, tenant: str) -> None:
        loop = self.loops[tenant]
        self._gone(loop.link)
        loop.connect()

    # Trainers

    @rule(which=st.integers(0, 1), up=st.integers(0, 4), down=st.integers(0, 4))
    def trainer_and_master_talk(self, which: int, up: int, down: int) -> None:
        trainer = self.trainers[which]
        for _ in range(min(up, len(trainer.link.up))):
            trainer.link.deliver()
        for _ in range(min(down, len(trainer.link.down))):
            trainer.hear()

    @rule(which=st.integers(0, 1), count=st.integers(1, 3))
    def trainer_works(self, which: int, count: int) -> None:
        self.trainers[which].work(count)

    @rule(which=st.integers(0, 1))
    def trainers_connection_breaks(self, which: int) -> None:
        trainer = self.trainers[which]
        self._gone(trainer.link)
        trainer.connect()

    @rule(which=st.integers(0, 1))
    def trainer_dies(self, which: int) -> None:
        self._gone(self.trainers[which].link)
        self.trainers[which] = Trainer(self.world, f"t{which}")

    @precondition(lambda self: self.late)
    @rule()
    def late_words_arrive(self) -> None:
        link = self.late[0]
        link.deliver()
        if not link.up:
            self.late.pop(0)

    # The master, its disk, and time

    @precondition(lambda self: self.spent < PATIENCE_S)
    @rule()
    def master_dies(self) -> None:
        self.world.auto_persist = True
        self.late.clear()  # connections end with it
        self.world.crash()
        self.spent += 0.5
        ends: list[Loop | Trainer] = [*self.loops.values(), *self.trainers]
        for end in ends:
            end.connect()

    @rule(behind=st.booleans())
    def journal_is_slow(self, behind: bool) -> None:
        self.world.auto_persist = not behind
        self.world.settle()

    @rule(full=st.booleans())
    def disk_is_full(self, full: bool) -> None:
        self.ledger.full = full

    @precondition(lambda self: self.spent < PATIENCE_S)
    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 8.0]), jumps=st.booleans())
    def time_passes(self, seconds: float, jumps: bool) -> None:
        seconds = min(seconds, PATIENCE_S - self.spent)
        self.spent += seconds
        if jumps:  # the machine slept: nobody had a chance to do anything meanwhile
            self.world.now += seconds
            self.world.event(MasterTick())
            seconds = 0.01
        self._wait(seconds)

    # Promises

    @invariant()
    def what_was_told_is_on_disk_and_is_ones_own(self) -> None:
        for send in self.world.told[self.read :]:
            tenant = next((name for name, loop in self.loops.items() if loop.link.peer == send.peer), "")
            if not tenant:
                continue
            said = msgspec.msgpack.encode(send.message)
            assert all(f"of-{other}".encode() not in said for other in TENANTS if other != tenant)
            message = send.message
            if isinstance(message, Accepted | OpResult):
                rows = self.ledger.ops[tenant, policy_of(tenant)]
                assert message.seq in rows, "an op is acknowledged once it is on disk"
                assert len(rows[message.seq]) >= 1 + isinstance(message, OpResult), "and so is its result"
        self.read = len(self.world.told)

    @invariant()
    def no_op_is_done_out_of_order_or_with_another_result(self) -> None:
        assert not [log for log in self.world.logs if log.event in ("replay_differs", "op_out_of_order")]

    def teardown(self) -> None:
        """Let everything settle; then everybody has what an undisturbed cluster would have given."""
        self.ledger.full = False
        self.world.auto_persist = True
        self.world.settle()
        self._calm(20)
        for loop in self.loops.values():
            loop.order("publish")  # whichever trainer has the policy now brings it up to date
        self._calm(20)
        self.what_was_told_is_on_disk_and_is_ones_own()
        for tenant, loop in self.loops.items():
            assert loop.core.waiting == loop.core.lanes.waiting == 0, "every request is answered"
            assert set(loop.resolved) == set(loop.ordered)
            info = self.world.ask(GetPolicy(policy=policy_of(tenant)), PolicyInfo, tenant=tenant)
            assert info.next_seq == len(loop.ordered) + 1, "every op was applied once"
            seqs = [loop.resolved[name].seq for name in loop.ordered]
            assert seqs == sorted(seqs), "and in order"
            expected = reference(self.ledger.history[tenant], len(loop.ordered))
            assert info.step == expected.step
            assert loop.resolved[loop.ordered[-1]].digest == expected.digest()
        for trainer in self.trainers:
            assert trainer.session.undelivered == 0
            assert not trainer.fake.inbox
        roster = self.world.core._roster
        assert all(not worker.given for worker in roster.living("trainer")), "credit is back"
        assert not self.world.core._outbox._saving
        assert not self.world.core._outbox._unsaved

    # Inside

    def _gone(self, link: Link) -> None:
        link.cut()
        if link.up:
            self.late.append(link)

    def _wait(self, seconds: float) -> None:
        self.world.wait(seconds)
        for loop in self.loops.values():
            loop.handle(Tick())
        for trainer in self.trainers:
            trainer.pump()

    def _calm(self, seconds: int) -> None:
        for _ in range(4 * seconds):
            self._wait(0.25)
            busy = True
            while busy:
                busy = False
                for link in self.late:
                    while link.up:
                        link.deliver()
                self.late.clear()
                for loop in self.loops.values():
                    while loop.link.up:
                        loop.link.deliver()
                        busy = True
                    while loop.link.down:
                        loop.hear()
                        busy = True
                for trainer in self.trainers:
                    trainer.work(10)
                    while trainer.link.up:
                        trainer.link.deliver()
                        busy = True
                    while trainer.link.down:
                        trainer.hear()
                        busy = True


Cluster.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestPromisesHoldWhateverHappens = Cluster.TestCase
