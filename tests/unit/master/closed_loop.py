"""Clients in a closed loop, transfers and inference devices under a simulated clock, around the core that ships.

In: how long clients think, how long a request travels, how long a device takes for a group. Out: requests a second,
latencies, groups. Never: a decision: those are the core's.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from joynexus.tenants import TenantLimits
from joynexus.wire import Array, Header, Message
from joynexus.wire.back import PredictDone, Predicted, PredictGroup, WeightsApplied, WeightsOffer
from joynexus.wire.front import Act, Actions
from services.master.commands import Send
from services.master.config import CoreConfig
from services.master.events import FrontMessage, LimitsChanged, Tick
from tests.unit.master.actors import new_incarnation
from tests.unit.master.acts import publish
from tests.unit.master.world import FakeWorker, World

Device = Callable[[int], float]


class Link:
    """A line on which one thing travels after the other."""

    def __init__(self) -> None:
        self._free = 0.0

    def arrival(self, now: float, seconds: float) -> float:
        """Return when something that is sent now and takes so long arrives."""
        self._free = max(now, self._free) + seconds
        return self._free


class ClosedLoop:
    """Clients that ask, wait for the answer, think, and ask again.

    Args:
        thinks: seconds that each client thinks; each with one row.
        device: seconds that a group of so many rows takes.
        jitter: thinking varies by up to this share.
        transfer_s: a request travels so long, on one line for all; likewise a row on its way to a worker.
        workers: inference workers.
        tenants: client i belongs to tenant i modulo this.
        owners: or to this one.
        weights: of the tenants.

    Attributes:
        groups: rows of each group, with the time at which it was begun.
        latencies: of each request, with its client and the time of its answer.
        device_s: seconds that devices worked.
        peers: the clients' connections.
    """

    def __init__(
        self,
        thinks: list[float],
        device: Device,
        *,
        jitter: float = 0.0,
        transfer_s: float = 0.0,
        workers: int = 1,
        credit: int = 2,
        tenants: int = 1,
        owners: list[int] | None = None,
        weights: list[float] | None = None,
        config: CoreConfig | None = None,
        seed: int = 0,
    ) -> None:
        self.world = World(config)
        for tenant in range(tenants):
            self.world.create(tenant=f"t{tenant}")
            publish(self.world, tenant=f"t{tenant}")
        if weights is not None:
            limits = {f"t{tenant}": TenantLimits(weight=weight) for tenant, weight in enumerate(weights)}
            self.world.event(LimitsChanged(limits=limits))
        self.groups: list[tuple[float, int]] = []
        self.latencies: list[tuple[float, int, float]] = []
        self.device_s = 0.0
        self._device, self._thinks, self._jitter, self._transfer_s = device, thinks, jitter, transfer_s
        self._chance = random.Random(seed)
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._front = Link()
        self._asked: dict[str, tuple[int, float]] = {}
        self.peers = [self.world.new_peer("front") for _ in thinks]
        self._tenants = [f"t{owners[client] if owners else client % tenants}" for client in range(len(thinks))]
        for client, peer in enumerate(self.peers):
            self.world.actors[peer] = lambda send, client=client: self._answered(client, send)  # type: ignore[misc]
        self._stations = [Station(self, index, credit) for index in range(workers)]
        self.start = self.world.now
        for client in range(len(thinks)):
            self.at(self.start + 1e-4 * client, lambda client=client: self._ask(client))  # type: ignore[misc]

    def run(self, seconds: float) -> ClosedLoop:
        """Let so much time pass."""
        end = self.world.now + seconds
        while True:
            due = self.world.core.next_deadline()
            at = self._events[0][0] if self._events else end
            now = min(at, max(due, self.world.now) if due is not None else at)
            if now > end:
                self.world.now = end
                return self
            self.world.now = now
            if due is not None and due <= now:
                self.world.event(Tick())
            elif self._events and self._events[0][0] <= now:
                heapq.heappop(self._events)[2]()

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Have something happen at a time."""
        heapq.heappush(self._events, (time, next(self._numbers), call))

    def rate(self, after: float = 1.0) -> float:
        """Return requests a second, once things have settled."""
        begin = self.start + after
        return sum(at >= begin for at, _, _ in self.latencies) / (self.world.now - begin)

    def latency(self, client: int = 0, after: float = 1.0, part: float = 0.5) -> float:
        """Return a client's latency that this part of its requests does not exceed."""
        mine = sorted(s for at, who, s in self.latencies if who == client and at >= self.start + after)
        return mine[min(int(part * len(mine)), len(mine) - 1)]

    def sizes(self, after: float = 1.0) -> list[int]:
        """Return the rows of the groups, once things have settled."""
        return [rows for at, rows in self.groups if at >= self.start + after]

    def _ask(self, client: int) -> None:
        now = self.world.now
        self.at(self._front.arrival(now, self._transfer_s), lambda: self._arrive(client, now))

    def _arrive(self, client: int, asked: float) -> None:
        request = f"c{next(self._numbers)}"
        self._asked[request] = (client, asked)
        act = Act(policy="p", state=Array(dtype="<f4", shape=(1, 2), frame=0), images=(), instructions=("go",))
        self.world.event(
            FrontMessage(
                peer=self.peers[client],
                tenant=self._tenants[client],
                scope="all",
                operator=False,
                header=Header(kind="act", id=request),
                message=act,
                body=msgspec.msgpack.encode(act),
                buffers=(b"x" * 8,),
            )
        )

    def _answered(self, client: int, send: Send) -> None:
        assert isinstance(send.message, Actions), send.message
        _, asked = self._asked.pop(send.re)
        now = self.world.now
        self.latencies.append((now, client, now - asked))
        think = self._thinks[client] * (1 + self._jitter * self._chance.uniform(-1, 1))
        self.at(now + think, lambda: self._ask(client))


class Station(FakeWorker):
    """An inference worker with a device."""

    role = "inference"

    def __init__(self, loop: ClosedLoop, index: int, credit: int) -> None:
        self._loop = loop
        self._link = Link()
        self._free = 0.0
        super().__init__(loop.world, new_incarnation(), key=f"s{index}", credit={"predict": credit})
        self.world.actors[self.peer] = self._given

    def _given(self, send: Send) -> None:
        message: Any = send.message
        if isinstance(message, WeightsOffer):
            applied = WeightsApplied(tenant=message.tenant, policy=message.policy, version=message.version)
            self._loop.at(self.world.now, lambda: self._say(applied))
        elif isinstance(message, PredictGroup):
            loop, rows = self._loop, len(message.items)
            here = self._link.arrival(self.world.now, rows * loop._transfer_s)
            begin = max(here, self._free)
            self._free = begin + loop._device(rows)
            loop.device_s += loop._device(rows)
            loop.groups.append((begin, rows))
            loop.at(self._free, lambda: self._done(message, loop._device(rows) / rows))

    def _done(self, group: PredictGroup, busy_s: float) -> None:
        items, buffers = [], []
        for index, item in enumerate(group.items):
            buffers.append(np.zeros((1, 1, 2), np.float32).tobytes())
            actions = Array(dtype="<f4", shape=(1, 1, 2), frame=index)
            items.append(Predicted(request=item.request, version=1, actions=actions, rows=1, busy_s=busy_s))
        done = PredictDone(task=group.task, attempt=group.attempt, items=tuple(items))
        self.world.say(self.peer, done, buffers=tuple(buffers))

    def _say(self, message: Message) -> None:
        self.world.say(self.peer, message)
