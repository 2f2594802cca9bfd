"""Four tenants, three with reinforcement learning and one that imitates: together, one after another, and isolated.

In: demonstrations of a MetaWorld task, recorded first. Every policy sees a camera. Out: wall time, CPU seconds of all
processes by role, busy seconds and utilisation of trainer and inference, backbone forwards for each observation, and
whether each tenant's curve is the same bit for bit in all arms. Never: a figure from two arms that differ in anything
but what their name says; each starts its clusters anew, and what they prepare is done before the clocks start.

The arms: `together`; `one after another` on one cluster; the same `without stored features`, as a service would do that
forwards whatever it is sent; `isolated`, four clusters at the same time, one a tenant.

    python -m benchmarks.tenants [--quick]        or: make bench-tenants
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import joynexus
from benchmarks import _report, _roles
from joynexus import launch
from joynexus.contract import Camera
from joynexus.keyring import Keyring
from joynexus.local import LocalCluster
from joynexus.specs import (
    Algorithm,
    ExplorationSpec,
    GrpoSpec,
    JobSpec,
    OptimizerSpec,
    PpoSpec,
    RlPolicy,
    RlSpec,
    SftPolicy,
    SftSpec,
)
from joynexus.wire.front import JobInfo
from services.env.producers.demos import write_demonstrations

BACKBONE = "lite@64"
REACH, BUTTON = "metaworld/reach-v3", "metaworld/button-press-topdown-v3"
CAMERA = Camera(name="corner2", height=64, width=64, rotation_deg=180)
EPISODE_LIMIT = 80
IMITATES = "sft-groot"
ROLES = ("trainer", "inference", "env", "master", "health")
Used = defaultdict[str, float]
"""Seconds by role and kind: `trainer_cpu`, `trainer_busy`, …"""


@dataclass(frozen=True)
class Size:
    """How much work each tenant does."""

    demonstrations: int
    steps: int
    updates: int
    episodes: int


@dataclass(frozen=True)
class Outcome:
    """What a tenant found, which must not depend on the others, and what it took."""

    found: object
    seconds: float
    forwards: int
    observations: int


@dataclass
class Arm:
    """One way to do the work of all tenants.

    Attributes:
        clusters: how many; tenants are spread over them.
        together: at the same time, or one after another.
        features: bytes of the store of features; 0 keeps none.
    """

    name: str
    clusters: int = 1
    together: bool = True
    features: int | None = None


ARMS = (
    Arm("together"),
    Arm("one after another", together=False),
    Arm("one after another, without stored features", together=False, features=0),
    Arm("isolated", clusters=4),
)


def jobs(size: Size) -> dict[str, JobSpec]:
    """Return each tenant's job."""
    every_group = GrpoSpec(group_size=4, epochs=2, minibatch=64, level="chunk", filter_low=-1e9, filter_high=1e9)

    def rl(env: str, algorithm: Algorithm, head: str) -> RlSpec:
        return RlSpec(
            policy="policy",
            env=env,
            algorithm=algorithm,
            updates=size.updates,
            episodes=size.episodes,
            reward_scale=0.1,
            episode_limit=EPISODE_LIMIT,
            exploration=ExplorationSpec(std=0.5),
            create=RlPolicy(backbone=BACKBONE, head=head, chunk=8, cameras=(CAMERA,)),
        )

    imitation = SftSpec(
        policy="policy",
        dataset="button",
        steps=size.steps,
        batch_size=32,
        create=SftPolicy(backbone=BACKBONE, head="groot", chunk=8, optimizer=OptimizerSpec(lr=1e-3, warmup_steps=50)),
    )
    return {
        "ppo-oft": rl(REACH, PpoSpec(epochs=4, minibatch=64), "oft"),
        "ppo-groot": rl(BUTTON, PpoSpec(epochs=4, minibatch=64, level="chunk"), "groot"),
        "grpo-oft": rl(BUTTON, every_group, "oft"),
        IMITATES: imitation,
    }


def measure(arm: Arm, data: Path, folder: Path, size: Size) -> tuple[_report.Row, dict[str, Outcome]]:
    """Do all tenants' work in one arm; return what it took, and each tenant's outcome."""
    with ExitStack() as stack:
        clusters = [stack.enter_context(cluster_in(folder / str(number), arm)) for number in range(arm.clusters)]
        used: Used = defaultdict(float)
        wall, outcomes = asyncio.run(run(arm, clusters, data, size, used))
    row: _report.Row = {
        "tenants": arm.name,
        "wall_s": round(wall, 1),
        "cpu_s": round(sum(used[f"{role}_cpu"] for role in ROLES), 1),
        **{f"{role}_cpu_s": round(used[f"{role}_cpu"], 1) for role in ROLES},
    }
    for role in ("trainer", "inference"):
        row[f"{role}_busy_s"] = round(used[f"{role}_busy"], 1)
        row[f"{role}_utilisation"] = round(used[f"{role}_busy"] / (wall * arm.clusters), 3)
    row["backbone_forwards"] = sum(outcome.forwards for outcome in outcomes.values())
    return row, outcomes


async def run(
    arm: Arm, clusters: Sequence[LocalCluster], data: Path, size: Size, used: Used
) -> tuple[float, dict[str, Outcome]]:
    """Prepare all tenants and do their work; return its wall time and outcomes, and add what it used to `used`."""
    work = jobs(size)
    async with AsyncExitStack() as stack:
        clients: dict[str, joynexus.AsyncClient] = {}
        for number, name in enumerate(work):
            cluster = clusters[number % len(clusters)]
            key = Keyring(cluster.keys).issue(name, tenant=name)
            clients[name] = await stack.enter_async_context(joynexus.connect_async(key, timeout_s=60))
        await clients[IMITATES].datasets.push("button", data, progress=False)
        await count(clusters, used, sign=-1)
        start = time.monotonic()
        if arm.together:
            done = await asyncio.gather(*(do(clients[name], work[name]) for name in work))
        else:
            done = [await do(clients[name], work[name]) for name in work]
        wall = time.monotonic() - start
        await count(clusters, used, sign=1)
        return wall, dict(zip(work, done, strict=True))


async def do(client: joynexus.AsyncClient, spec: JobSpec) -> Outcome:
    """Do one tenant's job."""
    began = time.monotonic()
    info = await (await client.submit(spec)).wait(progress=False)
    forwards = sum(line.backbone_forwards for line in (await client.usage()).lines)
    if isinstance(spec, SftSpec):
        steps = (await client.datasets.get(spec.dataset)).steps
        return Outcome(info.losses, time.monotonic() - began, forwards, min(steps, spec.steps * spec.batch_size))
    return Outcome(info.updates, time.monotonic() - began, forwards, _observations(info))


def _observations(info: JobInfo) -> int:
    """Count what RL saw: each decision, and the end of each episode where its value was asked for."""
    ends = isinstance(info.spec, RlSpec) and isinstance(info.spec.algorithm, PpoSpec)
    return sum(int(point.metrics["decisions"]) + ends * point.episodes for point in info.updates)


async def count(clusters: Sequence[LocalCluster], used: Used, *, sign: int) -> None:
    """Add to `used` (or take away) what the roles of all clusters have used so far."""
    for cluster in clusters:
        for role, seconds in _roles.cpu_s(cluster).items():
            used[f"{role}_cpu"] += sign * seconds
        async with joynexus.connect_async(cluster.client_file, timeout_s=60) as operator:  # tenants see no busy times
            for role_status in (await operator.status()).roles:
                used[f"{role_status.role}_busy"] += sign * role_status.busy_s


@contextmanager
def cluster_in(folder: Path, arm: Arm) -> Iterator[LocalCluster]:
    """Run a cluster with its own caches until the block ends."""
    variable = "JOYNEXUS_FEATURE_BUDGET_BYTES"
    if arm.features is not None:
        os.environ[variable] = str(arm.features)
    try:
        yield launch.up(folder, launch.Options(backbone=BACKBONE, simulator_processes=2))
    finally:
        os.environ.pop(variable, None)
        launch.down(folder)


def main(argv: Sequence[str] | None = None) -> int:
    options = _report.arguments("tenants", "Four tenants together, one after another, and isolated.", argv)
    warnings.filterwarnings("ignore", module="metaworld")  # its experts ask for more than the arm can do, as always
    size = Size(4, 30, 2, 4) if options.quick else Size(20, 400, 6, 8)
    rows: list[_report.Row] = []
    outcomes: dict[str, dict[str, Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="jnx-bench") as name:
        folder = Path(name)
        write_demonstrations(folder / "data", BUTTON, size.demonstrations)
        for number, arm in enumerate(ARMS):
            row, outcomes[arm.name] = measure(arm, folder / "data", folder / str(number), size)
            rows.append({"table": "arms", **row})
    different = []
    for tenant in jobs(size):
        found = [outcomes[arm.name][tenant] for arm in ARMS]
        same = all(each.found == found[0].found for each in found)
        different += [] if same else [tenant]
        row = {"table": "tenants", "tenant": tenant, "observations": found[0].observations, "same_bits": same}
        for arm, each in zip(ARMS, found, strict=True):
            row[f"{arm.name}: wall_s"] = round(each.seconds, 1)
            row[f"{arm.name}: forwards/observation"] = round(each.forwards / max(1, each.observations), 3)
        rows.append(row)
    _report.write("tenants", options, rows)
    if different:
        print("numbers that the others changed:", ", ".join(different))
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
