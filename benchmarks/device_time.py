"""Device time of four tenants on devices that wait: real roles over real sockets, sharing or each alone.

In: `service_times.toml`, recipes of published configurations, a pace. Out: device time, utilisation of trainers and
inference, wall time of each tenant, backbone forwards for each observation: together, one after another, and isolated
at the same time; each with features kept and without. Never: a figure of a scheduler, protocol, engine or store that
does not ship, or of jobs that differ between two ways.

    python -m benchmarks.device_time [--quick] [--runs N] [--pace P]

The master, the trainers, inference and env services are those that ship; jobs are submitted by clients. A device takes
for each piece of work what the table says, divided by the pace; small models do the real work behind that wait. `late`
is by how much the real work took longer than the table allows, of the time that devices were held.

Time is defined as in `benchmarks.simulate`, and given in the table's seconds:

- *allocated*: devices held x seconds. Whoever is alone holds them until its job ends; the service until its last does.
- *metered*: the share of busy device seconds that the service charged.
- *utilisation*: busy / allocated, of the devices of one role.

Processes start all through a run, so nobody may change the sources meanwhile.

Alone, a tenant's trainer divides every batch over all training devices that it holds, as frameworks do; in the service
a policy trains on one. A tenant with two devices of its own acts and trains on one of them in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Literal

import msgspec

import joynexus
from benchmarks import _report, _times
from benchmarks._isolated import Devices
from benchmarks._waiting_cluster import Holds, WaitingCluster, running
from benchmarks._waiting_jobs import DATASET, TENANTS, Jobs, make_jobs, observations, spec_of, write_dataset
from joynexus.client._jobs import AT_REST
from joynexus.specs import JobSpec, SftSpec

TRAIN, INFERENCE, ENV = 2, 2, 4
WHOLE = Devices(TRAIN, INFERENCE, ENV)
PAPER = {"device time": -28.3, "trainers": 1.99, "inference": 1.33}
AIM = -50.0
_LOOK_S = 0.05

Sharing = Literal["together", "one after another", "isolated"]


class Way(msgspec.Struct, frozen=True):
    """One way of running the jobs."""

    sharing: Sharing
    reuse: bool

    def __str__(self) -> str:
        return f"{self.sharing}, {'features kept' if self.reuse else 'nothing kept'}"


WAYS = tuple(
    Way(sharing, reuse) for reuse in (False, True) for sharing in ("one after another", "isolated", "together")
)
BASE = Way("one after another", reuse=False)
"""Today's way: everything for one tenant at a time, the frozen backbone forwarded whenever a batch comes."""


class Done(msgspec.Struct, frozen=True):
    """What a tenant's job took, in the table's seconds."""

    seconds: float
    train_s: float
    inference_s: float
    env_s: float
    forwards: int
    observations: int


class Outcome(msgspec.Struct, frozen=True):
    """What one way took, in the table's seconds; devices held x seconds, of all and by role."""

    tenants: dict[str, Done]
    allocated_s: float
    train_held_s: float
    inference_held_s: float
    late: float
    cpu_s: float
    real_s: float

    @property
    def metered_s(self) -> float:
        """Busy device seconds of all tenants."""
        return sum(done.train_s + done.inference_s + done.env_s for done in self.tenants.values())

    @property
    def trainers(self) -> float:
        """Utilisation of the devices that train."""
        return sum(done.train_s for done in self.tenants.values()) / self.train_held_s

    @property
    def inference(self) -> float:
        """Utilisation of the devices that act."""
        return sum(done.inference_s for done in self.tenants.values()) / self.inference_held_s

    @property
    def forwards(self) -> float:
        """Backbone forwards for each observation."""
        seen = sum(done.observations for done in self.tenants.values())
        return sum(done.forwards for done in self.tenants.values()) / max(1, seen)


def holds_of(way: Way, tenant: str = "") -> Holds:
    """Return what a cluster holds: the service's (no tenant), or a tenant's own."""
    if way.sharing == "together":
        return Holds(trainers=TRAIN, inference=INFERENCE, envs=ENV, reuse=way.reuse)
    if way.sharing == "one after another":
        return Holds(parallel=TRAIN, inference=INFERENCE, envs=ENV, reuse=way.reuse)
    if tenant == "sft":
        return Holds(parallel=2, reuse=way.reuse)  # its env service prepares data, on no device
    return Holds(inference=1, reuse=way.reuse)


def allocated(way: Way, done: dict[str, Done]) -> tuple[float, float, float]:
    """Return device seconds held: of all devices, of those that train, and of those that act."""
    seconds = {tenant: each.seconds for tenant, each in done.items()}
    if way.sharing == "isolated":  # two devices each; RL acts and trains on the same one
        acting = sum(taken for tenant, taken in seconds.items() if tenant != "sft")
        return 2 * sum(seconds.values()), acting + 2 * seconds.get("sft", 0.0), acting
    held_s = max(seconds.values()) if way.sharing == "together" else sum(seconds.values())
    return WHOLE.count * held_s, TRAIN * held_s, INFERENCE * held_s


def measure(way: Way, jobs: Jobs, data: Path, pace: float) -> Outcome:
    """Run all jobs in one way."""
    began = time.monotonic()
    clusters: list[WaitingCluster] = []
    done: dict[str, Done] = {}
    if way.sharing == "one after another":
        for tenant in TENANTS:
            with running(holds_of(way, tenant), pace, jobs.micro) as cluster:
                done |= asyncio.run(_do_all({tenant: cluster}, jobs, data, pace))
            clusters.append(cluster)
    else:
        with ExitStack() as stack:
            shared = way.sharing == "together"
            names = [""] if shared else list(TENANTS)
            clusters = [stack.enter_context(running(holds_of(way, name), pace, jobs.micro)) for name in names]
            places = {tenant: clusters[0 if shared else number] for number, tenant in enumerate(TENANTS)}
            done = asyncio.run(_do_all(places, jobs, data, pace))
    real_s = time.monotonic() - began
    cpu_s = sum(cluster.cpu_s for cluster in clusters)
    late = sum(cluster.late_s for cluster in clusters) / sum(cluster.held_s for cluster in clusters)
    return Outcome(done, *allocated(way, done), late, cpu_s, real_s)


async def _do_all(places: dict[str, WaitingCluster], jobs: Jobs, data: Path, pace: float) -> dict[str, Done]:
    """Do the jobs of some tenants at once, each through its own client."""
    async with AsyncExitStack() as stack:
        clients: dict[str, joynexus.AsyncClient] = {}
        for tenant, cluster in places.items():
            opened = joynexus.connect_async(cluster.key(tenant), timeout_s=60)
            clients[tenant] = await stack.enter_async_context(opened)
        if "sft" in clients:
            await clients["sft"].datasets.push(DATASET, data, progress=False)
        work = [_do(client, jobs, spec_of(jobs, tenant), pace) for tenant, client in clients.items()]
        return dict(zip(clients, await asyncio.gather(*work), strict=True))


async def _do(client: joynexus.AsyncClient, jobs: Jobs, spec: JobSpec, pace: float) -> Done:
    before = [line.env_s for line in (await client.usage()).lines]  # of preparing the data set
    began = time.monotonic()
    job = await client.submit(spec)
    while (info := await job.info()).state not in AT_REST:
        await asyncio.sleep(_LOOK_S)
    seconds = time.monotonic() - began
    assert info.state == "succeeded", info
    lines = (await client.usage()).lines
    env_s = 0.0 if isinstance(spec, SftSpec) else sum(line.env_s for line in lines) - sum(before)
    return Done(
        pace * seconds,
        pace * sum(line.trainer_s for line in lines),
        pace * sum(line.inference_s for line in lines),
        pace * env_s,
        sum(line.backbone_forwards for line in lines),
        observations(jobs, info),
    )


def tables(jobs: Jobs, runs: dict[Way, list[Outcome]]) -> list[_report.Row]:
    """Return what each way took, what that is against the paper, each tenant's time, and the roles' overhead."""
    rows: list[_report.Row] = []
    for way, outcomes in runs.items():
        rows.append(
            {
                "table": f"Four tenants, {WHOLE.count} devices",
                "way": str(way),
                "allocated device-h": _report.spread([each.allocated_s / 3600 for each in outcomes]),
                "metered device-h": _report.spread([each.metered_s / 3600 for each in outcomes]),
                "trainers %": _report.spread([100 * each.trainers for each in outcomes], 1),
                "inference %": _report.spread([100 * each.inference for each in outcomes], 1),
                "forwards/observation": _report.spread([each.forwards for each in outcomes]),
            }
        )
    for way, outcomes in runs.items():
        if way.sharing == "together":
            bases = [base for base in runs if base.sharing != "together" and base.reuse <= way.reuse]
            rows += [_against(way, outcomes, base, runs[base]) for base in bases]
    for tenant in TENANTS:
        row: _report.Row = {"table": "Each tenant's time, h", "tenant": tenant}
        for way, outcomes in runs.items():
            row[str(way)] = _report.spread([each.tenants[tenant].seconds / 3600 for each in outcomes])
        rows.append(row)
    times = _times.load()
    for way, outcomes in runs.items():
        row = {
            "table": "Overhead of the roles on these cores",
            "way": str(way),
            "late %": _report.spread([100 * each.late for each in outcomes], 2),
            "CPU s": _report.spread([each.cpu_s for each in outcomes], 1),
            "real s": _report.spread([each.real_s for each in outcomes], 1),
        }
        if way == BASE:
            least_s = sum(jobs.alone(times, tenant, WHOLE).seconds for tenant in TENANTS)
            took = [sum(done.seconds for done in each.tenants.values()) / least_s for each in outcomes]
            row["x time of the table alone, in lock-step"] = _report.spread(took)
        rows.append(row)
    return rows


def _against(way: Way, outcomes: Sequence[Outcome], base: Way, of_base: Sequence[Outcome]) -> _report.Row:
    """Compare two ways, run by run."""
    pairs = list(zip(outcomes, of_base, strict=True))
    device_time = [100 * (each.allocated_s / other.allocated_s - 1) for each, other in pairs]
    metered = [100 * (each.metered_s / other.metered_s - 1) for each, other in pairs]
    trainers = [each.trainers / other.trainers for each, other in pairs]
    inference = [each.inference / other.inference for each, other in pairs]
    latest = [
        max(each.tenants[tenant].seconds / other.tenants[tenant].seconds for tenant in TENANTS) for each, other in pairs
    ]
    return {
        "table": f"Against the paper: device time {PAPER['device time']} % (aim {AIM:.0f} %), trainers "
        f"{PAPER['trainers']}x, inference {PAPER['inference']}x",
        "way": str(way),
        "against": str(base),
        "device time %": _report.spread(device_time, 1),
        "metered %": _report.spread(metered, 1),
        "trainers x": _report.spread(trainers, 2),
        "inference x": _report.spread(inference, 2),
        "latest tenant x": _report.spread(latest, 2),
    }


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=0, help="how often each way is run (3; quick: 1)")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds of the table in a real one (6; quick: 24)")


def main(argv: Sequence[str] | None = None) -> int:
    options = _report.arguments("device_time", "Four tenants on devices that wait, by real roles.", argv, _more)
    quick = options.quick
    runs, pace = options.runs or (1 if quick else 3), options.pace or (24.0 if quick else 6.0)
    times = _times.load()
    jobs = make_jobs(times, WHOLE, updates=1 if quick else 2, rollout_epochs=1)
    ways = [BASE, Way("together", reuse=True)] if quick else list(WAYS)
    flags = f" --runs {runs} --pace {pace:g}"
    size: _report.Row = {"table": "Size", "pace": pace, **jobs.counts, "data set": jobs.dataset_steps}
    found: defaultdict[Way, list[Outcome]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="jnx-bench") as folder:
        data = Path(folder) / "data"
        write_dataset(data, jobs.dataset_steps)
        for _ in range(runs):
            for way in ways:
                found[way].append(measure(way, jobs, data, pace))
                outcome = found[way][-1]
                print(f"{way}: {outcome.allocated_s / 3600:.2f} device-h in {outcome.real_s:.0f} s", file=sys.stderr)
            _report.write("device_time", options, [size, *tables(jobs, found)], flags=flags)  # a later run may fail
    return 0


if __name__ == "__main__":
    sys.exit(main())
