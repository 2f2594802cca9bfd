"""One canonical log line for every request of a tenant: what, whose, how it ended, how long it took; and its count.

In: requests as they come in, answers as they go out. Out: log lines, found again by the request id that errors name and
that goes with its work through every role (`trace`); counts and times by kind. Never: a payload; or, above `debug`, a
line for each of the thousands of requests a second that go well.
"""

from __future__ import annotations

import logging

from common.metrics import Figures
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
    """Remembers open requests until they are answered, and counts those that are."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
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
        outcome = "ok" if failed is None else str(failed.code)
        self._figures.add("joynexus_ops_total", kind, outcome)
        self._figures.observe("joynexus_op_seconds", kind, value=now - since)
        job = getattr(message, "job", "")  # what the request began: the trace of all its work
        log_op(
            log,
            kind,
            outcome=outcome,
            ms=1000 * (now - since),
            trace=re,
            level=_level(failed, type_),
            tenant=tenant,
            policy=policy,
            **({"job": job} if isinstance(job, str) and job else {}),
            why=failed.message if failed is not None else "",
        )


def _level(failed: Failure | None, request: type[Message]) -> int:
    if failed is None:
        return logging.INFO if request in NOTABLE else logging.DEBUG
    return logging.WARNING if failed.category == "server" else logging.INFO
