"""The client's core: what is sent when, and what an answer means. No sockets, no clock, no randomness of its own.

In: events (`_events`), each with the time it happened at. Out: commands. Never: I/O. `handle` is a function of the
events so far and of the injected `jitter`, so every loss, duplicate and restart is tested without a network.

The rules:

- A question keeps its id when it is sent again; the service answers repetitions alike, so asking again is safe.
- It is sent again soon after the connection came back, and after `resend_s` of silence with full-jitter back-off.
- Refusals that a client may retry (`RETRYABLE`) are retried after the service's hint, for at most `RETRY_BUDGET_S`.
  One for asking too often (`TOO_OFTEN`) is no word about the question: it is retried for as long as the asker waits,
  an op for ever.
- Ops have two answers: `Accepted` (durable) and `OpResult`. Between the two they are sent again now and then, which
  attaches this connection to the running op; nothing is applied twice because their sequence number is the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from joynexus.client._events import (
    Answer,
    Ask,
    Channel,
    Command,
    Connected,
    Event,
    Fail,
    Op,
    Received,
    Refused,
    Release,
    Send,
    Tick,
    Unsent,
)
from joynexus.client._lanes import Lanes, OpState
from joynexus.wire import ErrorCode, Failure, JoyNexusError, Packet, failure
from joynexus.wire.errors import RETRYABLE, TOO_OFTEN
from joynexus.wire.front import Accepted, AcquireLease, Hello, Lease, OpResult, ReleaseLease, Welcome

RETRY_BUDGET_S = 60.0
"""How long a question may be refused as overloaded or unavailable before the refusal is raised."""
SILENCE_LIMIT_S = 120.0
"""How long the whole service may be silent before ops that wait for their results are given up."""
BACKOFF_BASE_S, BACKOFF_CAP_S = 0.2, 10.0
UNSENT_S = 0.02
REATTACH_S = 5.0
"""Silence after which an accepted op is sent again."""
RETURN_S = 0.5
"""When a connection is back, what waits is sent again at a random moment within this: everybody's may be back."""


@dataclass(slots=True)
class _Pending:
    ask: Ask
    deadline: float | None
    due: float = 0.0
    tries: int = 0
    refused_since: float | None = None
    op: OpState | None = None


@dataclass
class ClientCore:
    """State of one client.

    Args:
        address: of the control socket, for sentences.
        holder: random name of this client, as the holder of its leases.
        jitter: uniform random number in [0, 1), called for every back-off.
        lease_ttl_s: silence after which the service ends a lease.
    """

    address: str
    holder: str
    jitter: Callable[[], float]
    lease_ttl_s: float = 60.0
    welcome: Welcome | None = None
    _hello: Ask | None = None
    _pending: dict[str, _Pending] = field(default_factory=dict)
    _timers: list[tuple[float, int, str]] = field(default_factory=list)
    _timer_count: int = 0
    _heard_at: float = 0.0
    _refusals: dict[Channel, str] = field(default_factory=dict)
    _stood: set[Channel] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.lanes = Lanes(holder=self.holder, ttl_s=self.lease_ttl_s)

    def next_deadline(self) -> float | None:
        """When the next `Tick` is wanted; None if nothing waits."""
        return self._timers[0][0] if self._timers else None

    @property
    def waiting(self) -> int:
        """Questions without an answer yet."""
        return len(self._pending)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; return what is to be done, in order."""
        match event:
            case Ask():
                return self._ask(event, now)
            case Op():
                self._was_idle(now)
                self.lanes.add(event)
                return self._pump(event.policy, now)
            case Release():
                return self._release(event, now)
            case Received():
                return self._received(event.packet, now)
            case Unsent():
                if pending := self._pending.get(event.id):
                    self._schedule(pending, now + UNSENT_S * (1 + self.jitter()))
                return []
            case Connected():
                return self._connected(event.channel, now)
            case Refused():
                return self._refused(event)
            case Tick():
                return self._tick(now)

    # Asking

    def _ask(self, ask: Ask, now: float, op: OpState | None = None) -> list[Command]:
        self._was_idle(now)
        if isinstance(ask.message, Hello):
            self._hello = ask
        pending = _Pending(ask=ask, deadline=None if op else now + ask.patience_s, op=op)
        self._pending[ask.id] = pending
        return [self._send(pending, now)]

    def _was_idle(self, now: float) -> None:
        if not self._pending and not self.lanes.waiting:
            self._heard_at = now  # silence counts from the moment somebody waits for an answer

    def _send(self, pending: _Pending, now: float) -> Send:
        ask = pending.ask
        wait = REATTACH_S if pending.op and pending.op.accepted else ask.resend_s
        self._schedule(pending, now + wait + self._backoff(pending.tries))
        pending.tries += 1
        left_ms = 0 if pending.deadline is None else max(1, int((pending.deadline - now) * 1000))
        return Send(channel=ask.channel, id=ask.id, message=ask.message, buffers=ask.buffers, deadline_ms=left_ms)

    def _backoff(self, tries: int) -> float:
        return self.jitter() * min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2.0 ** min(tries, 16))

    def _schedule(self, pending: _Pending, due: float) -> None:
        if pending.deadline is not None:
            due = min(due, pending.deadline)
        pending.due = due
        self._timer_count += 1  # equal times fire in the order they were set: ops leave in sequence
        heapq.heappush(self._timers, (due, self._timer_count, pending.ask.id))

    # Time

    def _tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        while self._timers and self._timers[0][0] <= now:
            due, _, id_ = heapq.heappop(self._timers)
            pending = self._pending.get(id_)
            if pending is None or pending.due != due:
                continue  # answered or rescheduled since
            if pending.deadline is not None and now >= pending.deadline:
                commands += self._fail(id_, self._silent(pending.ask.patience_s, pending.ask, now), now)
            elif pending.deadline is None and now - self._heard_at >= SILENCE_LIMIT_S:
                commands += self._fail(id_, self._silent(SILENCE_LIMIT_S, pending.ask, now), now)
            else:
                commands.append(self._send(pending, now))
        return commands

    def _silent(self, seconds: float, ask: Ask, now: float) -> JoyNexusError:
        if why := self._refusals.get(ask.channel):
            return JoyNexusError(failure(ErrorCode.FORBIDDEN, why))
        if now - self._heard_at < seconds:
            late = f"no answer to this within {seconds:g} s, but the cluster is there: wait longer; `joynexus status` "
            return JoyNexusError(failure(ErrorCode.DEADLINE, late + "shows what else it has to do"))
        what = f"no answer from {self.address} within {seconds:g} s: is the cluster running? "
        if isinstance(ask.message, Hello):
            return JoyNexusError(failure(ErrorCode.UNAVAILABLE, what + "start it with `joynexus up`"))
        return JoyNexusError(failure(ErrorCode.DEADLINE, what + "`joynexus status` shows its parts"))

    # Answers

    def _received(self, packet: Packet, now: float) -> list[Command]:
        self._heard_at = now
        pending = self._pending.get(packet.header.re)
        if pending is None:
            return []  # a second answer to a question that was asked twice
        message = packet.message
        if isinstance(message, Failure):
            return self._failed(pending, message, now)
        if pending.op is None:
            return self._answered(pending, packet, now)
        if isinstance(message, Accepted):
            pending.op.accepted, pending.tries, pending.refused_since = True, 0, None
            self._schedule(pending, now + REATTACH_S)
            return []
        if isinstance(message, OpResult):
            del self._pending[pending.ask.id]
            self.lanes.finish(pending.op, now)
            name, error = pending.op.order.id, message.error
            result: Command = Answer(id=name, packet=packet)
            if error is not None:
                result = Fail(id=name, error=JoyNexusError(error, pending.ask.id))
            return [result, *self._pump(pending.op.policy, now)]
        return []

    def _answered(self, pending: _Pending, packet: Packet, now: float) -> list[Command]:
        del self._pending[pending.ask.id]
        message = packet.message
        if isinstance(message, Welcome):
            self.welcome, self.lanes.window = message, max(1, message.max_inflight_ops)
            self._refusals.clear()
        if isinstance(message, Lease) and self.lanes.granted(pending.ask.id, message, now):
            return self._pump(message.policy, now)
        return [Answer(id=pending.ask.id, packet=packet)]

    def _failed(self, pending: _Pending, error: Failure, now: float) -> list[Command]:
        if error.code is ErrorCode.OVERLOADED and TOO_OFTEN in error.details:
            least = REATTACH_S if pending.op and pending.op.accepted else 0.0
            retry_at = now + max(error.retry_after_ms / 1000, least) + BACKOFF_BASE_S * self.jitter()
            if pending.deadline is None or retry_at < pending.deadline:
                self._schedule(pending, retry_at)
                return []
        elif error.code in RETRYABLE:
            since = pending.refused_since if pending.refused_since is not None else now
            pending.refused_since = since
            retry_at = now + error.retry_after_ms / 1000 + self._backoff(pending.tries)
            if retry_at - since < RETRY_BUDGET_S and (pending.deadline is None or retry_at < pending.deadline):
                self._schedule(pending, retry_at)
                return []
        if error.code is ErrorCode.GAP and pending.op and self.lanes.earlier_unaccepted(pending.op):
            # An earlier op of this policy was lost on the way; it is sent again, then this one fits.
            self._schedule(pending, now + UNSENT_S + self._backoff(pending.tries))
            return []
        return self._fail(pending.ask.id, JoyNexusError(error, pending.ask.id), now)

    def _fail(self, id_: str, error: JoyNexusError, now: float) -> list[Command]:
        pending = self._pending.pop(id_)
        if isinstance(pending.ask.message, AcquireLease):
            ops = self.lanes.denied(id_)
            return [Fail(id=op.id, error=error) for op in ops]
        if pending.op is None:
            return [Fail(id=id_, error=error)]
        for later in self.lanes.refused(pending.op):
            del self._pending[later.id]
        return [Fail(id=pending.op.order.id, error=error), *self._pump(pending.op.policy, now)]

    # Ops

    def _pump(self, policy: str, now: float) -> list[Command]:
        commands: list[Command] = []
        if ask := self.lanes.wants_lease(policy, now):
            commands += self._ask(ask, now)
        for op in self.lanes.ready(policy, now):
            ask = Ask(id=op.id, message=op.message, buffers=op.buffers)
            commands += self._ask(ask, now, op)
        return commands

    def _release(self, release: Release, now: float) -> list[Command]:
        if self.lanes.busy(release.policy):
            sentence = f"policy '{release.policy}' still has ops in flight: wait for their results first"
            return [Fail(id=release.id, error=JoyNexusError(failure(ErrorCode.CONFLICT, sentence), release.id))]
        lease = self.lanes.drop(release.policy)
        if not lease:
            return [Answer(id=release.id, packet=None)]
        message = ReleaseLease(policy=release.policy, lease=lease)
        return self._ask(Ask(id=release.id, message=message, patience_s=release.patience_s), now)

    # The connection

    def _connected(self, channel: Channel, now: float) -> list[Command]:
        """Send everything that waits once more: the service knows a connection, not a client."""
        self._refusals.pop(channel, None)
        again = channel in self._stood
        self._stood.add(channel)
        if channel == "control" and self._hello is not None and self.welcome is not None:
            self._was_idle(now)
            self._pending = {self._hello.id: _Pending(ask=self._hello, deadline=None), **self._pending}
        waiting = [pending for pending in self._pending.values() if pending.ask.channel == channel]
        for pending in waiting:
            pending.tries = 0
        if not again:
            return [self._send(pending, now) for pending in waiting]
        due = now + RETURN_S * self.jitter()  # one for all, so that ops keep their order
        for pending in waiting:
            self._schedule(pending, due)
        return []

    def _refused(self, refused: Refused) -> list[Command]:
        """A first hello fails at once; later questions wait, in case the key comes back."""
        self._refusals[refused.channel] = refused.why
        hellos = [id_ for id_, pending in self._pending.items() if isinstance(pending.ask.message, Hello)]
        for id_ in hellos:
            del self._pending[id_]
        return [Fail(id=id_, error=JoyNexusError(failure(ErrorCode.FORBIDDEN, refused.why))) for id_ in hellos]
