"""One canonical log line for every request of a tenant: what, whose, how it ended, how long it took.

In: requests as they come in, answers as they go out. Out: log lines, found again by the request id that errors name.
Never: a payload; or a line for each of the thousands of requests a second that go well (those are `debug`).
"""

from __future__ import annotations

import logging

from common.telemetry import get_logger, log_op
from joynexus.wire import Failure, Message
from joynexus.wire.front import (
    Accepted,
    AcquireLease,
    CancelJob,
    CreatePolicy,
    LoadState,
    OpResult,
    Publish,
    PushDataset,
    ReleaseLease,
    SaveState,
    SubmitJob,
)
from services.master.events import FrontMessage, Peer

log = get_logger(__name__)

NOTABLE = frozenset(
    {
        CreatePolicy,
        AcquireLease,
        ReleaseLease,
        Publish,
        SaveState,
        LoadState,
        SubmitJob,
        CancelJob,
        PushDataset,
    }
)
"""Requests that are worth a line also when they go well."""

_MOST_OPEN = 100_000


_Open = tuple[str, type[Message], str, str, float]
"""Kind, type, tenant, policy, and when it came; not the request itself, which may be large."""


class OpLog:
    """Remembers open requests until they are answered."""

    def __init__(self) -> None:
        self._open: dict[tuple[Peer, str], _Open] = {}

    def came(self, event: FrontMessage, now: float) -> None:
        """A request came in."""
        message = event.message
        key = event.peer, event.header.id
        self._open[key] = (event.header.kind, type(message), event.tenant, getattr(message, "policy", ""), now)
        if len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]

    def goes(self, peer: Peer, re: str, message: Message, now: float) -> None:
        """An answer goes out; `Accepted` is not the last one."""
        if type(message) is Accepted:
            return
        request = self._open.pop((peer, re), None)
        if request is None:
            return
        kind, type_, tenant, policy, since = request
        failed = message.error if isinstance(message, OpResult) else message if isinstance(message, Failure) else None
        if failed is None and type_ not in NOTABLE:
            return
        log_op(
            log,
            kind,
            outcome="ok" if failed is None else str(failed.code),
            ms=1000 * (now - since),
            level=logging.WARNING if failed is not None and failed.category == "server" else logging.INFO,
            tenant=tenant,
            policy=policy,
            request_id=re,
            why=failed.message if failed is not None else "",
        )
