"""Three tenants work at once while roles of their cluster are killed at random: nothing is lost, doubled or left.

In: how long, which role is spared, and a seed of the times and the victims. Out: assertions by invariant, and figures.
Never: a kill that the operator did not cause, or a number of a disturbed run that is not compared with a calm one.

One tenant imitates (SFT jobs), one reinforces (RL jobs, synchronous and asynchronous in turn), one drives a loop of its
own and counts what it was told. Each does the same again afterwards while nothing happens, and has the same bits where
they are a function of seeds alone: an asynchronous job acts with whatever version is the newest within its bound.

    python -m tests.chaos.soak                 ten minutes for each role, which is spared then
    python -m tests.chaos.soak --spared env    ten minutes
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks._report import RESULTS, Row, host
from joynexus import Client
from joynexus.keyring import Keyring
from joynexus.local import HealthReport
from tests.chaos.cluster import Cluster, chaotic
from tests.chaos.jobs import DATASET, push
from tests.chaos.killer import ROLES, Killer, Look, Plan, slope
from tests.chaos.tenants import LAST_S, Driven, Tenant, drive, imitate, reinforce
from tests.chaos.verdict import Verdict
from tests.waiting import until

MAY_GROW, MAY_GROW_MIB = 0.10, 16.0
"""The spared role's memory may grow so much from the second quarter of the time to the last."""
MORE_DESCRIPTORS, MORE_THREADS, MORE_JOURNAL_KIB = 8.0, 4.0, 1024.0
"""And what else it holds, and the journal."""
KILLS = {"JOYNEXUS_MAX_KILLS": "1000"}
"""Nobody's work is at fault for these deaths, however often they meet it."""


USUAL = Plan(seconds=600, mean_s=15, spared="master", steps=1500, updates=8)


@dataclass
class Found:
    """What is to be said of it."""

    plan: Plan
    kills: dict[str, int] = field(default_factory=dict)  # by role
    looks: list[Look] = field(default_factory=list)
    jobs: list[int] = field(default_factory=list)  # of imitation, of reinforcement
    loop_steps: int = 0
    loop_versions: int = 0
    longest_step_s: float = 0.0
    disturbed_s: float = 0.0
    calm_s: float = 0.0

    def figures(self) -> Row:
        """A row of results."""
        half = self.looks[len(self.looks) // 2 :]
        quarters = {name: [round(mean, 1) for mean in means] for name, means in self.quarters().items()}
        return {
            "spared": self.plan.spared,
            "seconds": round(self.plan.seconds),
            "mean_s": self.plan.mean_s,
            "seed": self.plan.seed,
            "kills": sum(self.kills.values()),
            **{f"kills_{role}": self.kills.get(role, 0) for role in ROLES},
            "sft_jobs": self.jobs[0],
            "sft_steps": self.jobs[0] * self.plan.steps,
            "rl_jobs": self.jobs[1],
            "rl_updates": self.jobs[1] * self.plan.updates,
            "loop_steps": self.loop_steps,
            "loop_versions": self.loop_versions,
            "longest_step_s": round(self.longest_step_s, 1),
            "disturbed_s": round(self.disturbed_s),
            "calm_s": round(self.calm_s),
            "mib_per_min": round(60 * slope([(look.at, look.mib) for look in half]), 2),
            **quarters,
        }

    def quarters(self) -> dict[str, list[float]]:
        """What was looked at, as means of the four quarters of the time."""
        size = max(1, len(self.looks) // 4)
        parts = [self.looks[start * size : (start + 1) * size] for start in range(4)]
        names = Look.__struct_fields__[1:]
        return {name: [sum(getattr(look, name) for look in part) / len(part) for part in parts] for name in names}


def disturbed(
    cluster: Cluster, found: Found, folder: Path, verdict: Verdict
) -> tuple[Driven, list[object], list[object]]:
    """Have the tenants work while roles are killed; return what the loop was told, and what the jobs left."""
    plan, over = found.plan, threading.Event()
    most = plan.seconds + LAST_S

    def numbers() -> Iterator[int]:
        return itertools.takewhile(lambda number: not (number and over.is_set()), itertools.count())

    def imitating(client: Client) -> list[object]:
        return [imitate(client, f"disturbed-{number}", plan.steps, folder, most) for number in numbers()]

    def reinforcing(client: Client) -> list[object]:
        return [
            reinforce(client, f"disturbed-{number}", plan.updates, most, staleness=number % 2) for number in numbers()
        ]

    def going_on(_: int) -> bool:
        over.wait(plan.pause_s)
        return not over.is_set()

    start = time.monotonic()
    tenants = [
        Tenant(cluster, "driver", lambda client: drive(client, "disturbed", folder, going_on)),
        Tenant(cluster, "imitator", imitating),
        Tenant(cluster, "reinforcer", reinforcing),
    ]
    killer = Killer(cluster, plan)
    try:
        killer.run(lambda: all(tenant.error is None for tenant in tenants))
    finally:
        over.set()
    killer.attend()
    found.kills, found.looks = killer.kills, killer.looks
    with verdict("I3"):
        driven, imitated, reinforced = [tenant.result(LAST_S) for tenant in tenants]
    found.disturbed_s = time.monotonic() - start
    assert isinstance(driven, Driven)
    assert isinstance(imitated, list)
    assert isinstance(reinforced, list)
    return driven, imitated, reinforced


def soak(cluster: Cluster, plan: Plan, folder: Path, verdict: Verdict) -> Found:
    """Do it: disturbed, calm, compare."""
    found = Found(plan)
    keys = Keyring(cluster.local.keys)
    for tenant in ("driver", "imitator", "reinforcer"):
        keys.issue(tenant, tenant=tenant)
    for tenant in ("driver", "imitator"):
        Tenant(cluster, tenant, lambda client: push(client, folder / client.tenant / DATASET)).result(LAST_S)

    driven, imitated, reinforced = disturbed(cluster, found, folder, verdict)
    found.jobs = [len(imitated), len(reinforced)]
    found.loop_steps, found.loop_versions, found.longest_step_s = (
        len(driven.losses),
        len(driven.actions),
        driven.longest_s,
    )
    start, most, steps = time.monotonic(), plan.seconds + LAST_S, len(driven.losses)
    calm = [
        Tenant(cluster, "driver", lambda client: drive(client, "calm", folder, lambda done: done < steps)),
        Tenant(cluster, "imitator", lambda client: imitate(client, "calm", plan.steps, folder, most)),
        Tenant(cluster, "reinforcer", lambda client: reinforce(client, "calm", plan.updates, most)),
    ]
    calm_driven, calm_imitated, calm_reinforced = [tenant.result(most) for tenant in calm]
    found.calm_s = time.monotonic() - start

    with verdict("I1"):
        assert isinstance(calm_driven, Driven)
        assert (driven.losses, driven.actions) == (calm_driven.losses, calm_driven.actions)
        assert driven.weights == calm_driven.weights
        assert all(job == calm_imitated for job in imitated)
        assert all(curve == calm_reinforced for curve in reinforced[::2])
    with verdict("I4"):
        until(cluster.idle)
        until(lambda: all(instance.state == "running" for instance in health(cluster).instances))
        for name, (_, early, _, late) in found.quarters().items():
            bound = {
                "mib": (1 + MAY_GROW) * early + MAY_GROW_MIB,
                "descriptors": early + MORE_DESCRIPTORS,
                "threads": early + MORE_THREADS,
                "journal_kib": early + MORE_JOURNAL_KIB,
            }[name]
            assert late <= bound, f"{plan.spared}, {name}: {early:.1f} in the second quarter, {late:.1f} in the last"
    with verdict("I5"):
        assert driven.losses, "the loop did not go on"
    with verdict("I6"):
        lines = cluster.log("health").splitlines()
        for role, times in found.kills.items():
            if role == "health":  # one that dies as it starts says nothing
                assert any("adopted" in line for line in lines)
            else:  # and what it started last may not be said
                assert sum("started" in line and f"instance={role} " in line for line in lines) >= times, role
    return found


def health(cluster: Cluster) -> HealthReport:
    """What health knows, once it has written it down."""
    until(lambda: cluster.local.load_health() is not None)
    report = cluster.local.load_health()
    assert report is not None
    return report


def main(argv: list[str]) -> int:
    """Run one soak for each role that is to be spared; print and write down what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description="Kill roles at random.")
    parser.add_argument("--spared", nargs="+", choices=ROLES, default=list(ROLES), help="one run each")
    parser.add_argument("--seconds", type=float, default=USUAL.seconds)
    parser.add_argument("--mean", type=float, default=USUAL.mean_s, help="mean seconds from one kill to the next")
    parser.add_argument("--seed", type=int, default=1, help="of times and victims")
    parser.add_argument("--out", type=Path, default=RESULTS / "soak_kills.json", help="where the JSON goes")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    failed = False
    for spared in options.spared:
        plan = replace(USUAL, seconds=options.seconds, mean_s=options.mean, spared=spared, seed=options.seed)
        verdict = Verdict()
        row: Row = {"spared": spared}
        with tempfile.TemporaryDirectory(prefix="soak") as folder, chaotic(Path(folder), **KILLS) as cluster:
            try:
                row = soak(cluster, plan, Path(folder), verdict).figures()
            except AssertionError as error:
                row, failed = {**row, "error": str(error)}, True
        rows.append({**row, "invariants": str(verdict)})
        print(json.dumps(rows[-1]), flush=True)
        options.out.write_text(
            json.dumps({"rows": rows, "host": host(), "command": "python -m tests.chaos.soak"}, indent=2) + "\n"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
