"""Any order of loss, duplication, reordering and restart: every op is applied once, in order, and resolved once."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from joynexus.client._core import ClientCore
from joynexus.client._events import Answer, Connected, Event, Fail, Op, Received, Send, Tick, Unsent
from joynexus.wire import ErrorCode, Header, Message, Packet, failure
from joynexus.wire.front import Accepted, AcquireLease, Lease, OpResult, SaveState


@dataclass
class Service:
    """What the master promises about ops, in a few lines: durable once accepted, same number same answer."""

    applied: list[str] = field(default_factory=list)
    accepted: int = 0

    def hear(self, message: Message, refuse: bool) -> list[Message]:
        if isinstance(message, AcquireLease):
            return [Lease(policy="p", lease="L", next_seq=self.accepted + 1)]
        assert isinstance(message, SaveState)
        if message.seq > self.accepted + 1:
            return [failure(ErrorCode.GAP, f"expected {self.accepted + 1}")]
        if message.seq == self.accepted + 1:
            if refuse:
                return [failure(ErrorCode.OVERLOADED, "later", retry_after_ms=50)]
            self.accepted += 1
            self.applied.append(message.state)
        elif self.applied[message.seq - 1] != message.state:
            return [failure(ErrorCode.CONFLICT, "another payload under this number")]
        return [Accepted(policy="p", seq=message.seq), OpResult(policy="p", seq=message.seq)]


@dataclass
class World:
    """A client and a service with a network between them that does what `random` says."""

    rng: random.Random
    core: ClientCore = field(init=False)
    service: Service = field(default_factory=Service)
    now: float = 0.0
    to_service: list[Send] = field(default_factory=list)
    to_client: list[Received] = field(default_factory=list)
    resolved: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.core = ClientCore(address="a", holder="me", jitter=self.rng.random)
        self.core.lanes.window = 4

    def client(self, event: Event) -> None:
        for command in self.core.handle(event, self.now):
            match command:
                case Send():
                    self.to_service.append(command)
                case Answer() | Fail():
                    assert command.id not in self.resolved, "resolved twice"
                    self.resolved[command.id] = type(command).__name__

    def deliver_to_service(self, index: int) -> None:
        send = self.to_service[index]
        for reply in self.service.hear(send.message, refuse=self.rng.random() < 0.2):
            header = Header(kind="any", id="x", re=send.id)
            self.to_client.append(Received(packet=Packet(header=header, message=reply)))

    def step(self) -> None:
        self.now += self.rng.random() * 0.5
        match self.rng.randrange(8):
            case 0 | 1 if self.to_service:  # one of the first few: connections reorder across a reconnect only
                self.deliver_to_service(0)
                self.to_service.pop(0)
            case 2 if self.to_service:
                self.to_service.pop(self.rng.randrange(len(self.to_service)))
            case 3 if self.to_service:
                self.deliver_to_service(self.rng.randrange(len(self.to_service)))
            case 4 | 5 if self.to_client:
                self.client(self.to_client.pop(0))
            case 6 if self.to_client:
                self.to_client.pop(self.rng.randrange(len(self.to_client)))
            case 7 if self.rng.random() < 0.2:
                self.to_service.clear()
                self.to_client.clear()
                self.client(Connected(channel="control"))
            case _ if self.to_service and self.rng.random() < 0.2:
                self.client(Unsent(id=self.to_service.pop(0).id))
            case _:
                self.client(Tick())

    def settle(self) -> None:
        """A quiet network from here on."""
        for _ in range(500):
            if not self.core.waiting and not self.core.lanes.waiting:
                return
            while self.to_service:
                self.deliver_to_service(0)
                self.to_service.pop(0)
            while self.to_client:
                self.client(self.to_client.pop(0))
            self.now = max(self.now, self.core.next_deadline() or 0.0)
            self.client(Tick())
        raise AssertionError("the client never came to rest")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 12), steps=st.integers(0, 120))
def test_every_op_is_applied_once_in_order_and_resolved_once(seed: int, count: int, steps: int) -> None:
    world = World(random.Random(seed))
    names = [f"op{index}" for index in range(count)]
    todo = list(names)
    for _ in range(steps):
        if todo and world.rng.random() < 0.3:
            name = todo.pop(0)
            world.client(Op(id=name, policy="p", message=SaveState(policy="p", lease="", seq=0, state=name)))
        world.step()
    for name in todo:
        world.client(Op(id=name, policy="p", message=SaveState(policy="p", lease="", seq=0, state=name)))
    world.settle()
    assert world.service.applied == names
    assert world.resolved == dict.fromkeys(names, "Answer")
