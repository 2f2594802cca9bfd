"""What the master's core is told: everything that happened outside, as data.

In: the shell (sockets, journal thread, clock) makes these. Out: `MasterCore.handle(event, now)` takes them, one at a
time, in the order in which they happened. Never: a socket, a callback, or an undecoded message.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from joynexus.prices import Prices
from joynexus.tenants import TenantLimits
from joynexus.wire import Buffer, Header, Message

Door = Literal["front", "front_bulk", "back", "back_bulk"]
"""The master's four sockets: tenants and workers, control and bulk."""


class Peer(NamedTuple):
    """Where a message came from and answers go to: one connection at one socket."""

    door: Door
    routing_id: bytes


class FrontMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant said something on the front control socket.

    The shell has checked: the key is known and not revoked, its scope allows the message (`FRONT_REQUESTS`), the frames
    are within limits. Blob messages never come here.

    Attributes:
        tenant, scope, operator: of the authenticated key, never of the message.
        key: the key itself, by its public half.
        body: the undecoded body frame (an `Act` travels on as it came).
        buffers: undecoded buffers.
    """

    peer: Peer
    tenant: str
    scope: str
    operator: bool
    header: Header
    message: Message
    body: bytes
    buffers: tuple[Buffer, ...] = ()
    key: str = ""


class BackMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A worker said something on the back control socket.

    The shell has checked that the key's claims allow the message (`BACK_REQUESTS`).

    Attributes:
        key_name: name of the authenticated key, or of the one that has replaced it.
        roles: roles that the key claims.
    """

    peer: Peer
    key_name: str
    roles: tuple[str, ...]
    header: Header
    message: Message
    body: bytes
    buffers: tuple[Buffer, ...] = ()


class BlobStored(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's upload is complete, verified and on disk.

    The core writes down whose it is, and only then answers `BlobOffset(complete=True)`: the shell does not answer the
    last chunk itself.

    Attributes:
        peer: the uploader's bulk connection.
        request: header id of the `BlobChunk` or `BlobBegin` that is to be answered.
    """

    peer: Peer
    tenant: str
    request: str
    digest: str
    nbytes: int


class BlobServed(msgspec.Struct, frozen=True, kw_only=True):
    """`nbytes` of a blob were sent to a tenant (for metering)."""

    tenant: str
    nbytes: int


class Undeliverable(msgspec.Struct, frozen=True, kw_only=True):
    """A `Send` could not be handed to its peer: it is gone (or its queue is full, which work must not wait for).

    Attributes:
        peer, id: of the `Send`.
    """

    peer: Peer
    id: str


class Persisted(msgspec.Struct, frozen=True, kw_only=True):
    """The records of a `Persist` command are on disk (fsynced)."""

    token: int


class PersistFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The records of a `Persist` command are not on disk, and will not be unless asked again.

    Attributes:
        reason: one clause for people, e.g. `the disk is full`.
    """

    token: int
    reason: str


class LimitsChanged(msgspec.Struct, frozen=True, kw_only=True):
    """The operator has changed what tenants may have: `limits` are all that are set now, by tenant."""

    limits: dict[str, TenantLimits]


class PricesChanged(msgspec.Struct, frozen=True, kw_only=True):
    """The operator has changed the price list, or removed it."""

    prices: Prices | None


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """Time has passed: sent at `MasterCore.next_deadline()`, and whenever the shell likes."""


Event = (
    FrontMessage
    | BackMessage
    | BlobStored
    | BlobServed
    | Undeliverable
    | Persisted
    | PersistFailed
    | LimitsChanged
    | PricesChanged
    | Tick
)
