"""Many tenants that come in bursts: the same core, the same 8 devices, more and more tenants.

In: a number of tenants, a seed. Out: how long each took against being alone, how busy the devices were, and what the
core needed for it in real time. Never: a draw that does not follow from the seed.

Each tenant is a small RL loop: 8 environments on one env device, 10 chunks, then training on the 80 samples. Tenants
come in bursts of 1 to 8; the gaps are drawn so that the offered load is 0.7 of the busiest role.
"""

from __future__ import annotations

import random

import msgspec

from benchmarks import _report
from benchmarks._isolated import Devices, rl_iteration
from benchmarks._simulated import Client, Cluster
from benchmarks._simulation import Process, Simulation
from benchmarks._tenants import LIBERO, MANISKILL, Rl, rl
from benchmarks._times import Times

LOAD = 0.7
_LARGEST_BURST = 8


def recipe(number: int) -> Rl:
    """What the tenant with this number does."""
    like = LIBERO if number % 2 else MANISKILL
    return msgspec.structs.replace(like, envs=8, chunks=10, micro=16, batch=80)


def arrivals(times: Times, count: int, *, seed: int) -> _report.Row:
    """Run so many tenants and describe what became of them."""
    simulation = Simulation()
    cluster = Cluster(simulation, times)
    drawn = random.Random(f"{seed}/{count}")
    alone = [rl_iteration(times, recipe(number), Devices(1, 1, 1)) for number in (0, 1)]
    busiest_s = max(
        sum(job.train_s + times.publish_s for job in alone) / 2 / len(cluster.trainers),
        sum(job.inference_s for job in alone) / 2 / len(cluster.inference),
        sum(job.env_s for job in alone) / 2 / len(cluster.envs),
    )
    clients = [Client(cluster, f"tenant-{number}") for number in range(count)]
    took: dict[int, float] = {}

    def tenant(number: int) -> Process:
        started = simulation.now
        yield simulation.spawn(rl(cluster, clients[number], recipe(number), 1, seed=number, shards=1))
        took[number] = simulation.now - started

    def bursts() -> Process:
        number = 0
        while number < count:
            burst = min(drawn.randint(1, _LARGEST_BURST), count - number)
            for _ in range(burst):
                simulation.spawn(tenant(number))
                number += 1
            yield simulation.sleep(drawn.expovariate(1.0) * burst * busiest_s / LOAD)

    simulation.spawn(bursts())
    simulation.run(lambda: len(took) == count)
    slowdowns = [took[number] / alone[number % 2].seconds for number in range(count)]
    acts = [forward for device in cluster.inference for forward in device.forwards]
    deciding = [seconds for _, seconds in cluster.decisions]
    return {
        "table": "Tenants in bursts",
        "tenants": count,
        "x isolated p50": round(_report.percentile(slowdowns, 0.5), 2),
        "p99": round(_report.percentile(slowdowns, 0.99), 2),
        "train": f"{100 * sum(device.station.busy_s for device in cluster.trainers) / 2 / simulation.now:.0f} %",
        "inference": f"{100 * sum(device.station.busy_s for device in cluster.inference) / 2 / simulation.now:.0f} %",
        "env": f"{100 * sum(device.busy_s for device in cluster.envs) / 4 / simulation.now:.0f} %",
        "rows/forward": round(sum(rows for rows, _ in acts) / len(acts), 1),
        "of several tenants": f"{100 * sum(tenants > 1 for _, tenants in acts) / len(acts):.0f} %",
        "simulated h": round(simulation.now / 3600, 2),
        "events": cluster.handled,
        "core s": round(cluster.handle_s, 2),
        "us/event p50": round(1e6 * _report.percentile(deciding, 0.5), 1),
        "us/event p99": round(1e6 * _report.percentile(deciding, 0.99), 1),
    }
