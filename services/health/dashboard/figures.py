"""How figures read: durations, amounts, shares and times as short texts.

In: numbers in base units. Out: text with a unit. Never: more digits than anybody reads, or a time without its zone.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime

DASH = "–"
"""Stands where there is nothing to say."""


def duration(seconds: float) -> str:
    """Return a duration in at most two units: `0.4 s`, `12 s`, `3 min 20 s`, `1 h 05 min`, `2 d 3 h`."""
    if not math.isfinite(seconds) or seconds < 0:
        return DASH
    if seconds < 10:
        return f"{seconds:.1f} s" if seconds else "0 s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60:02d} s" if whole < 600 else "")
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def count(number: float) -> str:
    """Return a whole number with its thousands apart: `12,345`."""
    return f"{number:,.0f}"


def amount(number: float) -> str:
    """Return a measured number with three or four significant digits."""
    if not math.isfinite(number):
        return DASH
    if number and (abs(number) < 1e-3 or abs(number) >= 1e6):
        return f"{number:.2e}"
    return f"{number:.4g}"


def rate(per_second: float, what: str) -> str:
    """Return how often something happens, by the unit of time in which it happens at least once: `31 updates/h`."""
    for seconds, unit in ((1, "s"), (60, "min")):
        if per_second * seconds >= 1:
            return f"{per_second * seconds:.3g} {what}/{unit}"
    return f"{per_second * 3600:.3g} {what}/h"


def percent(share: float) -> str:
    """Return a share of 1 in percent; what is neither nothing nor all is not rounded to it."""
    if not math.isfinite(share):
        return DASH
    whole = round(100 * share)
    if whole == 0 and share > 0:
        return "< 1 %"
    return "> 99 %" if whole == 100 and share < 1 else f"{whole} %"


def nbytes(number: float) -> str:
    """Return a size with a unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def clock(at: float) -> str:
    """Return the time of day of a Unix time, UTC: `14:03:22`."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")


def iso(at: float) -> str:
    """Return a Unix time as a machine reads it, UTC: `2026-11-30T14:03:22Z`."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def plural(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: `1 job`, `3 jobs`."""
    return f"{count(number)} {one if number == 1 else many or one + 's'}"
