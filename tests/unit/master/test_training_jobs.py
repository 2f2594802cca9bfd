"""Jobs that train: resumed after any kill with the same numbers, waiting with a reason, ended with a reason."""

from __future__ import annotations

import math

import msgspec
import pytest

from joynexus.specs import SftPolicy
from joynexus.wire import ErrorCode
from joynexus.wire.back import SampleIndices, WeightsRefused
from joynexus.wire.errors import failure
from joynexus.wire.front import (
    AcquireLease,
    CancelJob,
    GetPolicy,
    JobInfo,
    Lease,
    OptimStep,
    PolicyInfo,
    ReleaseLease,
    SubmitJob,
)
from services.master.plan import compile_training
from tests.unit.master.actors import FakeEnv, FakeTrainer, new_incarnation
from tests.unit.master.jobs import Cluster, evaluation, info, push, sft, submit
from tests.unit.master.world import MANIFEST, SPEC, World, run


def test_an_sft_job_creates_trains_publishes_and_serves_its_policy(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    job = submit(world, sft(publish_initial=True))
    assert job.state == "waiting"
    cluster.run()
    done = info(world, job.job)
    assert (done.state, done.done, done.total) == ("succeeded", 100, 100)
    assert (done.initial_version, done.version) == (1, 2)
    assert len(done.losses) == 100
    assert done.samples == 100
    assert [offer.version for offer in cluster.inference.offers] == [1, 2]
    policy = world.ask(GetPolicy(policy="p"), PolicyInfo)
    assert policy.spec.contract == MANIFEST.contract
    assert policy.spec.statistics == MANIFEST.statistics
    assert policy.driver == ""
    assert policy.step == 100


def test_the_loss_curve_is_given_in_parts(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    job = submit(world, sft())
    cluster.run()
    whole = info(world, job.job).losses
    assert info(world, job.job, since=90).losses == whole[90:]
    assert info(world, job.job, since=1000).losses == ()


def test_batches_are_drawn_by_pages_a_bounded_distance_ahead(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    submit(world, sft(steps=1000))
    run(cluster.env)
    drawn = [task for task in cluster.env.tasks if isinstance(task, SampleIndices)]
    assert [(task.first_step, task.steps) for task in drawn] == [(0, 64), (64, 64)]
    assert len(world.journal.ops["a", "p"]) == world.config.job_ops


def test_pages_shrink_when_batches_are_large() -> None:
    assert compile_training(sft(batch_size=4096), initial=False, page_steps=64).page_steps == 16


@pytest.mark.parametrize("when", range(1, 40, 3))
def test_a_job_ends_with_the_same_losses_and_versions_if_the_master_dies(when: int) -> None:
    def play(crash_at: int | None) -> JobInfo:
        world = World()
        cluster = Cluster(world)
        push(world)
        job = submit(world, sft(publish_initial=True))
        for turn in range(10_000):
            if turn == crash_at:
                world.crash()
                for worker in (cluster.trainer, cluster.inference, cluster.env):
                    worker.connect()
            if not sum([worker.work(1) for worker in (cluster.env, cluster.trainer, cluster.inference)]):
                break
        return info(world, job.job)

    calm, struck = play(None), play(when)
    assert struck.state == "succeeded"
    assert (struck.losses, struck.version, struck.samples) == (calm.losses, calm.version, calm.samples)


@pytest.mark.parametrize("when", range(1, 30, 4))
def test_a_job_ends_with_the_same_losses_and_versions_if_the_trainer_dies(when: int) -> None:
    def play(crash_at: int | None) -> tuple[JobInfo, str]:
        world = World()
        cluster = Cluster(world)
        push(world)
        job = submit(world, sft())
        for turn in range(10_000):
            if turn == crash_at:
                cluster.trainer.die()
                world.wait(2.5)
                cluster.inference.beat()
                cluster.env.beat()
                cluster.trainer = FakeTrainer(world, new_incarnation(), key="trainer")
            if not sum([worker.work(1) for worker in (cluster.env, cluster.trainer, cluster.inference)]):
                break
        version = world.ask(GetPolicy(policy="p"), PolicyInfo).versions[0]
        assert not any(log.event == "replay_differs" for log in world.logs)
        return info(world, job.job), version.digest

    (calm, digest), (struck, digest_again) = play(None), play(when)
    assert struck.state == "succeeded"
    assert struck.losses == calm.losses
    assert digest_again == digest


def test_a_job_whose_data_set_is_still_checked_waits_and_says_so(world: World) -> None:
    push(world)
    job = submit(world, sft())
    assert "an env worker that reads data sets" in info(world, job.job).message
    cluster = Cluster(world)
    assert "'demos', which is being checked" in info(world, submit(world, sft(policy="q"), key="k2").job).message
    cluster.run()
    assert info(world, job.job).state == "succeeded"


def test_a_job_without_a_trainer_waits_and_says_so(world: World) -> None:
    push(world)
    env = FakeEnv(world, new_incarnation(), key="env")
    job = submit(world, sft())
    run(env)
    waiting = info(world, job.job)
    assert waiting.state == "waiting"
    assert waiting.message == "waits for a trainer with backbone 'lite'"


def test_a_job_without_a_sampler_waits_and_says_so(world: World) -> None:
    push(world)
    env = FakeEnv(world, new_incarnation(), key="env", serves=("datasets",))
    job = submit(world, sft())
    run(env)
    assert info(world, job.job).message == "waits for an env worker that draws samples"


def test_a_second_job_on_a_policy_waits_for_the_first(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    run(cluster.env)
    first = submit(world, sft(), key="1")
    second = submit(world, sft(steps=50), key="2")
    assert first.job in info(world, second.job).message
    cluster.run()
    assert info(world, first.job).state == info(world, second.job).state == "succeeded"
    assert info(world, second.job).version == 2
    assert world.ask(GetPolicy(policy="p"), PolicyInfo).step == 150


def test_a_job_waits_for_the_loop_that_drives_its_policy(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    world.create()
    lease = world.lease()
    job = submit(world, sft())
    run(cluster.env)
    assert "the loop" in info(world, job.job).message
    world.tell(ReleaseLease(policy="p", lease=lease))
    cluster.run()
    assert info(world, job.job).state == "succeeded"


def test_a_loop_cannot_drive_while_a_job_does(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    job = submit(world, sft())
    run(cluster.env)
    refused = world.refused(AcquireLease(policy="p", holder="h"))
    assert refused.code is ErrorCode.CONFLICT
    assert job.job in refused.message
    cluster.run()
    lease = world.ask(AcquireLease(policy="p", holder="h"), Lease)
    world.tell(OptimStep(policy="p", lease=lease.lease, seq=lease.next_seq))
    cluster.run()
    assert world.ask(GetPolicy(policy="p"), PolicyInfo).step == 101


def test_a_policy_that_exists_with_another_recipe_is_a_conflict_with_the_field(world: World) -> None:
    push(world)
    world.create()
    refused = world.refused(SubmitJob(key="k", spec=sft(create=SftPolicy(chunk=16))))
    assert refused.code is ErrorCode.CONFLICT
    assert "'chunk' is 8" in refused.message


def test_a_create_that_says_nothing_takes_the_policy_as_it_is(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    world.create(spec=msgspec.structs.replace(SPEC, chunk=3))
    job = submit(world, sft())
    cluster.run()
    assert info(world, job.job).state == "succeeded"
    assert world.ask(GetPolicy(policy="p"), PolicyInfo).spec.chunk == 3


def test_a_policy_that_does_not_fit_the_data_is_refused_with_the_field(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    other = msgspec.structs.replace(SPEC.contract, action_dim=3)
    world.create(spec=msgspec.structs.replace(SPEC, contract=other, statistics=None, normalization="none"))
    job = submit(world, sft())
    cluster.run()
    failed = info(world, job.job)
    assert failed.error is not None
    assert failed.error.code is ErrorCode.CONTRACT_MISMATCH
    assert "'action_dim' differs" in failed.message


def test_a_backbone_that_no_trainer_has_is_refused_with_those_there_are(world: World) -> None:
    FakeTrainer(world, new_incarnation())
    push(world)
    refused = world.refused(SubmitJob(key="k", spec=sft(create=SftPolicy(backbone="lite@999"))))
    assert refused.message == "no trainer here has backbone 'lite@999': use 'lite'"


@pytest.mark.parametrize("env", ["foo/bar", "../../x", "metaworld"])
def test_an_evaluation_in_no_known_simulator_is_refused_at_once(world: World, env: str) -> None:
    world.create()
    refused = world.refused(SubmitJob(key="k", spec=evaluation(env=env)))
    assert refused.code is ErrorCode.INVALID
    assert "simulator" in refused.message


def test_an_unknown_head_is_refused_when_the_trainers_say_what_they_have(world: World) -> None:
    FakeTrainer(world, new_incarnation(), heads=("oft", "groot"))
    push(world)
    refused = world.refused(SubmitJob(key="k", spec=sft(create=SftPolicy(head="oftt"))))
    assert refused.message == "there is no action module 'oftt': use one of groot, oft"


def test_bad_data_ends_the_job_with_the_trainers_sentence(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    cluster.trainer.errors[5] = failure(ErrorCode.BAD_DATA, "sample 3 has NaN in dimension 1")
    job = submit(world, sft())
    cluster.run()
    failed = info(world, job.job)
    assert (failed.state, failed.message) == ("failed", "sample 3 has NaN in dimension 1")
    assert world.ask(GetPolicy(policy="p"), PolicyInfo).driver == ""


def test_a_vetoed_step_is_a_hole_in_the_curve(world: World) -> None:
    veto = failure(ErrorCode.NON_FINITE, "the loss is NaN")
    cluster = Cluster(world)
    push(world)
    cluster.trainer.errors = {5: veto, 6: veto, 10: veto}
    job = submit(world, sft())
    cluster.run()
    done = info(world, job.job)
    assert done.state == "succeeded"
    assert [index for index, loss in enumerate(done.losses) if math.isnan(loss)] == [4, 5, 9]


def test_holding_out_everything_is_refused(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    job = submit(world, sft(holdout_episodes=4))
    cluster.run()
    assert "hold out at most 3" in info(world, job.job).message


def test_a_cancelled_job_stops_frees_its_policy_and_keeps_what_it_published(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    job = submit(world, sft(publish_initial=True, steps=10_000))
    run(cluster.env)
    cluster.trainer.work(3)
    cancelled = world.ask(CancelJob(job=job.job), JobInfo)
    assert cancelled.state == "cancelled"
    cluster.run()
    assert info(world, job.job).state == "cancelled"
    policy = world.ask(GetPolicy(policy="p"), PolicyInfo)
    assert [version.version for version in policy.versions] == [1]
    assert policy.driver == ""
    world.crash()
    assert info(world, job.job).state == "cancelled"


def test_a_version_that_inference_refuses_fails_the_job_with_the_reason(world: World) -> None:
    cluster = Cluster(world)
    cluster.inference.applies = False
    push(world)
    job = submit(world, sft())
    cluster.run()
    assert info(world, job.job).state == "publishing"
    error = failure(ErrorCode.NON_FINITE, "weight 'head.0' holds NaN")
    world.say(cluster.inference.peer, WeightsRefused(tenant="a", policy="p", version=1, error=error))
    failed = info(world, job.job)
    assert failed.state == "failed"
    assert "holds NaN" in failed.message


def test_a_job_that_publishes_ends_when_no_inference_worker_is_left(world: World) -> None:
    cluster = Cluster(world)
    cluster.inference.applies = False
    push(world)
    job = submit(world, sft())
    cluster.run()
    assert info(world, job.job).state == "publishing"
    for _ in range(8):
        world.wait(1)
        cluster.trainer.beat()
        cluster.env.beat()
    assert info(world, job.job).state == "succeeded"


def test_a_full_disk_holds_a_job_up_but_loses_nothing(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    job = submit(world, sft())
    run(cluster.env)
    cluster.trainer.work(1)
    world.journal.full = True
    cluster.run()
    world.wait(1.5)
    world.journal.full = False
    for _ in range(6):
        world.wait(1)
        cluster.beat()
        cluster.run()
    assert info(world, job.job).state == "succeeded"
    assert len(info(world, job.job).losses) == 100


def test_a_finished_jobs_curve_survives_restarts_exactly(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    job = submit(world, sft())
    cluster.run()
    before = info(world, job.job)
    world.crash()
    after = info(world, job.job)
    assert after.losses == before.losses
    assert (after.samples, after.backbone_forwards, after.state) == (100, 100, "succeeded")
    assert after.seconds == before.seconds
