"""A trainer on two devices loses one: it ends with a reason, is started anew with both, and no number changes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.chaos.cluster import chaotic
from tests.chaos.jobs import DATASET, numbers, push, sft
from tests.chaos.verdict import Verdict
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(500)]

STEPS = 30


@pytest.mark.case(38, "one of a trainer's devices is lost in a job")
def test_run_goes_on_bit_for_bit_with_all_devices_after_one_was_lost(tmp_path: Path, verdict: Verdict) -> None:
    with chaotic(tmp_path, JOYNEXUS_DEVICES="cpu,cpu") as cluster:
        push(cluster.client, tmp_path / DATASET)
        undisturbed = numbers(cluster.client, sft(cluster.client, "undisturbed", STEPS), "undisturbed", STEPS)
        trainer = cluster.pid("trainer")
        (follower,) = children(trainer)
        job = sft(cluster.client, "disturbed", STEPS)
        until(lambda: job.info().done >= 5)
        os.kill(follower, signal.SIGKILL)
        with verdict("I3"):
            found = numbers(cluster.client, job, "disturbed", STEPS)
        with verdict("I1"):
            assert found == undisturbed
        with verdict("I6"):
            until(lambda: cluster.health_of("trainer").restarts > 0)
            assert "follower_lost" in cluster.health_of("trainer").reason
        with verdict("I4"):
            until(cluster.idle)
            assert len(children(cluster.pid("trainer"))) == 1, "it has all its devices again"
        another = sft(cluster.client, "another", STEPS)
        assert numbers(cluster.client, another, "another", STEPS) == undisturbed
        # Who is killed takes its followers with it.
        (follower,) = children(cluster.pid("trainer"))
        os.kill(cluster.pid("trainer"), signal.SIGKILL)
        until(lambda: not Path(f"/proc/{follower}").exists())


def children(pid: int) -> list[int]:
    """Processes that a process has started and that live."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
