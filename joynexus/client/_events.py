"""The words between the client's core and its I/O thread: events go into the core, commands come out.

In and out: plain structs. Never: sockets, threads, or anything that happens by itself.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from joynexus.wire import Buffer, JoyNexusError, Message, Packet

Channel = Literal["control", "bulk"]


# ------------------------------------------------------------------------------------------------- events (in)


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The caller asks something that has one answer.

    Attributes:
        id: names the question, also when it is sent again.
        patience_s: after this long without an answer the question fails.
        resend_s: silence after which it is sent again (a lost connection sends it again at once).
    """

    id: str
    message: Message
    buffers: tuple[Buffer, ...] = ()
    channel: Channel = "control"
    patience_s: float = 30.0
    resend_s: float = 3.0


class Op(msgspec.Struct, frozen=True, kw_only=True):
    """The caller orders an op; the core fills in its lease and sequence number."""

    id: str
    policy: str
    message: Message
    buffers: tuple[Buffer, ...] = ()


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """The caller stops driving a policy; after `patience_s` without an answer that fails."""

    id: str
    policy: str
    patience_s: float = 30.0


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A message came."""

    packet: Packet


class Unsent(msgspec.Struct, frozen=True, kw_only=True):
    """The socket could not take a message (no connection yet, or its queue is full)."""

    id: str


class Connected(msgspec.Struct, frozen=True, kw_only=True):
    """A connection stands, for the first time or again."""

    channel: Channel


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """The other side does not accept our key, or is not the one we know; `why` says which, in one sentence."""

    channel: Channel
    why: str


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """Time passed."""


Event = Ask | Op | Release | Received | Unsent | Connected | Refused | Tick


# ---------------------------------------------------------------------------------------------- commands (out)


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """Put a message on a socket; report `Unsent` if it does not take it."""

    channel: Channel
    id: str
    message: Message
    buffers: tuple[Buffer, ...] = ()
    deadline_ms: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A question is answered. `packet` is None where there was nothing to ask."""

    id: str
    packet: Packet | None


class Fail(msgspec.Struct, frozen=True, kw_only=True):
    """A question failed for good."""

    id: str
    error: JoyNexusError


Command = Send | Answer | Fail
