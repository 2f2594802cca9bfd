"""Workload simulator: the shipped scheduler under a simulated clock, beside today's way of running the same jobs.

In: `service_times.toml`, recipes of published configurations, seeds. Out: device time, utilisation and every tenant's
completion in the setting of 8 devices (2 train, 2 inference, 4 env), three RL tenants and one SFT tenant; then 10 to
1,000 tenants that arrive in bursts. Never: a number that was fitted to a claim, or a scheduler other than the one that
ships (`MasterCore`, driven by events).

    python -m benchmarks.simulate [--quick]

Time is defined once, for all tables:

- *allocated*: devices held x seconds. The baselines hold theirs alone; the service's count until its last tenant ends.
- *metered*: the share of busy device seconds that the service charged; for a baseline, its busy seconds.
- *utilisation*: busy / allocated, of the devices of one role.

The jobs are of equal length: each takes about the same time alone on all 8 devices. Where the service keeps a feature
it computes less than the baselines: the rows say which features were kept. With `no features kept` the work is the
same, so the difference is sharing alone.
"""

from __future__ import annotations

import msgspec

from benchmarks import _report, _times
from benchmarks._isolated import Alone, Devices, rl_iteration, sft_step
from benchmarks._many import arrivals
from benchmarks._simulated import Client, Cluster, Reuse, usage
from benchmarks._simulation import Process, Simulation
from benchmarks._tenants import LIBERO, MANISKILL, SFT_BATCH, rl, sft
from benchmarks._times import Times

TRAIN, INFERENCE, ENV = 2, 2, 4
DEVICES = TRAIN + INFERENCE + ENV
ITERATIONS = 20
"""Iterations of the LIBERO tenant in a full run; everything else is sized to take as long."""
DATASET_STEPS = 52_970
"""Steps of LIBERO-Spatial without no-ops (432 demonstrations): some 9 epochs in a full run."""

PAPER = {"device_time": -28.3, "train": 1.99, "inference": 1.33}
LATEST = 1.25

KEPT: dict[Reuse, str] = {
    "none": "no features kept",
    "datasets": "features of data sets kept (default)",
    "everything": "features of rollouts kept too",
}


class Workload(msgspec.Struct, frozen=True):
    """The four jobs: how often each does its unit of work."""

    iterations: dict[str, int]
    dataset_steps: int


RECIPES = {"rl-libero": LIBERO, "rl-maniskill-1": MANISKILL, "rl-maniskill-2": MANISKILL}
TENANTS = (*RECIPES, "sft")


def process(cluster: Cluster, client: Client, jobs: Workload, max_staleness: int) -> Process:
    """What a tenant of the setting does."""
    count = jobs.iterations[client.tenant]
    if client.tenant == "sft":
        return sft(cluster, client, count)
    seed = TENANTS.index(client.tenant)
    return rl(cluster, client, RECIPES[client.tenant], count, seed=seed, max_staleness=max_staleness)


def unit(times: Times, tenant: str, devices: Devices, *, stages: int = 1) -> Alone:
    """One unit of a tenant's work (an RL iteration, an SFT step), with these devices to itself."""
    if tenant == "sft":
        return sft_step(times, devices)
    return rl_iteration(times, RECIPES[tenant], devices, stages=stages)


def workload(times: Times, iterations: int, *, sft_share: float = 1.0) -> Workload:
    """Size the jobs: all take as long as so many LIBERO iterations (the SFT job `sft_share` of that)."""
    whole = Devices(TRAIN, INFERENCE, ENV)
    length_s = iterations * unit(times, "rl-libero", whole).seconds
    counts = {tenant: max(1, round(length_s / unit(times, tenant, whole).seconds)) for tenant in TENANTS}
    counts["sft"] = max(1, round(sft_share * counts["sft"]))
    return Workload(counts, max(SFT_BATCH, DATASET_STEPS * iterations // ITERATIONS))


class Outcome(msgspec.Struct, frozen=True):
    """What one way of running the jobs took."""

    allocated_s: float
    metered_s: float
    last_s: float
    completion_s: dict[str, float]
    train: float
    inference: float
    env: float
    grouped: dict[str, object] = {}


def sequential(times: Times, jobs: Workload, *, stages: int = 1) -> Outcome:
    """One tenant after another, each with all 8 devices."""
    whole = Devices(TRAIN, INFERENCE, ENV)
    alone = {tenant: unit(times, tenant, whole, stages=stages) * jobs.iterations[tenant] for tenant in TENANTS}
    last_s = sum(job.seconds for job in alone.values())
    return Outcome(
        DEVICES * last_s,
        sum(job.train_s + job.inference_s + job.env_s for job in alone.values()),
        last_s,
        {tenant: job.seconds for tenant, job in alone.items()},
        sum(job.train_s for job in alone.values()) / (TRAIN * last_s),
        sum(job.inference_s for job in alone.values()) / (INFERENCE * last_s),
        sum(job.env_s for job in alone.values()) / (ENV * last_s),
    )


def concurrent(times: Times, jobs: Workload) -> Outcome:
    """All at once, two devices each: an RL tenant has one for environments and one that acts and trains in turn."""
    held = {tenant: Devices(2, 0, 0) if tenant == "sft" else Devices(1, 1, 1, together=True) for tenant in TENANTS}
    alone = {tenant: unit(times, tenant, devices) * jobs.iterations[tenant] for tenant, devices in held.items()}
    allocated = {tenant: held[tenant].count * job.seconds for tenant, job in alone.items()}
    models = {tenant: (2 if tenant == "sft" else 1) * job.seconds for tenant, job in alone.items()}
    acting = sum(models[tenant] for tenant in TENANTS if tenant != "sft")
    return Outcome(
        sum(allocated.values()),
        sum(job.train_s + job.inference_s + job.env_s for job in alone.values()),
        max(job.seconds for job in alone.values()),
        {tenant: job.seconds for tenant, job in alone.items()},
        sum(job.train_s for job in alone.values()) / sum(models.values()),
        sum(job.inference_s for job in alone.values()) / acting,
        sum(job.env_s for job in alone.values()) / sum(alone[tenant].seconds for tenant in TENANTS if tenant != "sft"),
    )


def shared(
    times: Times, jobs: Workload, reuse: Reuse, *, tenants: tuple[str, ...] = TENANTS, max_staleness: int = 0
) -> Outcome:
    """All at once through the service, on the same 8 devices."""
    simulation = Simulation()
    cluster = Cluster(
        simulation,
        times,
        trainers=TRAIN,
        inference=INFERENCE,
        envs=ENV,
        reuse=reuse,
        dataset_steps=jobs.dataset_steps,
    )
    clients = {tenant: Client(cluster, tenant) for tenant in tenants}
    ends = {
        tenant: simulation.spawn(process(cluster, client, jobs, max_staleness)) for tenant, client in clients.items()
    }
    simulation.run(lambda: all(end.done for end in ends.values()))
    completion = {tenant: end.value for tenant, end in ends.items()}
    last_s = max(completion.values())
    metered = usage(cluster, clients)
    acts = [forward for device in cluster.inference for forward in device.forwards]
    trains = [forward for device in cluster.trainers for forward in device.forwards]
    return Outcome(
        DEVICES * last_s,
        sum(use["trainer_s"] + use["inference_s"] + use["env_s"] for use in metered.values()),
        last_s,
        completion,
        sum(device.station.busy_s for device in cluster.trainers) / (TRAIN * last_s),
        sum(device.station.busy_s for device in cluster.inference) / (INFERENCE * last_s),
        sum(device.busy_s for device in cluster.envs) / (ENV * last_s),
        {
            "act requests": sum(sum(device.requests) for device in cluster.inference),
            "act forwards": len(acts),
            "of several tenants": _share(acts),
            "train forwards": len(trains),
            "of several tenants ": _share(trains),
            "events": cluster.handled,
            "core us/event": round(1e6 * cluster.handle_s / cluster.handled, 1),
        },
    )


def _share(forwards: list[tuple[int, int]]) -> str:
    return f"{100 * sum(tenants > 1 for _, tenants in forwards) / max(1, len(forwards)):.0f} %"


def bound(times: Times, jobs: Workload, reuse: Reuse) -> float:
    """Return a time before which no scheduler can end: the busiest role's work, spread evenly over its devices."""
    whole = Devices(TRAIN, INFERENCE, ENV)
    work = {tenant: unit(times, tenant, whole) * jobs.iterations[tenant] for tenant in TENANTS}
    train_s = sum(job.train_s for job in work.values())
    if reuse != "none":
        kept = jobs.iterations["sft"] * SFT_BATCH - jobs.dataset_steps
        train_s -= max(0, kept) * (times.backbone_row_s - times.feature_read_row_s)
    if reuse == "everything":
        for tenant, recipe in RECIPES.items():
            samples = jobs.iterations[tenant] * recipe.samples
            train_s -= samples * (times.forward(recipe.micro) / recipe.micro - times.feature_read_row_s)
    return max(
        train_s / TRAIN,
        sum(job.inference_s for job in work.values()) / INFERENCE,
        sum(job.env_s for job in work.values()) / ENV,
    )


def paper_setting(times: Times, jobs: Workload) -> list[_report.Row]:
    """The tables of the setting: what each way took, and when each tenant was done."""
    base = sequential(times, jobs)
    ways = {
        "sequential isolated": base,
        "sequential isolated, rollouts in two stages": sequential(times, jobs, stages=2),
        "concurrent isolated, 2 devices each": concurrent(times, jobs),
    }
    service = {KEPT[reuse]: shared(times, jobs, reuse) for reuse in KEPT}
    for reuse in ("datasets", "everything"):
        service[f"{KEPT[reuse]}, RL one version ahead"] = shared(times, jobs, reuse, max_staleness=1)
    ways |= {f"service, {kept}": outcome for kept, outcome in service.items()}
    rows: list[_report.Row] = [
        {
            "table": "Four tenants, 8 devices",
            "way": way,
            "allocated device-h": round(way_.allocated_s / 3600, 2),
            "to sequential": f"{100 * (way_.allocated_s / base.allocated_s - 1):+.1f} %",
            "metered device-h": round(way_.metered_s / 3600, 2),
            "last ends h": round(way_.last_s / 3600, 2),
            "train": f"{100 * way_.train:.1f} %",
            "inference": f"{100 * way_.inference:.1f} %",
            "env": f"{100 * way_.env:.1f} %",
            "train x": round(way_.train / base.train, 2),
            "inference x": round(way_.inference / base.inference, 2),
        }
        for way, way_ in ways.items()
    ]
    rows += [{"table": "Groups", "way": kept, **outcome.grouped} for kept, outcome in service.items()]
    for reuse, kept in KEPT.items():
        outcome = service[kept]
        for tenant in TENANTS:
            served_alone = shared(times, jobs, reuse, tenants=(tenant,)).completion_s[tenant]
            rows.append(
                {
                    "table": f"Completion, {kept}",
                    "tenant": tenant,
                    "together s": round(outcome.completion_s[tenant]),
                    "isolated, all 8 devices s": round(base.completion_s[tenant]),
                    "x isolated": round(outcome.completion_s[tenant] / base.completion_s[tenant], 2),
                    "alone in the service s": round(served_alone),
                    "x alone in the service": round(outcome.completion_s[tenant] / served_alone, 2),
                    "isolated, 2 devices s": round(ways["concurrent isolated, 2 devices each"].completion_s[tenant]),
                }
            )
        least = bound(times, jobs, reuse)
        rows.append(
            {
                "table": f"Completion, {kept}",
                "tenant": "all, at best",
                "together s": round(least),
                "x isolated": round(least / max(base.completion_s.values()), 2),
            }
        )
    return rows


def sensitivity(iterations: int) -> list[_report.Row]:
    """The headline figures when a group of rows of the table is halved or doubled."""
    rows: list[_report.Row] = []
    table = _times.load()
    for prefix in ("", "backbone", "oft", "groot", "libero", "maniskill", "publish", "feature"):
        for factor in (0.5, 2.0) if prefix else (1.0,):
            times = table.scaled(prefix, factor) if prefix else table
            changed = f"{prefix}* x {factor}" if prefix else "nothing"
            rows += _headline(changed, times, workload(times, iterations))
    for share in (0.25, 0.5, 2.0):
        rows += _headline(f"SFT job x {share}", table, workload(table, iterations, sft_share=share))
    return rows


def _headline(changed: str, times: Times, jobs: Workload) -> list[_report.Row]:
    base = sequential(times, jobs)
    rows: list[_report.Row] = []
    for reuse, kept in KEPT.items():
        outcome = shared(times, jobs, reuse)
        latest = max(outcome.completion_s[tenant] / base.completion_s[tenant] for tenant in TENANTS)
        rows.append(
            {
                "table": "When the table or the jobs are others (shorter jobs)",
                "changed": changed,
                "kept": kept,
                "allocated": f"{100 * (outcome.allocated_s / base.allocated_s - 1):+.1f} %",
                "train x": round(outcome.train / base.train, 2),
                "inference x": round(outcome.inference / base.inference, 2),
                "latest x isolated": round(latest, 2),
            }
        )
    return rows


def main() -> None:
    options = _report.arguments("simulate", "The shipped scheduler under a simulated clock.")
    times = _times.load()
    rows = paper_setting(times, workload(times, 2 if options.quick else ITERATIONS))
    if not options.quick:
        rows += sensitivity(4)
    for count in (10, 100, 1000):
        rows.append(arrivals(times, count, seed=0))
    _report.write("simulate", options, rows)
    print(
        f"\nThe paper's figures: device time {PAPER['device_time']} %, utilisation train {PAPER['train']}x, "
        f"inference {PAPER['inference']}x; aim: all three, and no tenant later than {LATEST}x."
    )


if __name__ == "__main__":
    main()
