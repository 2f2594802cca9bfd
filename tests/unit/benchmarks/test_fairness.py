"""A tenant that floods waits in its own lane, on the simulated device; device time follows the weights."""

from __future__ import annotations

import pytest

from benchmarks import fairness
from benchmarks.fairness import Queue


@pytest.mark.parametrize("queue", ["inference", "training"])
def test_a_flood_costs_others_two_groups_at_most(queue: Queue) -> None:
    quiet, _ = fairness.flooded(queue, flood=0, asks=8, cluster=fairness.cluster_of_one())
    noisy, group_s = fairness.flooded(queue, flood=1000, asks=8, cluster=fairness.cluster_of_one())
    assert len(noisy) == 8 * fairness.QUIET
    assert max(noisy) <= max(quiet) + 2 * group_s


@pytest.mark.parametrize("queue", ["inference", "training"])
def test_shares_of_device_time_follow_the_weights(queue: Queue) -> None:
    assert fairness.share_row(queue, 100.0)["within 5 %"]
