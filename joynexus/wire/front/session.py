"""First words of a client, and the answer that it is so."""

from __future__ import annotations

from joynexus.bounds import Text
from joynexus.wire.base import Wire


class Hello(Wire, frozen=True, kw_only=True):
    """First message of a client. Answer: `Welcome`."""

    protocol_min: int
    protocol_max: int
    client: Text


class Welcome(Wire, frozen=True, kw_only=True):
    """Who you are to this cluster, and its limits.

    Attributes:
        protocol: protocol version both sides use from here.
        tenant, scope: what the key stands for.
        inline_bytes: payloads above this go as blobs.
        max_inflight_ops: ops of one policy that may wait unanswered.
        operator: the key also sees other tenants' work in `Status`.
    """

    protocol: int
    server: str
    tenant: str
    scope: str
    inline_bytes: int
    max_inflight_ops: int
    operator: bool = False


class Ping(Wire, frozen=True, kw_only=True):
    """Are you there? Answer: `Pong`."""


class Pong(Wire, frozen=True, kw_only=True):
    """Yes."""


class Done(Wire, frozen=True, kw_only=True):
    """It is so."""
