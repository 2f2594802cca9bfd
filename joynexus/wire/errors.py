"""Errors as data: every failure crosses the wire as a code, a category, a sentence, and a hint when to retry.

In: what went wrong. Out: `Failure` structs and the exception `JoyNexusError` that clients raise. Never: a traceback.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from joynexus.bounds import MAX_TEXT, Table, Text


class ErrorCode(StrEnum):
    """What went wrong, for programs; the sentence beside it is for people."""

    INVALID = "INVALID"
    """The message or spec is malformed or contradicts itself."""
    NOT_FOUND = "NOT_FOUND"
    """No such thing for this tenant; somebody else's thing gives the same answer."""
    FORBIDDEN = "FORBIDDEN"
    """The key's scope or role does not allow this."""
    CONFLICT = "CONFLICT"
    """The same key was used before with another payload, or somebody else drives this policy."""
    GAP = "GAP"
    """An op's sequence number is not the next one; `expected` in the sentence says which is."""
    FORGOTTEN = "FORGOTTEN"
    """The op was applied so long ago that its reply is no longer kept."""
    CONTRACT_MISMATCH = "CONTRACT_MISMATCH"
    """Policy and environment or data disagree in a field of the contract."""
    BAD_DATA = "BAD_DATA"
    """The data itself is unusable: NaN, wrong shape, broken file."""
    NON_FINITE = "NON_FINITE"
    """Loss or gradient was not finite; the step was vetoed and nothing changed."""
    TOO_LARGE = "TOO_LARGE"
    """A message, blob or quota limit was exceeded."""
    OVERLOADED = "OVERLOADED"
    """Over a limit for now; retry after the hint."""
    OVER_BUDGET = "OVER_BUDGET"
    """The tenant has used up its budget of this month; nothing was accepted."""
    UNAVAILABLE = "UNAVAILABLE"
    """The part that would do this is not there now (starting, restarting, disk full); retry after the hint."""
    DEADLINE = "DEADLINE"
    """The deadline passed first."""
    NOT_REGISTERED = "NOT_REGISTERED"
    """The master does not know this worker connection; register again."""
    STALE = "STALE"
    """A late result of a worker that was declared dead, or of an earlier attempt."""
    UPGRADE_REQUIRED = "UPGRADE_REQUIRED"
    """No protocol version is spoken by both sides."""
    POISON = "POISON"
    """The op killed its worker too often and was set aside."""
    INTERNAL = "INTERNAL"
    """A fault of the service; it is in the log under the request id."""


Category = Literal["user", "server"]

_USER = frozenset(
    {
        ErrorCode.INVALID,
        ErrorCode.NOT_FOUND,
        ErrorCode.FORBIDDEN,
        ErrorCode.CONFLICT,
        ErrorCode.GAP,
        ErrorCode.FORGOTTEN,
        ErrorCode.CONTRACT_MISMATCH,
        ErrorCode.BAD_DATA,
        ErrorCode.NON_FINITE,
        ErrorCode.TOO_LARGE,
        ErrorCode.OVER_BUDGET,
        ErrorCode.UPGRADE_REQUIRED,
        ErrorCode.POISON,
    }
)

RETRYABLE = frozenset({ErrorCode.OVERLOADED, ErrorCode.UNAVAILABLE})
"""Codes that a client retries by itself, after the hint."""

TOO_OFTEN = "requests_per_s"
"""In the details of an `OVERLOADED`: what was asked is well, only does this tenant ask too much at once."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error on the wire.

    Attributes:
        code: what went wrong.
        message: one sentence: what is wrong and what to do.
        category: whose move it is.
        retry_after_ms: hint for retryable codes, else 0.
        details: numbers for programs; of `OVERLOADED`, how full the limit is and how long the lane: `limit`, `waiting`,
            `running`.
    """

    code: ErrorCode
    message: Text
    category: Category
    retry_after_ms: int = 0
    details: Table[float] = {}


def failure(
    code: ErrorCode, message: str, *, retry_after_ms: int = 0, details: dict[str, float] | None = None
) -> Failure:
    """Make a `Failure` with the category that belongs to its code; of a sentence without end, the beginning."""
    message = message if len(message) <= MAX_TEXT else f"{message[: MAX_TEXT - 2]} …"
    category: Category = "user" if code in _USER else "server"
    return Failure(code=code, message=message, category=category, retry_after_ms=retry_after_ms, details=details or {})


class JoyNexusError(Exception):
    """What a client raises for a `Failure`; its text is the sentence, with the failure's numbers if it has some.

    Attributes:
        failure: the failure as data; `failure.details` has the numbers.
        request_id: id under which the service's log has the details; empty if the error arose locally.
    """

    def __init__(self, failure: Failure, request_id: str = "") -> None:
        numbers = ", ".join(f"{name} {value:.15g}" for name, value in failure.details.items())
        super().__init__(f"{failure.message} ({numbers})" if numbers else failure.message)
        self.failure = failure
        self.request_id = request_id

    @property
    def code(self) -> ErrorCode:
        """The failure's code."""
        return self.failure.code


class WireError(ValueError):
    """Frames that are not a message of this protocol; the sentence says why. Raised by the decoder only."""
