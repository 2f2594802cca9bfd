"""A role dies, stops, or finds its disk full at a named place of its work, in a whole cluster: no number changes.

One cluster serves all cases here; each has a policy of its own, of the same spec and seed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from _pytest.mark import ParameterSet

from joynexus.keys import ClusterFile
from tests.chaos.cluster import BACKBONE, Cluster, chaotic
from tests.chaos.jobs import DATASET, Numbers, numbers, push, sft
from tests.chaos.proxy import Proxy
from tests.chaos.verdict import Verdict
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # on a busy host a cluster starts in minutes

STEPS = 30


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with chaotic(folder, JOYNEXUS_BEAT_MS="300", JOYNEXUS_SILENT_S="4") as cluster:
        push(cluster.client, folder / DATASET)
        yield cluster


@pytest.fixture(autouse=True)
def disarmed(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.points.disarm()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> Numbers:
    """What a job leaves that nothing happened to."""
    return numbers(cluster.client, sft(cluster.client, "undisturbed", STEPS), "undisturbed", STEPS)


def disturbed(cluster: Cluster, policy: str, name: str, fault: str) -> Numbers:
    """What a job leaves to which this happened."""
    cluster.points.arm(name, fault)
    found = numbers(cluster.client, sft(cluster.client, policy, STEPS), policy, STEPS)
    assert cluster.points.struck(name), f"nobody came by at {name}"
    return found


def at(number: int, name: str, time: int, *more: pytest.MarkDecorator) -> ParameterSet:
    """A kill of whoever comes by at a place for the n-th time since the job was submitted."""
    role = name.partition(".")[0]
    return pytest.param(name, time, marks=[pytest.mark.case(number, f"the {role} is killed in a job"), *more], id=name)


KILLS = [
    at(1, "master.append", 12, pytest.mark.thorough),
    at(2, "trainer.forward_backward", 5, pytest.mark.thorough),
    at(3, "inference.load_version", 1),
    at(2, "trainer.write_checkpoint", 2),
    at(1, "master.after_fsync_before_ack", 12),
    at(2, "trainer.optim_step", 15, pytest.mark.thorough),
    at(2, "trainer.before_answer", 8, pytest.mark.thorough),
]


@pytest.mark.parametrize(("name", "time"), KILLS)
def test_job_whose_role_is_killed_anywhere_leaves_the_same_numbers(
    cluster: Cluster, undisturbed: Numbers, verdict: Verdict, name: str, time: int
) -> None:
    role = name.partition(".")[0]
    before = cluster.health_of(role).restarts
    with verdict("I3"):
        found = disturbed(cluster, f"killed-{name.replace('.', '-')}", name, f"{time}*kill")
    with verdict("I1"):
        assert found == undisturbed
    with verdict("I4"):
        until(cluster.idle)
    with verdict("I6"):
        until(lambda: cluster.health_of(role).restarts > before)
        assert "SIGKILL" in cluster.health_of(role).reason


@pytest.mark.case(17, "the disk is full, or breaks, as a checkpoint is written")
@pytest.mark.parametrize("fault", ["enospc", "eio"])
def test_checkpoint_that_cannot_be_written_leaves_the_one_before_and_no_step_is_lost(
    cluster: Cluster, undisturbed: Numbers, verdict: Verdict, fault: str
) -> None:
    before = cluster.pid("trainer")
    with verdict("I3"):
        found = disturbed(cluster, f"checkpoint-{fault}", "trainer.write_checkpoint", fault)
    with verdict("I1"):
        assert found == undisturbed
    with verdict("I5"):
        assert cluster.local.running("trainer") == before
    with verdict("I6"):
        assert "checkpoint_failed" in cluster.log("master")


@pytest.mark.case(3, "a disk that breaks as inference loads a version")
def test_version_that_could_not_be_read_once_is_loaded_when_it_can_be(
    cluster: Cluster, undisturbed: Numbers, verdict: Verdict
) -> None:
    with verdict("I1"):
        assert disturbed(cluster, "unread", "inference.load_version", "eio") == undisturbed
    with verdict("I6"):
        assert "weights_refused" in cluster.log("master")


@pytest.mark.case(1, "the master is killed between an op's result and its reply")
def test_result_whose_reply_was_lost_with_the_master_is_told_again(cluster: Cluster, verdict: Verdict) -> None:
    def loop(policy: str) -> list[float]:
        losses = []
        with cluster.client.create_policy(policy, dataset=DATASET, backbone=BACKBONE, chunk=4, seed=5) as driven:
            for first in range(0, 32, 8):
                loss = driven.forward_backward(dataset=DATASET, indices=range(first, first + 8))
                step = driven.optim_step()
                losses.append(loss.result(120).metrics["loss"])
                assert step.result(120).metrics["step"] == len(losses)
        return losses

    calm = loop("calm")
    cluster.points.arm("master.applied_before_reply", "3*kill")
    with verdict("I3"):
        found = loop("unanswered")
    with verdict("I1"):
        assert cluster.points.struck("master.applied_before_reply")
        assert found == calm


@pytest.mark.case(1, "the master is killed as it takes an upload")
def test_push_goes_on_where_it_was_when_the_master_died(cluster: Cluster, verdict: Verdict, tmp_path: Path) -> None:
    cluster.points.arm("master.serve_blob", "3*kill")
    with verdict("I1"), verdict("I3"):
        push(cluster.client, tmp_path / "other", seed=1)
    assert cluster.points.struck("master.serve_blob")


@pytest.mark.case(6, "a trainer is stopped until it is taken for dead, then goes on")
def test_late_results_of_a_trainer_that_was_taken_for_dead_change_nothing(
    cluster: Cluster, undisturbed: Numbers, verdict: Verdict
) -> None:
    pid = cluster.pid("trainer")
    lost = cluster.log("master").count("worker_lost")
    cluster.points.arm("trainer.before_answer", "5*delay:1")
    job = sft(cluster.client, "stopped", STEPS)
    until(lambda: cluster.points.struck("trainer.before_answer"))
    os.kill(pid, signal.SIGSTOP)
    try:
        with verdict("I6"):
            until(lambda: cluster.log("master").count("worker_lost") > lost)
    finally:
        os.kill(pid, signal.SIGCONT)
    with verdict("I1"), verdict("I3"):
        assert numbers(cluster.client, job, "stopped", STEPS) == undisturbed
    with verdict("I4"):
        assert cluster.local.running("trainer") == pid
        until(cluster.idle)


@contextmanager
def behind_a_network(cluster: Cluster, role: str) -> Iterator[Proxy]:
    """Start a role again so that it dials through a network that can be made to fail."""
    file = cluster.local.keys / role / "client.toml"
    before = file.read_bytes()
    near = ClusterFile.load(file)

    def start_again() -> None:
        pid = cluster.pid(role)
        os.kill(pid, signal.SIGTERM)
        until(lambda: cluster.local.running(role) not in (0, pid))

    with Proxy(near.control) as network:
        try:
            msgspec.structs.replace(near, control=network.address).save(file)
            start_again()
            until(lambda: network.connections == 1)
            yield network
        finally:
            file.write_bytes(before)
            start_again()


@pytest.mark.case(8, "a trainer's network goes silent in a job, and comes back")
def test_trainer_that_was_cut_off_comes_back_and_changes_no_number(
    cluster: Cluster, undisturbed: Numbers, verdict: Verdict
) -> None:
    with behind_a_network(cluster, "trainer") as network:
        pid = cluster.pid("trainer")
        lost = cluster.log("master").count("worker_lost")
        cluster.points.arm("trainer.before_answer", "5*delay:1")
        job = sft(cluster.client, "cut-off", STEPS)
        until(lambda: cluster.points.struck("trainer.before_answer"))
        network.faults.blackhole = True
        with verdict("I6"):
            until(lambda: cluster.log("master").count("worker_lost") > lost)
        network.faults.blackhole = False
        with verdict("I1"), verdict("I3"):
            assert numbers(cluster.client, job, "cut-off", STEPS) == undisturbed
        with verdict("I4"):
            assert cluster.local.running("trainer") == pid
            until(cluster.idle)
