"""Fairness: one tenant floods with 10,000 requests; what the others notice, and who gets how much of the devices.

In: the shipped master core with a simulated device, both queues (`--real`: a real backbone does the inference, and its
measured seconds pass on the simulated clock). Out: the others' p99 with and without the flood, in group times; shares
of device time against weights. Never: a quiet tenant that asks less because of the flood.

    python -m benchmarks.fairness [--quick] [--real]

Claims: the others' p99 stays within their p99 without the flood plus two group times (the group that is running, and
the one that they are in); shares of tenants with weights 1, 2 and 4 are within 5 % of them while all have work.
"""

from __future__ import annotations

import argparse
import functools
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from benchmarks import _report, _times
from benchmarks._simulated import BACKBONE, CONFIG, CONTRACT, Client, Cluster, usage
from benchmarks._simulation import Future, Process, Simulation, gather
from benchmarks._tenants import POLICY, Loop, act_request
from joynexus.specs import PolicySpec
from joynexus.tenants import TenantLimits
from joynexus.wire.front import AcquireLease, CreatePolicy, Lease
from services.master.config import CoreConfig
from services.master.events import LimitsChanged

Queue = Literal["inference", "training"]
Observe = Callable[[int], tuple[Any, ...]]

FLOOD = 10_000
QUIET = 7
WEIGHTS = {"one": 1.0, "two": 2.0, "four": 4.0}
_OUTSTANDING = 48
_ROWS = {"flood": 1, "quiet": 4, "train": 16}

DEFAULTS = CoreConfig()
CONFIGURATION = msgspec.structs.replace(
    CONFIG,
    batch_rows=DEFAULTS.batch_rows,
    max_rows=DEFAULTS.max_rows,
    max_waiting_acts=2 * FLOOD,  # the flood waits in the service, not in its client
    max_inflight_ops=2 * FLOOD,
    uncheckpointed_ops=4 * FLOOD,
    act_deadline_s=3600.0,
)


def cluster_of_one(config: CoreConfig = CONFIGURATION) -> Cluster:
    """One device of each kind, so that everybody wants the same one."""
    return Cluster(Simulation(), _times.load(), trainers=1, inference=1, envs=1, config=config)


def begin(cluster: Cluster, client: Client) -> Process:
    """Create a policy and publish a version; the process returns the loop that drives it."""
    spec = PolicySpec(backbone=BACKBONE, chunk=8, contract=CONTRACT, normalization="none")
    yield client.ask(CreatePolicy(policy=POLICY, spec=spec))
    lease: Lease = yield client.ask(AcquireLease(policy=POLICY, holder="loop", ttl_ms=3_600_000))
    loop = Loop(client, lease.lease)
    yield loop.publish()
    return loop


def everybody(cluster: Cluster, names: Sequence[str]) -> dict[str, Loop]:
    """Have tenants with a policy each, ready to act and to train."""
    clients = {name: Client(cluster, name) for name in names}
    loops = {name: cluster.simulation.spawn(begin(cluster, client)) for name, client in clients.items()}
    cluster.simulation.run(lambda: all(loop.done for loop in loops.values()))
    return {name: loop.value for name, loop in loops.items()}


def step(loop: Loop) -> Future:
    """Send one training step."""
    return gather([loop.forward_backward(_ROWS["train"]), loop.optim_step()])


def flooded(
    queue: Queue, *, flood: int, asks: int, cluster: Cluster, observe: Observe = act_request
) -> tuple[list[float], float]:
    """Measure the quiet tenants' latencies while another one floods; and the longest group.

    Args:
        observe: makes a request to act on so many rows.
    """
    simulation = cluster.simulation
    loops = everybody(cluster, ["flood", *(f"quiet-{number}" for number in range(QUIET))])
    latencies: list[float] = []
    began = simulation.now

    def quiet(loop: Loop) -> Process:
        drawn = random.Random(loop.client.tenant)
        for _ in range(asks):
            yield simulation.sleep(drawn.uniform(0.5, 1.5))
            asked = simulation.now
            yield loop.client.ask(*observe(_ROWS["quiet"])) if queue == "inference" else step(loop)
            latencies.append(simulation.now - asked)

    for _ in range(flood):
        if queue == "inference":
            loops["flood"].client.ask(*observe(_ROWS["flood"]))
        else:
            loops["flood"].forward_backward(_ROWS["train"])
    done = [simulation.spawn(quiet(loop)) for name, loop in loops.items() if name != "flood"]
    simulation.run(lambda: all(tenant.done for tenant in done))
    groups = cluster.inference[0].groups if queue == "inference" else cluster.trainers[0].groups
    return latencies, max(seconds for started, seconds in groups if started >= began)


def flood_row(
    queue: Queue, asks: int, make: Callable[[], Cluster], device: str, observe: Observe = act_request
) -> _report.Row:
    """Compare with and without the flood."""
    quiet, _ = flooded(queue, flood=0, asks=asks, cluster=make(), observe=observe)
    cluster = make()
    noisy, group_s = flooded(queue, flood=FLOOD, asks=asks, cluster=cluster, observe=observe)
    without, with_flood = _report.percentile(quiet, 0.99), _report.percentile(noisy, 0.99)
    return {
        "table": f"A flood of {FLOOD:,} requests, {QUIET} quiet tenants",
        "queue": queue,
        "device": device,
        "rows cap": cluster.config.max_rows if queue == "inference" else "-",
        "p50 without ms": round(1000 * _report.percentile(quiet, 0.5), 1),
        "p50 with ms": round(1000 * _report.percentile(noisy, 0.5), 1),
        "p99 without ms": round(1000 * without, 1),
        "p99 with ms": round(1000 * with_flood, 1),
        "longest group ms": round(1000 * group_s, 1),
        "groups added": round((with_flood - without) / group_s, 2),
        "at most two": with_flood <= without + 2 * group_s,
        "requests": len(noisy),
    }


def share_row(queue: Queue, seconds: float) -> _report.Row:
    """Have tenants with weights 1, 2 and 4 ask without a pause, and compare what they got."""
    cluster = cluster_of_one()
    simulation = cluster.simulation
    limits = {tenant: TenantLimits(weight=weight) for tenant, weight in WEIGHTS.items()}
    cluster.handle(LimitsChanged(limits=limits))
    loops = everybody(cluster, list(WEIGHTS))
    clients = {name: loop.client for name, loop in loops.items()}
    before = usage(cluster, clients)
    stopped = False

    def greedy(loop: Loop) -> Process:
        waiting: deque[Future] = deque()
        while not stopped:
            waiting.append(loop.client.ask(*act_request(_ROWS["quiet"])) if queue == "inference" else step(loop))
            if len(waiting) >= _OUTSTANDING:
                yield waiting.popleft()

    for loop in loops.values():
        simulation.spawn(greedy(loop))
    end = simulation.now + seconds
    simulation.run(lambda: simulation.now >= end)
    stopped = True
    after = usage(cluster, clients)
    field = "inference_s" if queue == "inference" else "trainer_s"
    used = {tenant: after[tenant][field] - before[tenant][field] for tenant in WEIGHTS}
    whole, weights = sum(used.values()), sum(WEIGHTS.values())
    error = max(abs(used[tenant] / whole / (weight / weights) - 1) for tenant, weight in WEIGHTS.items())
    return {
        "table": "Shares of device time by weight",
        "queue": queue,
        **{f"weight {weight:g}": f"{100 * used[tenant] / whole:.1f} %" for tenant, weight in WEIGHTS.items()},
        "largest error": f"{100 * error:.1f} %",
        "within 5 %": error <= 0.05,
        "device s": round(whole, 1),
    }


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--real", action="store_true", help="also with a real backbone (needs the trainer's packages)")


def main() -> None:
    options = _report.arguments("fairness", "What a flood does to others, and shares by weight.", more=_more)
    asks, seconds = (40, 100.0) if options.quick else (200, 1000.0)
    rows = [flood_row(queue, asks, cluster_of_one, "simulated") for queue in ("inference", "training")]
    if options.real:
        from benchmarks._real_device import real_cluster, real_request  # torch only where it was asked for

        for cap in (32, 8):
            make = functools.partial(real_cluster, cap, CONFIGURATION)
            rows.append(flood_row("inference", asks // 4, make, "real backbone (lite, CPU)", real_request))
    rows += [share_row(queue, seconds) for queue in ("inference", "training")]
    _report.write("fairness", options, rows)


if __name__ == "__main__":
    main()
