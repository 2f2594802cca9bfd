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

import math

import msgspec

from benchmarks import _report, _times
from benchmarks._devices import MAX_FORWARD_ROWS
from benchmarks._isolated import Alone, Devices, rl_iteration, sft_step
from benchmarks._many import arrivals
from benchmarks._simulated import Client, Cluster, Reuse, usage
from benchmarks._simulation import Process, Simulation
from benchmarks._tenants import LIBERO, MANISKILL, SFT_BATCH, rl, sft
from benchmarks._times import Times

TRAIN, INFERENCE, ENV = 2, 2, 4
DEVICES = TRAIN + INFERENCE + ENV
ITERATIONS = 8
"""Iterations of the LIBERO tenant in a full run; everything else is sized to take as long."""
EPOCHS = 9
"""Passes of the SFT job over its data set. StarVLA's recipes make more, so fewer features are kept here than there."""

PAPER = {"device_time": -28.3, "train": 1.99, "inference": 1.33}
LATEST = 1.25
_SPREAD = 0.01
"""Environments of the service step with some jitter, whose mean over a job may be so much below the table's time."""

_KEPT: dict[Reuse, str] = {
    "none": "no features kept",
    "datasets": "data sets' features kept",
    "everything": "rollouts' features kept too",
}


class Variant(msgspec.Struct, frozen=True):
    """One way of using the service."""

    reuse: Reuse
    max_staleness: int = 0

    def __str__(self) -> str:
        return _KEPT[self.reuse] + (f", RL {self.max_staleness} version ahead" if self.max_staleness else "")


DEFAULT = Variant("datasets")
"""Features of data sets are kept unless settings say otherwise; RL is synchronous, as in the baselines."""
VARIANTS = (Variant("none"), DEFAULT, Variant("datasets", 1), Variant("everything"), Variant("everything", 1))


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
    return Workload(counts, math.ceil(counts["sft"] * SFT_BATCH / EPOCHS))


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

    def latest(self, base: Outcome) -> float:
        """How late the latest tenant is, against its time in another way of running the jobs."""
        return max(self.completion_s[tenant] / base.completion_s[tenant] for tenant in TENANTS)


def sequential(times: Times, jobs: Workload, *, stages: int = 1, sft_holds_all: bool = True) -> Outcome:
    """One tenant after another, each with all 8 devices (or SFT with the two that it trains on)."""
    whole = Devices(TRAIN, INFERENCE, ENV)
    alone = {tenant: unit(times, tenant, whole, stages=stages) * jobs.iterations[tenant] for tenant in TENANTS}
    last_s = sum(job.seconds for job in alone.values())
    rollouts_s = last_s if sft_holds_all else last_s - alone["sft"].seconds  # for so long the other six are held
    return Outcome(
        TRAIN * last_s + (INFERENCE + ENV) * rollouts_s,
        sum(job.train_s + job.inference_s + job.env_s for job in alone.values()),
        last_s,
        {tenant: job.seconds for tenant, job in alone.items()},
        sum(job.train_s for job in alone.values()) / (TRAIN * last_s),
        sum(job.inference_s for job in alone.values()) / (INFERENCE * rollouts_s),
        sum(job.env_s for job in alone.values()) / (ENV * rollouts_s),
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


def shared(times: Times, jobs: Workload, variant: Variant, tenants: tuple[str, ...] = TENANTS) -> Outcome:
    """All at once through the service, on the same 8 devices."""
    simulation = Simulation()
    cluster = Cluster(
        simulation,
        times,
        trainers=TRAIN,
        inference=INFERENCE,
        envs=ENV,
        reuse=variant.reuse,
        dataset_steps=jobs.dataset_steps,
    )
    clients = {tenant: Client(cluster, tenant) for tenant in tenants}
    ends = {
        tenant: simulation.spawn(process(cluster, client, jobs, variant.max_staleness))
        for tenant, client in clients.items()
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


def bound(times: Times, jobs: Workload, variant: Variant) -> float:
    """Return a time before which no scheduler can end: the busiest role's least work, even over its devices."""
    whole = Devices(1, INFERENCE, ENV)  # a policy trains on one device, so its steps' fixed parts are paid once
    train_s = inference_s = env_s = 0.0
    for tenant, recipe in RECIPES.items():
        iteration, count = unit(times, tenant, whole), jobs.iterations[tenant]
        made_s = math.ceil(recipe.samples / recipe.micro) * times.forward(recipe.micro)
        if variant.reuse == "everything":
            train_s += count * (recipe.samples * times.feature_read_row_s - made_s)
        train_s += count * iteration.train_s
        inference_s += count * recipe.samples * times.forward(MAX_FORWARD_ROWS) / MAX_FORWARD_ROWS
        env_s += count * iteration.env_s * (1 - _SPREAD)
    steps = jobs.iterations["sft"]
    train_s += steps * unit(times, "sft", whole).train_s
    if variant.reuse != "none":
        kept = steps - math.ceil(jobs.dataset_steps / SFT_BATCH)
        train_s -= max(0, kept) * (times.forward(SFT_BATCH) - SFT_BATCH * times.feature_read_row_s)
    return max(train_s / TRAIN, inference_s / INFERENCE, env_s / ENV)


def paper_setting(times: Times, jobs: Workload) -> list[_report.Row]:
    """The tables of the setting: what each way took, and when each tenant was done."""
    base = sequential(times, jobs)
    apart = concurrent(times, jobs)
    service = {variant: shared(times, jobs, variant) for variant in VARIANTS}
    ways = {
        "sequential isolated": base,
        "sequential isolated, rollouts in two stages": sequential(times, jobs, stages=2),
        "sequential isolated, SFT holds 2 devices": sequential(times, jobs, sft_holds_all=False),
        "concurrent isolated, 2 devices each": apart,
        **{f"service, {variant}": outcome for variant, outcome in service.items()},
    }
    rows: list[_report.Row] = [
        {
            "table": "Four tenants, 8 devices",
            "way": way,
            "allocated device-h": round(outcome.allocated_s / 3600, 2),
            "to sequential": f"{_percent(outcome, base):+.1f} %",
            "to concurrent": f"{_percent(outcome, apart):+.1f} %",
            "metered device-h": round(outcome.metered_s / 3600, 2),
            "last ends h": round(outcome.last_s / 3600, 2),
            "train": f"{100 * outcome.train:.1f} %",
            "inference": f"{100 * outcome.inference:.1f} %",
            "env": f"{100 * outcome.env:.1f} %",
        }
        for way, outcome in ways.items()
    ]
    rows += [_verdict(variant, outcome, base, bound(times, jobs, variant)) for variant, outcome in service.items()]
    rows += [{"table": "Groups", "service": str(variant), **outcome.grouped} for variant, outcome in service.items()]
    for variant, outcome in service.items():
        for tenant in TENANTS:
            served_alone = shared(times, jobs, variant, (tenant,)).completion_s[tenant]
            rows.append(
                {
                    "table": f"Completion, {variant}",
                    "tenant": tenant,
                    "together s": round(outcome.completion_s[tenant]),
                    "isolated, all 8 devices s": round(base.completion_s[tenant]),
                    "x isolated": round(outcome.completion_s[tenant] / base.completion_s[tenant], 2),
                    "alone in the service s": round(served_alone),
                    "x alone in the service": round(outcome.completion_s[tenant] / served_alone, 2),
                    "isolated, 2 devices s": round(apart.completion_s[tenant]),
                }
            )
    return rows


def _percent(outcome: Outcome, base: Outcome) -> float:
    return 100 * (outcome.allocated_s / base.allocated_s - 1)


def _verdict(variant: Variant, outcome: Outcome, base: Outcome, least_s: float) -> _report.Row:
    """Hold one way against the paper's figures, and against what is possible at all."""
    train, inference, latest = outcome.train / base.train, outcome.inference / base.inference, outcome.latest(base)
    return {
        "table": "Against the paper: device time -28.3 %, train 1.99x, inference 1.33x; no tenant later than 1.25x",
        "service": str(variant),
        "device time": f"{_percent(outcome, base):+.1f} %",
        "train x": round(train, 2),
        "train x at most": round(1 / base.train, 2),
        "inference x": round(inference, 2),
        "latest x isolated": round(latest, 2),
        "last end x isolated, at best": round(least_s / max(base.completion_s.values()), 2),
        "beaten": "".join(
            "yes " if beaten else "no "
            for beaten in (
                _percent(outcome, base) < PAPER["device_time"],
                train > PAPER["train"],
                inference > PAPER["inference"],
                latest <= LATEST,
            )
        ),
    }


def sensitivity(iterations: int) -> list[_report.Row]:
    """The headline figures when rows of the table are halved or doubled, or the SFT job is."""
    table = _times.load()
    rows = _headline("nothing", table, workload(table, iterations))
    for prefix in ("backbone", "oft", "groot", "libero", "maniskill", "publish", "feature"):
        for factor in (0.5, 2.0):
            times = table.scaled(prefix, factor)
            rows += _headline(f"{prefix}* x {factor}", times, workload(times, iterations))
    for share in (0.25, 0.5, 2.0):
        rows += _headline(f"SFT job x {share}", table, workload(table, iterations, sft_share=share))
    return rows


def _headline(changed: str, times: Times, jobs: Workload) -> list[_report.Row]:
    base = sequential(times, jobs)
    rows: list[_report.Row] = []
    for variant in (DEFAULT, Variant("everything")):
        outcome = shared(times, jobs, variant)
        rows.append(
            {
                "table": "When the table or the jobs are others (shorter jobs)",
                "changed": changed,
                "service": str(variant),
                "device time": f"{_percent(outcome, base):+.1f} %",
                "train x": round(outcome.train / base.train, 2),
                "train x at most": round(1 / base.train, 2),
                "inference x": round(outcome.inference / base.inference, 2),
                "latest x isolated": round(outcome.latest(base), 2),
                "last end x isolated, at best": round(bound(times, jobs, variant) / max(base.completion_s.values()), 2),
            }
        )
    return rows


def main() -> None:
    options = _report.arguments("simulate", "The shipped scheduler under a simulated clock.")
    times = _times.load()
    rows = paper_setting(times, workload(times, 2 if options.quick else ITERATIONS))
    if not options.quick:
        rows += sensitivity(2)
    rows += [arrivals(times, count, seed=0) for count in (10, 100, 1000)]
    _report.write("simulate", options, rows)


if __name__ == "__main__":
    main()
