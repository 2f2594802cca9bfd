"""What a worker says to the master and when, as a state machine without sockets or clocks.

In: what the role wants said, packets from the master, news of the connection, the time. Out: frames to send next,
work, answers. Never: a lost result: it is kept until a beat that was sent after it has been answered (one connection
keeps the order, so the result came through), and said again after each registration. The master takes each only once.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from joynexus.wire import (
    Buffer,
    ErrorCode,
    Failure,
    Message,
    Packet,
    encode,
    failure,
    kind_of,
    limits,
)
from joynexus.wire.back import Beat, BeatAck, Leaving, Register, Registered
from joynexus.wire.errors import RETRYABLE
from joynexus.wire.front import BlobBegin, BlobChunk, BlobRead

BULK_KINDS = (BlobBegin, BlobChunk, BlobRead)
"""Messages that travel on the bulk socket."""

RESEND_S = 2.0
"""A registration that was not answered is sent again after this, or up to half as much again."""
ASK_AGAIN_S = 15.0
"""Likewise a request; a broken connection makes it earlier."""
REFUSED_S = 5.0
"""After a refused registration."""
RETURN_S = 0.5
"""When a connection is back, one registers and asks again at a random moment within this: everybody's may be back."""


class Work(msgspec.Struct, frozen=True):
    """The master gives work."""

    packet: Packet


class Drop(msgspec.Struct, frozen=True):
    """Nobody wants these tasks any more."""

    tasks: tuple[str, ...]


class Answer(msgspec.Struct, frozen=True):
    """A request is answered: by a packet, or by a failure (from the master, or its deadline passed here)."""

    id: str
    packet: Packet | None = None
    failure: Failure | None = None


class Said(msgspec.Struct, frozen=True):
    """Something worth a line in the log."""

    level: str
    event: str
    values: dict[str, object] = {}


class Misfit(msgspec.Struct, frozen=True):
    """This worker and the master have no protocol version in common: it is of no use until one of them changes."""

    why: str


class Leave(msgspec.Struct, frozen=True):
    """An operator wants this worker to finish what it has, and to end."""


Event = Work | Drop | Answer | Said | Misfit | Leave


class Send(msgspec.Struct, frozen=True):
    """Frames to put on the control or the bulk socket; tell `sent` when that worked."""

    frames: list[Buffer]
    bulk: bool
    what: str
    id: str = ""


class _Ask(msgspec.Struct):
    message: Message
    buffers: tuple[Buffer, ...]
    bulk: bool
    deadline: float
    send_at: float


class WorkerSession:
    """The worker's side of the conversation on both of its sockets.

    Args:
        new_id: gives unique message ids.
        beat: makes the next `Beat`.
        jitter: uniform random number in [0, 1).
    """

    def __init__(
        self,
        *,
        beat: Callable[[], Beat],
        new_id: Callable[[], str] | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        counter = itertools.count(1)
        self._jitter = jitter
        self._new_id = new_id or (lambda: f"w{next(counter)}")
        self._beat = beat
        self.worker = ""
        self.registered = False
        self.left = False
        """The master knows that this worker is leaving."""
        self._register: Register | None = None
        self._register_id = ""
        self._register_at = 0.0
        self._leaving = False
        self._leaving_id = ""
        self._beat_s = 1.0
        self._beat_id = ""
        self._beat_at = 0.0
        self._beat_covers = 0
        self._heard = 0.0
        self._results: deque[list[Buffer]] = deque()
        self._results_sent = 0  # of those in the queue, how many were sent on this registration
        self._asks: dict[str, _Ask] = {}

    # What the role wants

    def register(self, register: Register) -> None:
        """Register as this from now on (again, if it was something else before)."""
        spoken = {"protocol_min": limits.PROTOCOL_MIN, "protocol_max": limits.PROTOCOL}
        self._register = msgspec.structs.replace(register, **spoken)
        self._register_at, self.registered = 0.0, False

    def say(self, frames: list[Buffer]) -> None:
        """Have a result delivered."""
        self._results.append(frames)

    def ask(self, id: str, message: Message, buffers: Sequence[Buffer], *, deadline: float, now: float) -> None:
        """Ask the master something; an `Answer` follows until `deadline`."""
        bulk = isinstance(message, BULK_KINDS)
        self._asks[id] = _Ask(message=message, buffers=tuple(buffers), bulk=bulk, deadline=deadline, send_at=now)

    def forget(self, id: str) -> None:
        """Nobody waits for this answer any more."""
        self._asks.pop(id, None)

    def leave(self) -> None:
        """Tell the master to give nothing new."""
        self._leaving = True

    def hurry(self) -> None:
        """Beat now, so that results are confirmed soon."""
        self._beat_at = 0.0

    @property
    def undelivered(self) -> int:
        """Results that the master has not confirmed."""
        return len(self._results)

    # What happens

    def came_up(self, *, bulk: bool, now: float) -> None:
        """A connection is new: what was in flight may be lost, and the master may not know this end of it."""
        soon = now + RETURN_S * self._jitter() if self.worker else now
        if bulk:
            self._ask_again(bulk=True, at=soon)
        else:
            self.registered, self._register_at = False, soon

    def received(self, packet: Packet, now: float) -> list[Event]:
        """Take in a message of the master."""
        self._heard = now
        message, re = packet.message, packet.header.re
        if isinstance(message, Registered):
            return self._welcome(message, re, now)
        if isinstance(message, BeatAck) and re and re in (self._beat_id, self._leaving_id):
            dropped: list[Event] = [Drop(message.cancelled)] if message.cancelled else []
            dropped += [Leave()] if message.leave and not self._leaving else []
            if re == self._leaving_id:
                self.left = True
                return [Said("info", "no_new_work"), *dropped]
            self._confirm()
            return dropped
        if isinstance(message, Failure):
            return self._failed(message, re, now)
        if not re:
            return [Work(packet)]
        if self._asks.pop(re, None) is None:
            return []  # an answer that came twice, or too late
        return [Answer(re, packet=packet)]

    def expire(self, now: float) -> list[Event]:
        """Give up on requests whose deadline has passed, and on a registration that has gone quiet."""
        events: list[Event] = []
        for id, ask in [(id, ask) for id, ask in self._asks.items() if ask.deadline <= now]:
            del self._asks[id]
            sentence = f"the master did not answer '{kind_of(ask.message)}' in time: is it running?"
            events.append(Answer(id, failure=failure(ErrorCode.DEADLINE, sentence)))
        if self.registered and now - self._heard > max(5.0, 4 * self._beat_s):
            self.registered, self._register_at = False, 0.0
            events.append(Said("warning", "master_silent"))
        return events

    # What to send

    def next_send(self, now: float, *, bulk: bool) -> Send | None:
        """Return what goes on a socket next, or None. It counts as sent only after `sent`."""
        if not bulk:
            send = self._own(now)
            if send is not None or not self.registered:
                return send
        for id, ask in self._asks.items():
            if ask.bulk is bulk and ask.send_at <= now:
                left = max(1, int(1000 * (ask.deadline - now)))
                frames = encode(ask.message, id=id, deadline_ms=left, buffers=ask.buffers)
                return Send(frames, bulk, "ask", id)
        if not bulk and self._results_sent < len(self._results):
            return Send(self._results[self._results_sent], bulk, "result")
        return None

    def sent(self, send: Send, now: float) -> None:
        """What `next_send` returned is on its way."""
        match send.what:
            case "register":
                self._register_id = send.id
                self._register_at = now + RESEND_S * (1 + self._jitter() / 2)
            case "leaving":
                self._leaving_id = send.id
            case "beat":
                self._beat_id, self._beat_at = send.id, now + self._beat_s
                self._beat_covers = self._results_sent
            case "ask":
                self._asks[send.id].send_at = now + ASK_AGAIN_S
            case _:
                self._results_sent += 1

    def next_at(self, now: float) -> float:
        """Return when to look again if nothing happens before."""
        times = [now + 1.0, *(ask.deadline for ask in self._asks.values())]
        times += [ask.send_at for ask in self._asks.values() if ask.bulk or self.registered]
        if self.registered:
            times.append(self._beat_at)
        elif self._register is not None:
            times.append(self._register_at)
        return min(times)

    def _own(self, now: float) -> Send | None:
        if not self.registered:
            if self._register is None or now < self._register_at:
                return None
            id, register = self._new_id(), self._register
            if self._leaving:  # a master that was started anew would give work before it hears so
                register = msgspec.structs.replace(register, credit=dict.fromkeys(register.credit, 0))
            return Send(encode(register, id=id), False, "register", id)
        if self._leaving and not self._leaving_id:
            id = self._new_id()
            return Send(encode(Leaving(), id=id), False, "leaving", id)
        if now >= self._beat_at:
            id = self._new_id()
            return Send(encode(self._beat(), id=id), False, "beat", id)
        return None

    # Details of what happens

    def _welcome(self, message: Registered, re: str, now: float) -> list[Event]:
        if re != self._register_id:
            return []  # of an earlier attempt
        again = bool(self.worker)
        self.worker, self.registered, self._register_id = message.worker, True, ""
        self._beat_s, self._beat_at, self._beat_id = message.beat_ms / 1000, now, ""
        self._results_sent = self._beat_covers = 0
        self._leaving_id = ""
        self._ask_again(bulk=False, at=now)
        said = Said("info", "registered", {"worker": message.worker, "again": again, "undelivered": self.undelivered})
        return [said, Drop(message.lost)] if message.lost else [said]

    def _confirm(self) -> None:
        for _ in range(self._beat_covers):
            self._results.popleft()
        self._results_sent -= self._beat_covers
        self._beat_covers, self._beat_id = 0, ""

    def _failed(self, message: Failure, re: str, now: float) -> list[Event]:
        if message.code is ErrorCode.NOT_REGISTERED:
            if self.registered:
                self.registered, self._register_at = False, 0.0
            return []  # requests stay and are asked again after registration
        if re and re == self._register_id:
            self._register_at = now + REFUSED_S
            if message.code is ErrorCode.UPGRADE_REQUIRED:
                return [Misfit(message.message)]
            return [Said("error", "registration_refused", {"why": message.message})]
        ask = self._asks.get(re)
        if ask is None:
            return [Said("warning", "message_refused_by_master", {"code": message.code, "why": message.message})]
        if message.code in RETRYABLE:
            ask.send_at = now + max(0.05, message.retry_after_ms / 1000) * (1 + self._jitter() / 2)
            return []
        del self._asks[re]
        return [Answer(re, failure=message)]

    def _ask_again(self, *, bulk: bool, at: float) -> None:
        for ask in self._asks.values():
            if ask.bulk is bulk:
                ask.send_at = min(ask.send_at, at)
