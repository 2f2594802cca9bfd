"""Between the shell and the core: a message over which the core raises, which is a bug, costs whoever sent it, nobody
else.

In: events. Out: the core's commands; for a message that met a bug, `INTERNAL` to its sender and one log line with the
traceback. Never: an end of the master over one message, or the same request of a tenant tried again and again.

What a tenant asked is set aside by its fingerprint for a while; a worker that said it is taken for dead, so that what
it had goes to others. Whatever else raises (the clock, the journal's word) ends the master, which begins anew from the
journal: there nobody is to blame, and its state is not to be trusted.
"""

from __future__ import annotations

import traceback
from collections import Counter, OrderedDict

import blake3

from joynexus.wire import ErrorCode, failure
from services.master.commands import Command, Log, Send
from services.master.core import MasterCore, MessageFaultError
from services.master.events import BackMessage, Event, FrontMessage

SET_ASIDE_S = 600.0
"""So long a request that met a bug is not tried again."""
_MOST = 1000


class Guard:
    """The core, for a shell that must go on.

    Attributes:
        faults: messages over which the core raised, by kind.
    """

    def __init__(self, core: MasterCore) -> None:
        self._core = core
        self._set_aside: OrderedDict[bytes, float] = OrderedDict()  # fingerprint -> until when
        self._answers = 0
        self.faults: Counter[str] = Counter()

    def handle(self, event: Event, now: float) -> list[Command]:
        """Have the core handle an event; see `MasterCore.handle`."""
        if self._set_aside and isinstance(event, FrontMessage) and self._holds(_fingerprint(event), now):
            return [self._refusal(event)]
        try:
            return self._core.handle(event, now)
        except MessageFaultError as error:
            if not isinstance(event, FrontMessage | BackMessage):
                raise
            return [*self._fault(event, error, now), *self._core.after_fault(event)]

    def _holds(self, fingerprint: bytes, now: float) -> bool:
        until = self._set_aside.get(fingerprint)
        if until is not None and until <= now:
            del self._set_aside[fingerprint]
        return until is not None and until > now

    def _fault(self, event: FrontMessage | BackMessage, error: MessageFaultError, now: float) -> list[Command]:
        kind = event.header.kind
        self.faults[kind] += 1
        commands: list[Command] = []
        if isinstance(event, FrontMessage):
            self._set_aside[_fingerprint(event)] = now + SET_ASIDE_S
            if len(self._set_aside) > _MOST:
                self._set_aside.popitem(last=False)
            commands.append(self._refusal(event))
        count = self.faults[kind]
        if count & (count - 1) == 0:  # 1, 2, 4, 8, …: whoever found a bug must not fill the log with it
            sender = event.tenant if isinstance(event, FrontMessage) else event.key_name
            trace = "".join(traceback.format_exception(error.__cause__))
            words = {"kind": kind, "sender": sender, "request": event.header.id, "trace": trace}
            commands.append(Log(level="error", event="message_met_a_bug", fields={**words, "count": count}))
        return commands

    def _refusal(self, event: FrontMessage) -> Send:
        self._answers += 1
        sentence = (
            "this request met a fault of the service, and whether it took effect is not certain: it is not tried again "
            f"for {SET_ASIDE_S / 60:g} minutes; tell the operator, whose log has the details under this request's id"
        )
        answer = failure(ErrorCode.INTERNAL, sentence)
        return Send(peer=event.peer, message=answer, id=f"g{self._answers}", re=event.header.id)


def _fingerprint(event: FrontMessage) -> bytes:
    """Name what a tenant asks, whenever and through whichever connection it does."""
    hasher = blake3.blake3(f"{event.tenant}\0{event.header.kind}\0".encode())
    hasher.update(event.body)
    for buffer in event.buffers:
        hasher.update(buffer)
    return hasher.digest()
