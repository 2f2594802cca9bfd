"""Ops of each policy, in order: who holds the lease, which sequence number is next, how many are under way.

In: ops as the caller orders them, leases as the service grants them. Out: ops with their lease and sequence number
filled in, never more under way than the service allows. Never: I/O, or a sequence number used for two payloads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from joynexus.client._events import Ask, Op
from joynexus.wire import Buffer, Message
from joynexus.wire.front import AcquireLease, Lease


@dataclass(slots=True, eq=False)
class OpState:
    """One op under way.

    Attributes:
        id: of its message; a renumbered op is another message with another id.
        order: what the caller ordered; `order.id` is the caller's name for it.
    """

    id: str
    policy: str
    seq: int
    message: Message
    buffers: tuple[Buffer, ...]
    order: Op
    accepted: bool = False


@dataclass(slots=True)
class _Lane:
    lease: str = ""
    lease_ask: str = ""
    next_seq: int = 0
    used_at: float = 0.0
    generation: int = 0
    waiting: deque[Op] = field(default_factory=deque)
    under_way: dict[str, OpState] = field(default_factory=dict)


class Lanes:
    """All lanes of a client.

    Args:
        holder: name under which leases are asked for.
        ttl_s: silence after which the service ends a lease.
    """

    def __init__(self, *, holder: str, ttl_s: float) -> None:
        self._holder, self._ttl_s = holder, ttl_s
        self._lanes: dict[str, _Lane] = {}
        self.window = 64

    @property
    def waiting(self) -> int:
        """Ops that were not sent yet."""
        return sum(len(lane.waiting) for lane in self._lanes.values())

    def add(self, op: Op) -> None:
        """Put an op at the end of its policy's lane."""
        self._lanes.setdefault(op.policy, _Lane()).waiting.append(op)

    def busy(self, policy: str) -> bool:
        """Return whether ops of the policy wait for a result."""
        lane = self._lanes.get(policy)
        return lane is not None and bool(lane.waiting or lane.under_way)

    # Leases

    def wants_lease(self, policy: str, now: float) -> Ask | None:
        """Return the question for a lease if the lane needs one, or one that may have run out meanwhile."""
        lane = self._lanes[policy]
        if not lane.waiting or lane.lease_ask:
            return None
        if lane.lease and (lane.under_way or now - lane.used_at < self._ttl_s / 2):
            return None
        if any(not op.accepted for op in lane.under_way.values()):
            return None  # the next number is known for sure only when nothing is on its way
        lane.lease, lane.generation = "", lane.generation + 1
        lane.lease_ask = f"{self._holder}.{policy[:32]}.{lane.generation}"
        message = AcquireLease(policy=policy, holder=self._holder, ttl_ms=int(self._ttl_s * 1000))
        return Ask(id=lane.lease_ask, message=message, patience_s=self._ttl_s)

    def granted(self, ask_id: str, lease: Lease, now: float) -> bool:
        """Take a lease; return whether a lane had asked for it."""
        lane = self._lanes.get(lease.policy)
        if lane is None or lane.lease_ask != ask_id:
            return False
        lane.lease, lane.lease_ask, lane.next_seq, lane.used_at = lease.lease, "", lease.next_seq, now
        return True

    def denied(self, ask_id: str) -> list[Op]:
        """Give up on a lease; return the ops that waited for it."""
        for lane in self._lanes.values():
            if lane.lease_ask == ask_id:
                ops = list(lane.waiting)
                lane.waiting.clear()
                lane.lease, lane.lease_ask = "", ""
                return ops
        return []

    def drop(self, policy: str) -> str:
        """Forget the lease of a policy and return it, empty if there was none."""
        lane = self._lanes.get(policy)
        if lane is None:
            return ""
        lease, lane.lease = lane.lease, ""
        return lease

    # Ops

    def ready(self, policy: str, now: float) -> list[OpState]:
        """Number the ops that may be sent now."""
        lane = self._lanes[policy]
        ops: list[OpState] = []
        while lane.lease and lane.waiting and len(lane.under_way) < self.window:
            order = lane.waiting.popleft()
            message = msgspec.structs.replace(order.message, lease=lane.lease, seq=lane.next_seq)
            op = OpState(f"{order.id}.{lane.generation}", policy, lane.next_seq, message, order.buffers, order)
            lane.next_seq += 1
            lane.used_at = now
            lane.under_way[op.id] = op
            ops.append(op)
        return ops

    def finish(self, op: OpState, now: float) -> None:
        """The op has its result."""
        lane = self._lanes[op.policy]
        del lane.under_way[op.id]
        lane.used_at = now

    def earlier_unaccepted(self, op: OpState) -> bool:
        """Return whether an op before this one was not accepted yet."""
        others = self._lanes[op.policy].under_way.values()
        return any(other.seq < op.seq and not other.accepted for other in others)

    def refused(self, op: OpState) -> list[OpState]:
        """An op failed without a result, so its number may be free: learn the next number from a new lease.

        Returns:
            The unaccepted ops after it, taken back: they wait again, in order, to be numbered anew.
        """
        lane = self._lanes[op.policy]
        del lane.under_way[op.id]
        lane.lease = ""
        later = [other for other in lane.under_way.values() if other.seq > op.seq and not other.accepted]
        for other in reversed(later):
            del lane.under_way[other.id]
            lane.waiting.appendleft(other.order)
        return later
