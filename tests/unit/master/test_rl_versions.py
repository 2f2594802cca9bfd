"""Versions that an RL job publishes on its way: those that somebody still needs stay, and no others."""

from __future__ import annotations

import msgspec
import pytest

from common.journal.records import JobRecord
from joynexus.specs import EvaluateSpec
from joynexus.wire import Array, ErrorCode, Failure, failure
from joynexus.wire.back import WeightsApplied, WeightsRefused
from joynexus.wire.front import Act, Actions, GetVersion, SubmitJob, VersionInfo
from tests.unit.master.actors import FakeEnv, new_incarnation
from tests.unit.master.jobs import Cluster, info, submit
from tests.unit.master.rl import check, policy, rl
from tests.unit.master.world import World, run


def until_published(world: World, cluster: Cluster, version: int) -> None:
    """Let everybody work until a trainer is about to be given the publication of a version."""
    while not any(
        item.version == version
        for send in cluster.trainer.inbox
        for item in send.message.items  # type: ignore[attr-defined]
    ):
        assert cluster.inference.work() + (cluster.trainer.work(1) or cluster.env.work(1))


def test_a_job_goes_on_also_if_its_first_version_was_durable_but_not_its_own_word_of_it(world: World) -> None:
    cluster = Cluster(world)
    job = submit(world, rl())
    run(cluster.env)
    cluster.trainer.work()
    training = world.core._training
    training.want_checkpoint(training._trainees["a", "p"].policy)  # as if it had to make room
    world.wait(0.1)
    cluster.trainer.work()
    assert training._trainees["a", "p"].policy.covered == 2
    (record,) = world.journal.of(JobRecord)
    assert (record.initial_version, record.version) == (1, 1)
    world.journal.append([msgspec.structs.replace(record, initial_version=0, version=0)])
    world.crash()
    for worker in (cluster.trainer, cluster.inference, cluster.env):
        worker.connect()
    cluster.run()
    done = info(world, job.job)
    assert (done.state, done.initial_version, done.version) == ("succeeded", 1, 5)
    check(world, rl())


@pytest.mark.parametrize("disk", ["slow", "full"])
def test_a_version_stays_from_when_an_evaluation_of_it_is_asked_for(world: World, disk: str) -> None:
    cluster = Cluster(world)
    submit(world, rl())
    until_published(world, cluster, 3)
    assert cluster.inference.offers[-1].version == 2
    world.auto_persist = False
    cluster.trainer.work()  # version 3 is published, and on its way to the disk
    spec = EvaluateSpec(policy="p", version=2, env="libero/libero_object/0", episodes=3)
    asked = world.tell(SubmitJob(key="e", spec=spec))
    while not any(isinstance(record, JobRecord) and record.key == "e" for record in world.unwritten[0].records):
        world.write()
    cluster.inference.work()
    assert world.ask(GetVersion(policy="p"), VersionInfo).version == 3
    world.journal.full = disk == "full"
    world.write()
    world.journal.full, world.auto_persist = False, True
    world.settle()
    cluster.run()
    kept = [version.version for version in policy(world).versions]
    if disk == "full":
        assert isinstance(world.answers(asked)[0], Failure)
        assert kept == [1, 5]
        return
    assert kept == [1, 2, 5]
    FakeEnv(world, new_incarnation(), key="libero", serves=("libero",)).work()
    assert info(world, "evaluate-2").state == "succeeded"
    assert [version.version for version in policy(world).versions] == [1, 5]


def test_the_version_in_service_stays_until_a_newer_one_is_in_memory(world: World) -> None:
    cluster = Cluster(world)
    job = submit(world, rl())
    until_published(world, cluster, 3)
    cluster.inference.applies = False
    run(cluster.env, cluster.trainer)
    cluster.inference.work()
    assert [version.version for version in policy(world).versions] == [1, 2, 5]
    state = Array(dtype="<f4", shape=(1, 2), frame=0)
    asked = world.tell(Act(policy="p", state=state, images=(), instructions=("go",)), buffers=(b"x" * 8,))
    world.wait(0.1)
    cluster.inference.work()
    assert isinstance(world.answers(asked)[0], Actions)
    assert cluster.inference.groups[-1].items[0].version == 2
    world.say(cluster.inference.peer, WeightsApplied(tenant="a", policy="p", version=5))
    assert info(world, job.job).state == "succeeded"
    assert [version.version for version in policy(world).versions] == [1, 5]


def test_a_version_that_was_let_go_of_before_it_was_loaded_is_no_error(world: World) -> None:
    cluster = Cluster(world)
    submit(world, rl())
    cluster.run()
    gone = failure(ErrorCode.UNAVAILABLE, "version 3 cannot be fetched now")
    world.say(cluster.inference.peer, WeightsRefused(tenant="a", policy="p", version=3, error=gone))
    assert not [log for log in world.logs if log.event == "weights_refused"]
