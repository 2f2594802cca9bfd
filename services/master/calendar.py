"""Months, as bills know them: by the calendar of UTC.

In: times in seconds since the Unix epoch. Out: names of months (`2026-11`), and how much of a span lies in which.
Never: a clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime


def month_of(at: float) -> str:
    """Return the month of a time."""
    moment = datetime.fromtimestamp(at, UTC)
    return f"{moment.year:04}-{moment.month:02}"


def end_of_month(at: float) -> float:
    """Return when the month of a time ends."""
    moment = datetime.fromtimestamp(at, UTC)
    years, month = divmod(moment.month, 12)
    return datetime(moment.year + years, month + 1, 1, tzinfo=UTC).timestamp()


def months_between(since: float, until: float) -> Iterator[tuple[str, float]]:
    """Divide a span by months: name, and seconds of the span in it."""
    while since < until:
        end = min(until, end_of_month(since))
        yield month_of(since), end - since
        since = end
