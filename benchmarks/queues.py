"""Long queues: what a decision costs with 10,000 pieces queued, and how fast a heartbeat comes back with 2,048 waiting.

In: the master core in process, its queues filled by simulated tenants; then a real master with 2,048 connections that
each wait for an answer. Out: CPU time of each event that decides, against the length of the queue; round trips of a
tenant's ping and a worker's beat. Never: an empty queue where a full one is stated.

    python -m benchmarks.queues [--quick]

Targets: a decision takes at most 1 ms at 10,000 queued pieces and grows no faster than log n; heartbeats have a p50 of
at most 2 ms with 2,048 waiting clients. (A `predict_done` answers up to 32 requests.)
"""

from __future__ import annotations

import functools
import gc
import math
from collections import defaultdict
from collections.abc import Callable

import msgspec

from benchmarks import _report, _times
from benchmarks._simulated import FORMS_A_GROUP, Client, Cluster
from benchmarks._simulation import Future, Simulation
from benchmarks._tenants import Loop, act_request
from benchmarks._waiting import heartbeats
from benchmarks.fairness import CONFIGURATION, Queue, begin

DECISION_MS = 1.0
BEAT_MS = 2.0
AT = 10_000
_GROUPS = 150
_TENANTS = 1000
_KINDS = {
    "training": (FORMS_A_GROUP, "optim_step", "train_done"),
    "inference": (FORMS_A_GROUP, "act", "predict_done"),
}
"""What decides: a group is formed (of up to 16 ops or 32 requests), work arrives, work was done."""


def filled(queue: Queue, length: int) -> tuple[Cluster, list[Client]]:
    """Return a cluster in which so many pieces wait, and go on waiting: whoever is answered asks again.

    Also returned is a connection of each tenant.
    """
    config = msgspec.structs.replace(
        CONFIGURATION, max_waiting_acts=2 * length, max_inflight_ops=2 * length, uncheckpointed_ops=10 * length
    )
    cluster = Cluster(Simulation(), _times.load(), trainers=1, inference=1, envs=1, config=config)
    names = [f"tenant-{number}" for number in range(max(1, min(_TENANTS, length // 10)))]
    loops = [cluster.simulation.spawn(begin(cluster, Client(cluster, name))) for name in names]
    cluster.simulation.run(lambda: all(loop.done for loop in loops))

    def again(ask: Callable[[], Future]) -> None:
        ask().then(lambda _: again(ask))

    for number in range(length):
        loop: Loop = loops[number % len(loops)].value
        if queue == "training":
            again(loop.optim_step)
        else:  # a connection each: a session
            again(functools.partial(Client(cluster, loop.client.tenant).ask, *act_request(1)))
    arrived = cluster.simulation.now + 1.0
    cluster.simulation.run(lambda: cluster.simulation.now > arrived)
    return cluster, [loop.value.client for loop in loops]


def decisions(queue: Queue, length: int) -> list[_report.Row]:
    """Time the events that decide while so many pieces wait."""
    cluster, _ = filled(queue, length)
    device = cluster.trainers[0] if queue == "training" else cluster.inference[0]
    gc.collect()
    gc.freeze()  # as the master's shell does
    cluster.decisions.clear()
    until = len(device.groups) + _GROUPS
    cluster.simulation.run(lambda: len(device.groups) >= until)
    gc.unfreeze()
    took: defaultdict[str, list[float]] = defaultdict(list)
    for kind, seconds in cluster.decisions:
        took[kind].append(1000 * seconds)
    return [
        {
            "table": "A decision in the core",
            "queue": queue,
            "event": kind,
            "queued": length,
            "p50 ms": round(_report.percentile(took[kind], 0.5), 4),
            "p99 ms": round(_report.percentile(took[kind], 0.99), 3),
            "events": len(took[kind]),
            "p99 at most 1 ms": _report.percentile(took[kind], 0.99) <= DECISION_MS if length == AT else "",
        }
        for kind in _KINDS[queue]
    ]


def fits(rows: list[_report.Row]) -> list[_report.Row]:
    """Fit p50 = a + b ln(n) by least squares, and compare the growth over all lengths with that of log n."""
    by_event: defaultdict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        by_event[str(row["queue"]), str(row["event"])].append((int(str(row["queued"])), float(str(row["p50 ms"]))))
    found: list[_report.Row] = []
    for (queue, event), points in by_event.items():
        xs, ys = [math.log(length) for length, _ in points], [cost for _, cost in points]
        mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum(
            (x - mean_x) ** 2 for x in xs
        )
        grown, allowed = ys[-1] / ys[0], xs[-1] / xs[0]
        found.append(
            {
                "table": "Growth with the length of the queue",
                "queue": queue,
                "event": event,
                "fit, us": f"{1000 * (mean_y - slope * mean_x):.1f} + {1000 * slope:.2f} ln n",
                "grown": round(grown, 2),
                "log n grows": round(allowed, 2),
                "no faster": grown <= allowed,
            }
        )
    return found


def main() -> None:
    options = _report.arguments("queues", "Decisions and heartbeats while queues are long.")
    gc.set_threshold(20_000, 20, 50)  # as in the master's shell
    lengths = (100, 1000, 10_000) if options.quick else (100, 1000, 10_000, 100_000)
    queues: tuple[Queue, ...] = ("training", "inference")
    rows = [row for queue in queues for length in lengths for row in decisions(queue, length)]
    rows += fits(rows)
    for waiting in (0, 2048):
        rows += heartbeats(waiting, seconds=5.0 if options.quick else 20.0, target_ms=BEAT_MS)
    _report.write("queues", options, rows)


if __name__ == "__main__":
    main()
