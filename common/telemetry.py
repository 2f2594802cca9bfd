"""Logs: one line an event, readable on a terminal, JSON for machines, on stdout.

In: names and values. Out: lines with time, level, role and the values. Never: a secret, a payload, or a traceback
anywhere but in the log (the wire carries the request id under which it is found here).
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import MutableMapping
from types import TracebackType
from typing import Any

import structlog
from structlog.tracebacks import ExceptionDictTransformer

Logger = structlog.stdlib.BoundLogger

_NOTED = frozenset({"warning", "error", "critical", "exception"})
_SENTENCE = "a sentence"
"""What libraries and numerical code log instead of an event's name; as many as there are ways to say something."""

_noted: Counter[str] = Counter()

_SECRET = frozenset({"secret", "secret_key", "password", "token"})


def configure(role: str, *, level: str = "info", json_logs: bool = False) -> None:
    """Set up logging of this process; call it once, first thing."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _role(role),
        _no_secrets,
        _count,
    ]
    renderer: list[structlog.typing.Processor] = (
        [
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(),
        ]
        if json_logs
        else [
            structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    )  # both show where it happened and no local variables: those hold keys and payloads
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    logging.getLogger("zmq.auth").setLevel(logging.WARNING)  # it logs each handshake
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: (
        _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback) if args.exc_value is not None else None
    )


def get_logger(name: str) -> Logger:
    """Return a logger: `log.info("what_happened", tenant=…, policy=…)`."""
    logger: Logger = structlog.get_logger(name)
    return logger


def log_op(
    logger: Logger, op: str, *, outcome: str, ms: float, trace: str, level: int = logging.INFO, **values: object
) -> None:
    """Write the one canonical line of a finished request or op.

    Args:
        logger: whose line it is.
        op: message kind (`forward_backward`).
        outcome: `ok` or an error code.
        ms: wall-clock milliseconds from its arrival; at a worker, what it took of its time.
        trace: id of the tenant's request, or the job, that it is for: the same in every role's log (several, with
            commas between them, for a group).
        level: of `logging`.
        values: `tenant`, `policy`, `attempt`, whatever applies.
    """
    logger.log(level, "op", op=op, outcome=outcome, ms=round(ms, 3), trace=trace, **values)


def noted() -> dict[str, int]:
    """Return how often this process logged something at warning or above, by event."""
    return dict(_noted)


def _count(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    what = str(event.get("event", ""))
    if event.get("level", "") in _NOTED:
        _noted[what if what.isidentifier() else _SENTENCE] += 1
    return event


def _role(role: str) -> structlog.typing.Processor:
    def add(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault("role", role)
        return event

    return add


def _no_secrets(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name in _SECRET & event.keys():
        event[name] = "(hidden)"
    return event


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    logging.getLogger("uncaught").critical("uncaught_error", exc_info=(kind, error, trace))
