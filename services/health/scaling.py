"""How many processes of a kind there should be: decided by what waits, within the operator's limits.

In: how many there are, what waits for them, the time. Out: decisions, each with its reason in one sentence. Never: a
number outside the limits, a decision by figures that are missing or old, or one that goes back on the last before its
pause is over.

The rules, for each group that has limits:

- A number outside the limits is brought inside at once.
- More, if work waits long (the oldest piece over `WAIT_S`, for requests to act `ACT_WAIT_S`; or all of it would take
  longer than that; or a trainer waits for it) and has done so for `up_s`: as many as all that waits and runs would keep
  busy, at most twice as many as now. Whoever was started before must work first, unless that takes over `COMING_S`;
  while one is in a crash loop, there are no more of its kind.
- One less, if for `down_s` nothing waited long and one less would have done all that there was.
- Each only after a pause since the group's last change: `PAUSE_S` before more, `down_s` before less.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import msgspec

from joynexus.scale import Range, group_for
from joynexus.wire.back import DemandRow

UP_S = 3.0
DOWN_S = 60.0
PAUSE_S = 10.0
WAIT_S = 5.0
ACT_WAIT_S = 1.0
"""Requests to act wait long sooner: a robot stands still meanwhile."""
COMING_S = 120.0
"""A process that does not work so long after the decision is not waited for: a model loads in less."""
DATA = "datasets"
"""The need that env workers have a lane of their own for."""
OLD_S = 5.0
"""Figures further apart than this say nothing of the time between them."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A decision.

    Attributes:
        before, after: processes wanted.
        reason: one sentence, without its full stop.
    """

    group: str
    before: int
    after: int
    reason: str


@dataclass(slots=True)
class _Group:
    changed_at: float = -math.inf
    tried: tuple[int, int] = (0, 0)
    pressed_since: float | None = None
    calm_since: float | None = None


@dataclass
class Scaler:
    """Decides for all groups.

    Args:
        limits: by group; a group without limits is left alone. May be changed at any time.
        up_s: work must have waited for long all this time before there are more processes.
        down_s: and nothing must have waited all this time before there is one less.
    """

    limits: Mapping[str, Range]
    up_s: float = UP_S
    down_s: float = DOWN_S
    _groups: dict[str, _Group] = field(default_factory=dict)
    _seen_at: float = -math.inf

    def decide(
        self,
        wanted: Mapping[str, int],
        rows: Iterable[DemandRow] | None,
        now: float,
        *,
        looping: Set[str] = frozenset(),
    ) -> list[Change]:
        """Say which groups should have another number of processes.

        Args:
            wanted: processes by group, those that are just starting among them; 0 where none of those there is of use.
            rows: what waits; None if nobody knows.
            now: seconds of a clock that never goes back.
            looping: groups of which a process is in a crash loop.
        """
        changes: list[Change] = []
        demand = None if rows is None else by_group(rows, wanted)
        if demand is not None and now - self._seen_at > OLD_S:
            for group in self._groups.values():
                group.pressed_since = group.calm_since = None
        for name, limits in self.limits.items():
            before = wanted.get(name)
            if before is None:
                continue
            group = self._groups.setdefault(name, _Group())
            after, reason = _within(limits, before)
            if reason and (before, after) == group.tried and now - group.changed_at < PAUSE_S:
                continue  # it could not be done
            if not reason and demand is not None and name in demand:
                after, reason = self._follow(group, limits, before, demand[name], now)
                if after > before and name in looping:
                    continue  # the next one would hardly fare better
            if after != before:
                group.changed_at, group.tried = now, (before, after)
                group.pressed_since = group.calm_since = None
                changes.append(Change(group=name, before=before, after=after, reason=reason))
        if demand is not None:
            self._seen_at = now
        return changes

    def _follow(
        self, group: _Group, limits: Range, before: int, lanes: Sequence[DemandRow], now: float
    ) -> tuple[int, str]:
        pressed = [lane for lane in lanes if _waits_long(lane)]
        calm = not pressed and all(_pieces(lane) <= _each(lane) * (before - 1) for lane in lanes)
        group.pressed_since = (now if group.pressed_since is None else group.pressed_since) if pressed else None
        group.calm_since = (now if group.calm_since is None else group.calm_since) if calm else None
        since = now - group.changed_at
        if group.pressed_since is not None and now - group.pressed_since >= self.up_s and since >= PAUSE_S:
            most = max(pressed, key=_busy)
            after = min(limits.most, 2 * before, _busy(most))
            if after > before and (most.workers >= before or since >= COMING_S):
                return after, _why_more(most)
        if group.calm_since is not None and now - group.calm_since >= self.down_s and since >= self.down_s:
            after = max(limits.least, before - 1)
            if after < before:
                calm_s, pieces = now - group.calm_since, sum(map(_pieces, lanes))
                return after, f"{after} would have done for {calm_s:.0f} s, and can do what there is now ({pieces})"
        return before, ""


def by_group(rows: Iterable[DemandRow], groups: Iterable[str]) -> dict[str, list[DemandRow]]:
    """Return what each group's lanes have to do: simulators of all families together, and data sets.

    What no worker serves is left out: more of those that there are could not do it either.
    """
    known = set(groups)
    lanes: dict[tuple[str, bool], DemandRow] = {}
    for row in rows:
        name = group_for(row.group, row.role, known)
        if name and row.workers and row.credit:
            lane = name, row.need == DATA
            lanes[lane] = _together(lanes[lane], row) if lane in lanes else row
    found: defaultdict[str, list[DemandRow]] = defaultdict(list)
    for (name, _), row in lanes.items():
        found[name].append(row)
    return dict(found)


def _together(one: DemandRow, other: DemandRow) -> DemandRow:
    """Two needs in the same lane of the same workers."""
    pieces = _pieces(one) + _pieces(other)
    seconds = _pieces(one) * one.cost_s + _pieces(other) * other.cost_s
    more = one if one.workers >= other.workers else other
    return msgspec.structs.replace(
        more,
        running=one.running + other.running,
        waiting=one.waiting + other.waiting,
        oldest_s=max(one.oldest_s, other.oldest_s),
        cost_s=seconds / pieces if pieces else max(one.cost_s, other.cost_s),
        starved=one.starved or other.starved,
    )


def _pieces(lane: DemandRow) -> int:
    return lane.running + lane.waiting


def _wait_s(lane: DemandRow) -> float:
    return ACT_WAIT_S if lane.role == "inference" else WAIT_S


def _each(lane: DemandRow) -> float:
    """Pieces that one worker does at once; of requests to act, which go together, those that it does in time."""
    if lane.role == "inference" and lane.cost_s:
        return max(1.0, _wait_s(lane) / lane.cost_s)
    return lane.credit / lane.workers


def _busy(lane: DemandRow) -> int:
    """Workers that all that waits and runs would keep busy."""
    return math.ceil(_pieces(lane) / _each(lane))


def _within(limits: Range, before: int) -> tuple[int, str]:
    after = min(max(before, limits.least), limits.most)
    if after == before:
        return before, ""
    if limits.least == limits.most:
        return after, f"the operator wants {limits}"
    return after, f"the operator's limits are {limits}"


def _waits_long(lane: DemandRow) -> bool:
    takes_s = lane.waiting * lane.cost_s / (lane.workers if lane.role == "inference" else lane.credit)
    return lane.waiting > 0 and (lane.starved or max(lane.oldest_s, takes_s) > _wait_s(lane))


def _why_more(lane: DemandRow) -> str:
    pieces = "1 piece of work waits" if lane.waiting == 1 else f"{lane.waiting} pieces of work wait"
    starved = ", and a trainer waits for them" if lane.starved else ""
    waits = f"{pieces}, the oldest for {lane.oldest_s:.0f} s{starved}"
    if lane.role == "inference" and lane.cost_s:
        return f"{waits}; {lane.workers} can do {lane.workers * _each(lane):.0f} in {_wait_s(lane):.0f} s"
    takes = f", each takes {lane.cost_s:.1f} s" if lane.cost_s >= 0.05 else ""
    return f"{waits}; {lane.credit} are done at once{takes}"
