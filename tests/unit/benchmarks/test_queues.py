"""The queues benchmark measures queues as long as it says, and knows growth that is faster than log n."""

from __future__ import annotations

import pytest

from benchmarks import queues
from benchmarks._report import Row
from benchmarks.fairness import Queue
from joynexus.wire.front import ClusterStatus, Status


def rows(costs: dict[int, float]) -> list[Row]:
    return [{"queue": "training", "event": "e", "queued": length, "p50 ms": cost} for length, cost in costs.items()]


@pytest.mark.parametrize("queue", ["training", "inference"])
def test_the_queue_is_as_long_as_stated_before_and_after(queue: Queue) -> None:
    cluster, clients = queues.filled(queue, 100)
    device = cluster.trainers[0] if queue == "training" else cluster.inference[0]
    for _ in range(2):
        asked = [client.ask(Status()) for client in clients]
        cluster.simulation.run(lambda asked=asked: all(future.done for future in asked))
        statuses: list[ClusterStatus] = [future.value for future in asked]
        lanes = [lane for status in statuses for lane in status.lanes if lane.queue == queue]
        assert sum(lane.waiting + lane.running for lane in lanes) in range(
            60, 101
        )  # those of one group are on their way
        until = len(device.groups) + 5
        cluster.simulation.run(lambda until=until: len(device.groups) >= until)


def test_growth_faster_than_log_n_is_named() -> None:
    (steady,) = queues.fits(rows({100: 0.05, 1000: 0.06, 10_000: 0.07}))
    (growing,) = queues.fits(rows({100: 0.05, 1000: 0.5, 10_000: 5.0}))
    assert steady["no faster"] is True
    assert growing["no faster"] is False
