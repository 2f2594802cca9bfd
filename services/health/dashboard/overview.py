"""What the overview shows, drawn from a picture: figures, shares and joined rows that templates only have to write.

In: a `ClusterView`. Out: small frozen rows. Never: HTML, a time of its own, or a row that is not in
the picture.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from joynexus.scale import group_for
from services.health.dashboard import figures
from services.health.dashboard.listing import ENDED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from joynexus.wire.back import ClusterView, DemandRow, GroupRow, UseRow
    from joynexus.wire.front import LaneStatus, RoleStatus

Mood = Literal["ok", "busy", "warn", "bad", "off"]
"""How a state looks: a colour and a sign; the word stands beside it always."""

_MOODS: dict[str, Mood] = {
    **dict.fromkeys(("succeeded", "idle", "ready", "serving"), "ok"),
    **dict.fromkeys(("running", "working", "publishing"), "busy"),
    **dict.fromkeys(
        ("starting", "loading", "draining", "leaving", "restarting", "parked", "paused", "warning"), "warn"
    ),
    **dict.fromkeys(("failed", "lost", "crash-loop", "quarantined", "error", "critical"), "bad"),
}

PALETTE = 6
"""Colours for parts of a bar; further parts begin anew."""
TOP_JOBS = 8
TOP_DECISIONS = 6
TOP_RECENT = 20


def mood(state: str) -> Mood:
    """Return how a state looks; an unknown one is plain."""
    return _MOODS.get(state, "off")


@dataclass(frozen=True)
class Figure:
    """One of the figures at the top: its name, the number, and what explains it."""

    name: str
    text: str
    note: str = ""
    mood: Mood = "off"


def summary(view: ClusterView) -> tuple[Figure, ...]:
    """Return the figures at the top."""
    jobs = [job.state for job in view.jobs]
    running = sum(state in ("running", "publishing") for state in jobs)
    waiting = sum(state not in (*ENDED, "running", "publishing") for state in jobs)
    waits = sum(lane.waiting for lane in view.lanes)
    oldest = max((lane.oldest_s for lane in view.lanes if lane.waiting), default=0.0)
    lost = [role.worker for role in view.roles if role.phase == "lost"]
    ready = sum(role.phase not in ("lost", "starting", "loading", "draining") for role in view.roles)
    served = sum(policy.versions_in_service for policy in view.policies)
    recent = sum(use.recent_s for use in view.use)
    wrong = sum(row.level in ("error", "critical") for row in view.recent)
    return (
        Figure("Jobs running", figures.count(running), f"{figures.count(waiting)} waiting"),
        Figure(
            "Workers ready",
            f"{ready} of {len(view.roles)}",
            f"lost: {', '.join(lost[:3])}" if lost else "none lost",
            "bad" if lost else "ok",
        ),
        Figure(
            "Work waiting", figures.count(waits), f"oldest {figures.duration(oldest)}" if waits else "queues are empty"
        ),
        Figure("Device time", figures.duration(recent), "in the last minute"),
        Figure("Versions served", figures.count(served), figures.plural(view.policies_total, "policy", "policies")),
        Figure(
            "Recent warnings",
            figures.count(len(view.recent)),
            figures.plural(wrong, "error") if wrong else "no error",
            "bad" if wrong else "warn" if view.recent else "ok",
        ),
    )


@dataclass(frozen=True)
class Share:
    """One part of a bar.

    Attributes:
        name: what it is.
        text: how much.
        start, width: where it lies in a bar of 100 units.
        color: number of its colour, from 0.
    """

    name: str
    text: str
    start: float
    width: float
    color: int


def shares(parts: Sequence[tuple[str, float, str]], whole: float = 0.0) -> tuple[Share, ...]:
    """Cut a bar into parts of (name, size, text); `whole` is the size of all of it, at least that of the parts."""
    total = max(whole, sum(size for _, size, _ in parts))
    if total <= 0:
        return ()
    placed: list[Share] = []
    start = 0.0
    for index, (name, size, text) in enumerate(parts):
        width = 100 * size / total
        placed.append(Share(name, text, round(start, 2), round(width, 2), index % PALETTE))
        start += width
    return tuple(placed)


KINDS_OF_USE = tuple(Share(name, "", 0.0, 0.0, color) for color, name in enumerate(("training", "inference", "env")))


@dataclass(frozen=True)
class AtWork:
    """What a worker has at hand of one kind: who shares it by rows, in how many pieces, and since when."""

    worker: str
    kind: str
    pieces: int
    since_s: float
    members: tuple[Share, ...]


def at_work(groups: Sequence[GroupRow]) -> tuple[AtWork, ...]:
    """Return what each worker has at hand; what is somebody else's comes as one part, the last."""
    by_worker: defaultdict[tuple[str, str], list[GroupRow]] = defaultdict(list)
    for group in groups:
        by_worker[group.worker, group.kind].append(group)
    found: list[AtWork] = []
    for (worker, kind), pieces in by_worker.items():
        rows: Counter[str] = Counter()
        others = 0
        for tenant, policy, number in (member for piece in pieces for member in piece.members):
            if tenant:
                rows[f"{tenant} / {policy}" if policy else tenant] += number
            else:
                others += number
        parts = [*sorted(rows.items()), *([("others", others)] if others else [])]
        members = shares([(name, number, figures.plural(number, "row")) for name, number in parts])
        found.append(AtWork(worker, kind, len(pieces), max(piece.since_s for piece in pieces), members))
    return tuple(found)


def device_time(use: UseRow, most: float) -> tuple[Share, ...]:
    """Return a tenant's device time by what it was used for, as parts of the longest bar of `most` seconds."""
    parts = (("training", use.trainer_s), ("inference", use.inference_s), ("env", use.env_s))
    return shares([(name, seconds, figures.duration(seconds)) for name, seconds in parts], most)


def used(use: UseRow) -> float:
    """Return a tenant's device seconds in all."""
    return use.trainer_s + use.inference_s + use.env_s


def most_used(rows: Sequence[UseRow]) -> float:
    """Return the most that one of them used."""
    return max(map(used, rows), default=0.0)


def by_use(rows: Sequence[UseRow]) -> list[UseRow]:
    """Return who uses most now first, then who used most in all; the service's own use comes last."""
    return sorted(rows, key=lambda row: (not row.tenant, -row.recent_s, -used(row), row.tenant))


def priced(rows: Sequence[UseRow]) -> bool:
    """Return whether there is a price list."""
    return any(row.month_cost for row in rows)


def by_queue(lanes: Sequence[LaneStatus]) -> dict[str, list[LaneStatus]]:
    """Return lanes by their queue, the fullest first."""
    queues: defaultdict[str, list[LaneStatus]] = defaultdict(list)
    for lane in sorted(lanes, key=lambda lane: (-lane.waiting, -lane.running, lane.tenant)):
        queues[lane.queue].append(lane)
    return dict(sorted(queues.items()))


def pools(view: ClusterView) -> list[DemandRow]:
    """Return what waits for workers, by their kind, the busiest kind first."""
    return sorted(view.demand, key=lambda row: (-row.waiting, -row.running, row.group))


def wanted(view: ClusterView, row: DemandRow) -> int:
    """Return how many workers health wants in the group that does this; 0 if it does not say."""
    return view.desired.get(group_for(row.group, row.role, view.desired), 0)


@dataclass(frozen=True)
class Process:
    """A worker as the master knows it, joined with what health knows of its process; either may be missing."""

    worker: str
    name: str
    role: str
    state: str
    busy: str
    uptime: str
    restarts: int
    reason: str
    runs: str


def processes(view: ClusterView) -> tuple[Process, ...]:
    """Return all roles' processes, the master first."""
    left = {instance.instance or f"?{instance.name}": instance for instance in view.instances}
    rows: list[Process] = []
    for role in view.roles:
        instance = left.pop(role.instance, None) if role.instance else None
        rows.append(
            Process(
                worker=role.worker,
                name=instance.name if instance else "",
                role=role.role,
                state="quarantined" if role.detail.get("quarantined") else role.phase,
                busy=figures.percent(role.busy_s / role.uptime_s) if role.uptime_s > 0 else "",
                uptime=figures.duration(role.uptime_s) if role.uptime_s > 0 else "",
                restarts=max(role.restarts, instance.restarts if instance else 0),
                reason=role.detail.get("quarantined", "")
                or _restarted(role.reason or (instance.reason if instance else "")),
                runs=_runs(role),
            )
        )
    for instance in left.values():
        state = "ready" if instance.state == "running" else instance.state
        rows.append(
            Process(
                worker="",
                name=instance.name,
                role=instance.role,
                state=state,
                busy="",
                uptime="",
                restarts=instance.restarts,
                reason=_restarted(instance.reason),
                runs="",
            )
        )
    order = ("master", "trainer", "inference", "env", "health", "dashboard")
    return tuple(sorted(rows, key=lambda row: order.index(row.role) if row.role in order else len(order)))


def _restarted(why: str) -> str:
    return f"last restart: {why}" if why else ""


def _runs(role: RoleStatus) -> str:
    """Say what a role works with."""
    detail: Mapping[str, str] = role.detail
    if "backbone" in detail:
        return ", ".join(filter(None, (detail["backbone"], detail.get("device"), detail.get("dtype"))))
    return detail.get("simulators", "") or detail.get("url", "")
