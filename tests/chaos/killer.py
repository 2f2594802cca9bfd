"""Roles that are killed at random, all but one, and what the spared one holds meanwhile.

In: a plan. Out: kills by role, looks at the spared role. Never: a dead cluster left without health: it is started again
as an operator's service manager would.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from joynexus import launch
from tests.chaos.cluster import Cluster
from tests.waiting import until

ROLES = ("master", "trainer", "inference", "env", "health")
_LOOK_S = 1.0


@dataclass(frozen=True)
class Plan:
    """What is done.

    Attributes:
        seconds: how long roles are killed.
        mean_s: mean time from one kill to the next (exponential: a Poisson process).
        spared: the role that lives through.
        steps, updates: of one SFT job and of one RL job; jobs follow one another until the time is over.
        pause_s: of the loop, after each step.
        seed: of times and victims.
    """

    seconds: float
    mean_s: float
    spared: str
    steps: int
    updates: int
    pause_s: float = 0.5
    seed: int = 1


class Look(msgspec.Struct, frozen=True):
    """At the spared role, so many seconds after the start, and at the journal."""

    at: float
    mib: float
    descriptors: int
    threads: int
    journal_kib: float


class Killer:
    """Kills roles, all but one, at times of chance; starts health again as its own supervisor would.

    Attributes:
        kills: by role.
        looks: at the spared one.
    """

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self.kills: Counter[str] = Counter()
        self.looks: list[Look] = []
        self._cluster, self._plan = cluster, plan
        self._chance = random.Random(plan.seed)
        self._victims = [role for role in ROLES if role != plan.spared]

    def run(self, working: Callable[[], bool]) -> None:
        """Kill until the time is over, or somebody has failed; look at the spared role meanwhile."""
        start, tick = time.monotonic(), threading.Event()
        spared = self._cluster.pid(self._plan.spared)
        at = start + self._chance.expovariate(1 / self._plan.mean_s)
        while (now := time.monotonic()) < start + self._plan.seconds and working():
            if now >= at:
                self._kill(self._chance.choice(self._victims))
                at = now + self._chance.expovariate(1 / self._plan.mean_s)
            self.attend()
            self.looks.append(look(self._cluster, spared, now - start))
            tick.wait(min(_LOOK_S, max(0.0, at - time.monotonic())))
        assert self._cluster.local.running(self._plan.spared) == spared, f"{self._plan.spared} did not live through"

    def attend(self) -> None:
        """Start health again if it does not run."""
        local = self._cluster.local
        if not local.running("health"):
            launch.start_health(local, launch.checkout(), "info")
            until(lambda: local.running("health"))

    def _kill(self, role: str) -> None:
        pid = self._cluster.local.running(role)
        if pid:  # else it is being started again already
            os.kill(pid, signal.SIGKILL)
            self.kills[role] += 1


def look(cluster: Cluster, pid: int, at: float) -> Look:
    """Look at a process."""
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text().split()[1])
    state = cluster.local.folder / "state"
    return Look(
        at=at,
        mib=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        descriptors=len(list((process / "fd").iterdir())),
        threads=len(list((process / "task").iterdir())),
        journal_kib=(state / "journal.db").stat().st_size / 1024,
    )


def slope(points: list[tuple[float, float]]) -> float:
    """Least squares: how much y grows with x."""
    count = len(points)
    x0, y0 = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    spread = sum((x - x0) ** 2 for x, _ in points)
    return sum((x - x0) * (y - y0) for x, y in points) / spread if spread else 0.0
