"""RL jobs in which something goes wrong: they go on without it, wait, or end with the reason; or are refused."""

from __future__ import annotations

import pytest

from common.journal.records import PageRecord
from joynexus.specs import CriticSpec, GrpoSpec, PpoSpec, RlPolicy
from joynexus.wire import ErrorCode
from joynexus.wire.back import WeightsRefused
from joynexus.wire.errors import failure
from joynexus.wire.front import CancelJob, CreatePolicy, JobInfo, PolicyInfo, ResumeJob, SubmitJob
from services.master.config import CoreConfig
from services.master.plan import compile_rl
from tests.unit.master.actors import FakeEnv, new_incarnation
from tests.unit.master.jobs import Cluster, info, submit
from tests.unit.master.rl import policy, rl, trained
from tests.unit.master.world import SPEC, World, run

# What goes wrong


def test_a_page_over_which_workers_die_is_left_out_and_the_update_goes_on(world: World) -> None:
    cluster = Cluster(world)
    spec = rl(updates=2)
    poisoned = compile_rl(spec, rollout_episodes=8).page(1)[1][0]
    job = submit(world, spec)
    for _ in range(200):
        cluster.env.killed_by = {poisoned}
        cluster.run()
        if cluster.env.peer not in world.actors:
            world.wait(2.5)
            cluster.trainer.beat()
            cluster.inference.beat()
            cluster.env = FakeEnv(world, new_incarnation(), key="env")
        if info(world, job.job).state == "succeeded":
            break
    done = info(world, job.job)
    assert done.state == "succeeded"
    assert [point.episodes for point in done.updates] == [8, 12]
    assert [len(pages) for pages in trained(world)] == [1, 2]


def test_an_update_without_any_episode_ends_the_job_with_the_reason(world: World) -> None:
    cluster = Cluster(world)
    world.ask(CreatePolicy(policy="p", spec=SPEC), PolicyInfo)
    cluster.env.rollout_error = failure(ErrorCode.UNAVAILABLE, "no OpenGL library is here: install libegl1")
    job = submit(world, rl())
    for _ in range(12):
        cluster.run()
        world.wait(1)
        cluster.beat()
    done = info(world, job.job)
    assert done.state == "failed"
    assert "no episode of update 0 could be run: no OpenGL library is here" in done.message
    assert policy(world).driver == ""


def test_a_disk_that_is_full_for_long_costs_no_episode(world: World) -> None:
    cluster = Cluster(world)
    world.ask(CreatePolicy(policy="p", spec=SPEC), PolicyInfo)
    cluster.env.rollout_error = failure(ErrorCode.UNAVAILABLE, "the disk is full", retry_after_ms=5000)
    job = submit(world, rl())
    for _ in range(60):
        cluster.run()
        world.wait(1)
        cluster.beat()
    assert info(world, job.job).state == "running"
    cluster.env.rollout_error = None
    for _ in range(6):
        world.wait(1)
        cluster.beat()
    cluster.run()
    done = info(world, job.job)
    assert done.state == "succeeded"
    assert all(point.episodes == rl().episodes for point in done.updates)


def test_a_task_that_does_not_fit_the_policy_ends_the_job(world: World) -> None:
    cluster = Cluster(world)
    cluster.env.error = failure(ErrorCode.INVALID, "there is no task 'reach-v9'")
    job = submit(world, rl())
    cluster.run()
    assert info(world, job.job).message == "there is no task 'reach-v9'"


def test_vetoed_epochs_park_the_job_and_it_goes_on_where_it_stopped(world: World) -> None:
    cluster = Cluster(world)
    veto = failure(ErrorCode.NON_FINITE, "the loss is nan")
    spec = rl(updates=6)
    cluster.trainer.errors = dict.fromkeys((6, 7, 9), veto)  # both epochs of update 1, and the first of update 2
    job = submit(world, spec)
    cluster.run()
    parked = info(world, job.job)
    assert parked.state == "parked"
    assert "3 steps in a row were vetoed" in parked.message
    world.crash()
    for worker in (cluster.trainer, cluster.inference, cluster.env):
        worker.connect()
    cluster.trainer.errors = {}
    world.ask(ResumeJob(job=job.job), JobInfo)
    cluster.run()
    done = info(world, job.job)
    assert (done.state, done.done) == ("succeeded", 6)
    assert done.updates[1].metrics == {}


def test_a_version_that_inference_refuses_ends_the_job(world: World) -> None:
    cluster = Cluster(world)
    cluster.inference.applies = False
    job = submit(world, rl())
    run(cluster.env, cluster.trainer)
    cluster.inference.work()
    refused = failure(ErrorCode.NON_FINITE, "weight 'x' holds NaN")
    world.say(cluster.inference.peer, WeightsRefused(tenant="a", policy="p", version=5, error=refused))
    assert info(world, job.job).state == "failed"


def test_cancelling_frees_the_policy_its_pages_and_its_rollouts(world: World) -> None:
    cluster = Cluster(world)
    job = submit(world, rl(max_staleness=2, updates=50))
    for _ in range(20):
        cluster.trainer.work(1)
        cluster.env.work(1)
    before = info(world, job.job)
    assert before.state == "running"
    world.ask(CancelJob(job=job.job), JobInfo)
    after = info(world, job.job)
    assert (after.state, after.updates) == ("cancelled", before.updates)
    assert not world.journal.of(PageRecord)
    assert policy(world).driver == ""
    cluster.run()
    world.crash()
    assert info(world, job.job).updates == before.updates
    other = submit(world, rl(), key="again")
    for worker in (cluster.trainer, cluster.inference, cluster.env):
        worker.connect()
    cluster.run()
    assert info(world, other.job).state == "succeeded"


def test_a_trainer_that_dies_over_an_epoch_parks_the_job() -> None:
    world = World(CoreConfig(kills=1))
    job = submit(world, rl())
    for _life in range(2):  # the first one had other epochs as well
        cluster = Cluster(world)
        cluster.trainer.killed_by = {3}
        cluster.run()
        world.wait(8)
    assert info(world, job.job).state == "parked"
    assert "set aside" in info(world, job.job).message


def test_the_message_names_the_worker_that_is_missing(world: World) -> None:
    job = submit(world, rl(env="maniskill/PickCube-v1"))
    assert info(world, job.job).message == "waits for an env worker that serves maniskill"
    assert info(world, job.job).state == "waiting"


# Checks


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"updates": 0}, "updates must lie between"),
        ({"episodes": 0}, "episodes must lie between"),
        ({"max_staleness": 65}, "max_staleness must lie between 0 and 64"),
        ({"stop_at": 1.5}, "stop_at must lie between"),
        ({"reward_scale": 0.0}, "reward_scale must lie between"),
        ({"env": "reach"}, "is not a simulator task"),
        ({"algorithm": GrpoSpec(group_size=5)}, "episodes must be a multiple of group_size, 5: use 15"),
        ({"algorithm": GrpoSpec(group_size=1)}, "group_size must lie between 2 and 64"),
        ({"algorithm": PpoSpec(critic=CriticSpec(width=1025))}, "width must lie between 1 and 1024"),
        ({"algorithm": GrpoSpec(group_size=4, filter_low=1.0, filter_high=0.0)}, "filter_low is 1, above"),
        ({"algorithm": PpoSpec(gamma=1.5)}, "gamma must lie between"),
        ({"algorithm": PpoSpec(dual_clip=0.5)}, "dual_clip (0 turns it off) must lie between 1"),
        ({"algorithm": PpoSpec(epochs=0)}, "epochs must lie between"),
        ({"create": RlPolicy(chunk=0)}, "chunk must lie between"),
        ({"first_seed": 2**31}, "first_seed must lie between"),
        ({"weight_limit": float("nan")}, "weight_limit must lie between"),
    ],
)
def test_a_spec_that_could_never_run_is_refused_in_one_sentence(
    world: World, changes: dict[str, object], says: str
) -> None:
    refused = world.refused(SubmitJob(key="k", spec=rl(**changes)))
    assert refused.code is ErrorCode.INVALID
    assert says in refused.message


def test_executing_more_than_a_chunk_is_refused(world: World) -> None:
    Cluster(world)
    new = world.refused(SubmitJob(key="new", spec=rl(execute=9, create=RlPolicy(chunk=8))))
    assert (new.code, "policy 'p' predicts chunks of 8" in new.message) == (ErrorCode.INVALID, True)
    world.ask(CreatePolicy(policy="p", spec=SPEC), PolicyInfo)
    there = world.refused(SubmitJob(key="there", spec=rl(execute=9)))
    assert (there.code, there.message) == (new.code, new.message)
