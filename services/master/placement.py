"""Where a policy lives: on the trainer that has least to do, and elsewhere once that is worth a move.

In: for each trainer how much its policies ask of it, and the memory that they take. Out: a choice, with its reason.
Never: I/O, a clock of its own, or a move for a small difference: it would be made back and forth.

A trainer's *load* is the mean number of its policies that have unfinished work: the device seconds a second that they
would use if each had the device for itself. (Busy time itself says nothing once a trainer is busy all the time.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

SMOOTHED_S = 20.0
"""Time constant of loads: what was three times as long ago hardly counts."""
_MIN_GAP = 1.5
_MIN_GAP_SHARE = 0.2
"""A move pays if loads differ by so many policies, and by so much of the larger load."""


class Smoothed:
    """Mean over time of a level that changes in steps; the past fades with a time constant.

    Args:
        now: time in seconds, as in all methods.
    """

    def __init__(self, now: float, level: float = 0.0) -> None:
        self._at = now
        self._level = level
        self._mean = level

    def set(self, now: float, level: float) -> None:
        """The level is another one from now on."""
        self._mean = self.mean(now)
        self._at, self._level = now, level

    def shift(self, now: float, by: float) -> None:
        """Add to the mean at once what would only show with time."""
        self._mean = max(0.0, self.mean(now) + by)
        self._at = now

    def mean(self, now: float) -> float:
        """Return the mean as of now."""
        kept = math.exp(-max(0.0, now - self._at) / SMOOTHED_S)
        return self._level + (self._mean - self._level) * kept


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer on which a policy may live.

    Attributes:
        load: see the module.
        policies: policies at home there.
        nbytes: what those in memory take.
        room: bytes that they may take; 0 means no limit.
    """

    name: str
    load: float
    policies: int = 0
    nbytes: int = 0
    room: int = 0

    def fits(self, nbytes: int) -> bool:
        """Tell whether a policy of this size comes into memory without another one leaving."""
        return not self.room or self.nbytes + nbytes <= self.room


def choose(places: Iterable[Place], nbytes: int) -> Place | None:
    """Choose a home for a policy that takes `nbytes`: where it fits, then where least is to do, then fewest live."""

    def badness(place: Place) -> tuple[bool, float, int, str]:
        return not place.fits(nbytes), round(place.load, 1), place.policies, place.name

    return min(places, key=badness, default=None)


class Gap(msgspec.Struct, frozen=True):
    """Loads that differ by enough: a policy should move from `source` to `target`, if its demand is below `most`."""

    source: str
    target: str
    most: float
    reason: str


def lopsided(places: Sequence[Place]) -> Gap | None:
    """Return the largest difference of loads that is worth a move; None if there is none."""
    if len(places) < 2:
        return None
    low = min(places, key=lambda place: (place.load, place.name))
    high = max(places, key=lambda place: (place.load, place.name))
    gap = high.load - low.load
    if gap < max(_MIN_GAP, _MIN_GAP_SHARE * high.load):
        return None
    reason = f"{high.name} has a load of {high.load:.1f}, {low.name} one of {low.load:.1f}"
    return Gap(high.name, low.name, gap, reason)


def best_mover(demands: Sequence[float], gap: Gap) -> int | None:
    """Choose, by their demands, the policy whose move leaves the smallest difference: its index; None if none helps."""
    able = [(abs(gap.most - 2 * demand), index) for index, demand in enumerate(demands) if 0 < demand < gap.most]
    return min(able)[1] if able else None
