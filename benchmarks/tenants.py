"""Four tenants on one cluster: together, and one after another.

In: demonstrations of two MetaWorld tasks, recorded first. Two tenants fine-tune (`oft` on one set, `groot` on the
other), two evaluate a policy of their own again and again; each has its own key and its own asyncio client. Out: wall
time, CPU seconds of all processes by role, backbone forwards, and whether each tenant's loss curve and evaluation
tables are the same bit for bit. Never: a figure from two clusters that differ in anything but the order of the work;
both are started anew, and what they prepare (data sets, policies) is done before the clocks start.

    python -m benchmarks.tenants [--quick]        or: make bench-tenants
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import joynexus
from benchmarks import _report, _roles
from joynexus import launch
from joynexus.keyring import Keyring
from joynexus.local import LocalCluster
from joynexus.specs import EvaluateSpec, OptimizerSpec, SftPolicy, SftSpec
from services.env.producers.demos import write_demonstrations

BACKBONE = "lite@64"
REACH, BUTTON = "metaworld/reach-v3", "metaworld/button-press-topdown-v3"
TASKS = {"reach": REACH, "button": BUTTON}


@dataclass(frozen=True)
class Tenant:
    """One tenant's work.

    Attributes:
        name: of its key and of its policy.
        dataset: key of `TASKS`, whose demonstrations it has.
        head, chunk: of its policy.
        trains: it fine-tunes; otherwise it evaluates its untrained policy on the set's task.
    """

    name: str
    dataset: str
    head: str
    chunk: int
    trains: bool


TENANTS = (
    Tenant("sft-oft", "reach", "oft", 8, trains=True),
    Tenant("sft-groot", "button", "groot", 12, trains=True),
    Tenant("evaluate-oft", "reach", "oft", 8, trains=False),
    Tenant("evaluate-groot", "button", "groot", 16, trains=False),
)


@dataclass(frozen=True)
class Size:
    """How much work each tenant does."""

    demonstrations: int
    steps: int
    batch_size: int
    evaluations: int
    episodes: int


@dataclass
class Outcome:
    """What a tenant found (`found` must not depend on the others), and what it took."""

    found: list[object] = field(default_factory=list)
    seconds: float = 0.0
    forwards: int = 0


async def fine_tune(client: joynexus.AsyncClient, tenant: Tenant, size: Size) -> list[object]:
    """Train for the given steps; return the loss curve."""
    create = SftPolicy(
        backbone=BACKBONE, head=tenant.head, chunk=tenant.chunk, optimizer=OptimizerSpec(lr=1e-3, warmup_steps=50)
    )
    spec = SftSpec(
        policy=tenant.name, dataset=tenant.dataset, steps=size.steps, batch_size=size.batch_size, create=create
    )
    job = await client.submit(spec)
    await job.wait(progress=False)
    return [job.losses]


async def evaluate(client: joynexus.AsyncClient, tenant: Tenant, size: Size) -> list[object]:
    """Evaluate again and again, on other seeds each time; return all episodes."""
    tables: list[object] = []
    for number in range(size.evaluations):
        spec = EvaluateSpec(
            policy=tenant.name, env=TASKS[tenant.dataset], episodes=size.episodes,
            first_seed=number * size.episodes, episode_limit=150, execute=8,
        )  # fmt: skip
        info = await (await client.submit(spec)).wait(progress=False)
        assert info.evaluation is not None
        tables.append(info.evaluation.results)
    return tables


def measure(data: Path, folder: Path, size: Size, *, together: bool) -> tuple[_report.Row, dict[str, Outcome]]:
    """Do all tenants' work on a cluster of its own; return what it took, and each tenant's outcome."""
    with cluster_in(folder) as cluster:
        outcomes: dict[str, Outcome] = {}
        before: dict[str, float] = {}
        wall = asyncio.run(run(cluster, data, size, outcomes, before, together=together))
        spent = {role: seconds - before.get(role, 0.0) for role, seconds in _roles.cpu_s(cluster).items()}
    row: _report.Row = {
        "tenants": "together" if together else "one after another",
        "wall_s": round(wall, 1),
        "cpu_s": round(sum(spent.values()), 1),
        **{f"{role}_cpu_s": round(spent[role], 1) for role in ("master", "trainer", "inference", "env", "health")},
        "backbone_forwards": sum(outcome.forwards for outcome in outcomes.values()),
    }
    return row, outcomes


async def run(
    cluster: LocalCluster,
    data: Path,
    size: Size,
    outcomes: dict[str, Outcome],
    before: dict[str, float],
    *,
    together: bool,
) -> float:
    """Prepare all tenants, note the CPU time so far, do their work; return the wall time of the work."""
    keyring = Keyring(cluster.keys)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                joynexus.connect_async(keyring.issue(tenant.name, tenant=tenant.name), timeout_s=30)
            )
            for tenant in TENANTS
        ]
        for client, tenant in zip(clients, TENANTS, strict=True):
            await prepare(client, tenant, data)
        before.update(_roles.cpu_s(cluster))
        start = time.monotonic()

        async def work(client: joynexus.AsyncClient, tenant: Tenant) -> None:
            began, forwards = time.monotonic(), await count_forwards(client)
            found = await (fine_tune if tenant.trains else evaluate)(client, tenant, size)
            outcomes[tenant.name] = Outcome(found, time.monotonic() - began, await count_forwards(client) - forwards)

        pairs = list(zip(clients, TENANTS, strict=True))
        if together:
            await asyncio.gather(*(work(client, tenant) for client, tenant in pairs))
        else:
            for client, tenant in pairs:
                await work(client, tenant)
        return time.monotonic() - start


async def prepare(client: joynexus.AsyncClient, tenant: Tenant, data: Path) -> None:
    """Push the tenant's demonstrations; publish an untrained policy if it is to be evaluated."""
    await client.datasets.push(tenant.dataset, data / tenant.dataset, progress=False)
    if not tenant.trains:
        policy = await client.create_policy(
            tenant.name, dataset=tenant.dataset, backbone=BACKBONE, head=tenant.head, chunk=tenant.chunk
        )
        await policy.publish()
        await policy.release()


async def count_forwards(client: joynexus.AsyncClient) -> int:
    """Return the samples of a tenant that went through the backbone so far."""
    return sum(line.backbone_forwards for line in (await client.usage()).lines)


@contextmanager
def cluster_in(folder: Path) -> Iterator[LocalCluster]:
    """Run a cluster with its own caches until the block ends."""
    try:
        yield launch.up(folder, launch.Options(backbone=BACKBONE, simulator_processes=2))
    finally:
        launch.down(folder)


def main(argv: Sequence[str] | None = None) -> int:
    options = _report.arguments("tenants", "Four tenants together, and one after another.", argv)
    warnings.filterwarnings("ignore", module="metaworld")  # its experts ask for more than the arm can do, as always
    size = Size(4, 30, 16, 2, 4) if options.quick else Size(20, 400, 32, 5, 10)
    with tempfile.TemporaryDirectory(prefix="jnx-bench") as name:
        folder = Path(name)
        for dataset, task in TASKS.items():
            write_demonstrations(folder / "data" / dataset, task, size.demonstrations)
        apart, alone = measure(folder / "data", folder / "apart", size, together=False)
        shared, crowd = measure(folder / "data", folder / "shared", size, together=True)
    same = {tenant.name: alone[tenant.name].found == crowd[tenant.name].found for tenant in TENANTS}
    rows = [apart, shared]
    for tenant in TENANTS:
        one, other = alone[tenant.name], crowd[tenant.name]
        rows.append(
            {
                "tenants": tenant.name,
                "wall_s": f"{one.seconds:.1f} alone, {other.seconds:.1f} together",
                "backbone_forwards": f"{one.forwards}, {other.forwards}",
                "same_bits": same[tenant.name],
            }
        )
    _report.write("tenants", options, rows)
    if not all(same.values()):
        print("numbers that the others changed:", ", ".join(name for name, equal in same.items() if not equal))
    return int(not all(same.values()))


if __name__ == "__main__":
    sys.exit(main())
