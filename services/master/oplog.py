"""One canonical log line for every request of a tenant: what, whose, how it ended, how long it took.

In: requests as they come in, answers as they go out. Out: log lines, found again by the request id that errors name.
Never: a payload; or a line for each of the thousands of requests a second that go well (those are `debug`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict

import msgspec

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

NOTABLE = (
    CreatePolicy,
    AcquireLease,
    ReleaseLease,
    Publish,
    SaveState,
    LoadState,
    SubmitJob,
    CancelJob,
    PushDataset,
)
"""Requests that are worth a line also when they go well."""

_MOST_OPEN = 100_000


class _Open(msgspec.Struct):
    kind: str
    notable: bool
    tenant: str
    policy: str
    since: float


class OpLog:
    """Remembers open requests until they are answered."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[Peer, str], _Open] = OrderedDict()

    def came(self, event: FrontMessage, now: float) -> None:
        """A request came in."""
        message = event.message
        self._open[event.peer, event.header.id] = _Open(
            kind=event.header.kind,
            notable=isinstance(message, NOTABLE),
            tenant=event.tenant,
            policy=getattr(message, "policy", ""),
            since=now,
        )
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)

    def goes(self, peer: Peer, re: str, message: Message, now: float) -> None:
        """An answer goes out; `Accepted` is not the last one."""
        if isinstance(message, Accepted):
            return
        request = self._open.pop((peer, re), None)
        if request is None:
            return
        failed = message.error if isinstance(message, OpResult) else message if isinstance(message, Failure) else None
        if failed is None and not request.notable:
            return
        log_op(
            log,
            request.kind,
            outcome="ok" if failed is None else str(failed.code),
            ms=1000 * (now - request.since),
            level=logging.WARNING if failed is not None and failed.category == "server" else logging.INFO,
            tenant=request.tenant,
            policy=request.policy,
            request_id=re,
            why=failed.message if failed is not None else "",
        )
