"""Jobs: submitted once, resumed after any kill, waiting with a reason, ended with a reason."""

from __future__ import annotations

import math

import msgspec
import pytest

from common.journal.records import CheckpointRecord, JobRecord, PageRecord
from joynexus.specs import EvaluateDatasetSpec, EvaluateSpec, SftPolicy, SftSpec
from joynexus.wire import ErrorCode, encode
from joynexus.wire.back import (
    ActionsEvaluated,
    DatasetPrepared,
    EvaluateActions,
    PredictDone,
    Rollout,
    SampleIndices,
    TrainDone,
    WeightsRefused,
)
from joynexus.wire.errors import failure
from joynexus.wire.front import (
    AcquireLease,
    ActionError,
    BlobOffset,
    CancelJob,
    EpisodeResult,
    FileEntry,
    GetJob,
    GetPolicy,
    GetUsage,
    JobInfo,
    JobList,
    Lease,
    ListJobs,
    OpResult,
    OptimStep,
    PolicyInfo,
    PushDataset,
    ReleaseLease,
    SubmitJob,
    UsageReport,
)
from services.master import checks, training_job
from services.master.config import CoreConfig
from services.master.plan import compile_evaluation, compile_training, summarize, wilson
from tests.unit.master.actors import FakeEnv, FakeInference, FakeTrainer, new_incarnation
from tests.unit.master.world import MANIFEST, SPEC, World, run

FILE = "f" * 64


def push(world: World, name: str = "demos", *, tenant: str = "a") -> None:
    (stored,) = world.upload(FILE, tenant=tenant)
    assert isinstance(stored, BlobOffset)
    files = (FileEntry(path="meta/info.json", digest=FILE, nbytes=10),)
    world.tell(PushDataset(dataset=name, files=files), tenant=tenant)


def sft(**changes: object) -> SftSpec:
    spec = SftSpec(policy="p", dataset="demos", steps=100, batch_size=4, checkpoint_every=30)
    return msgspec.structs.replace(spec, **changes)


def submit(world: World, spec: object, *, key: str = "k", tenant: str = "a") -> JobInfo:
    return world.ask(SubmitJob(key=key, spec=spec), JobInfo, tenant=tenant)  # type: ignore[arg-type]


def info(world: World, job: str, *, since: int = 0, tenant: str = "a") -> JobInfo:
    return world.ask(GetJob(job=job, since=since), JobInfo, tenant=tenant)


class Cluster:
    """One worker of each kind."""

    def __init__(self, world: World, backbone: str = "lite") -> None:
        self.world = world
        self.trainer = FakeTrainer(world, new_incarnation(), key="trainer", backbone_name=backbone)
        self.inference = FakeInference(world, new_incarnation(), key="inference", backbone_name=backbone)
        self.env = FakeEnv(world, new_incarnation(), key="env")

    def run(self) -> None:
        run(self.trainer, self.inference, self.env)

    def beat(self) -> None:
        for worker in (self.trainer, self.inference, self.env):
            worker.beat()


@pytest.fixture
def world() -> World:
    return World()


# Training


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


# Submission


def test_the_same_key_is_the_same_job_also_while_it_is_on_its_way_to_the_disk(world: World) -> None:
    push(world)
    world.auto_persist = False
    ids = [world.tell(SubmitJob(key="k", spec=sft())) for _ in range(2)]
    assert world.answers(ids[0]) == []
    world.auto_persist = True
    world.settle()
    jobs = {world.answers(id)[0].job for id in ids}  # type: ignore[attr-defined]
    assert len(jobs) == 1
    assert submit(world, sft()).job in jobs
    world.crash()
    assert submit(world, sft()).job in jobs


def test_the_same_key_with_another_spec_is_a_conflict(world: World) -> None:
    push(world)
    submit(world, sft())
    assert world.refused(SubmitJob(key="k", spec=sft(steps=7))).code is ErrorCode.CONFLICT


def test_a_job_that_the_disk_refuses_was_never_there(world: World) -> None:
    push(world)
    world.journal.full = True
    assert world.refused(SubmitJob(key="k", spec=sft())).code is ErrorCode.UNAVAILABLE
    world.journal.full = False
    assert world.ask(ListJobs(), JobList).jobs == ()
    submit(world, sft())


def test_jobs_of_others_are_not_found_like_jobs_that_never_were(world: World) -> None:
    push(world)
    job = submit(world, sft())
    theirs = world.refused(GetJob(job=job.job), tenant="b")
    nobodys = world.refused(GetJob(job="sft-99"), tenant="b")
    assert theirs.message.replace(job.job, "x") == nobodys.message.replace("sft-99", "x")
    assert world.refused(CancelJob(job=job.job), tenant="b").code is ErrorCode.NOT_FOUND
    assert world.ask(ListJobs(), JobList, tenant="b").jobs == ()


def test_jobs_are_listed_newest_first_without_curves(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    for index in range(3):
        submit(world, sft(policy=f"p{index}", steps=5), key=str(index))
    cluster.run()
    jobs = world.ask(ListJobs(), JobList).jobs
    assert [job.spec.policy for job in jobs] == ["p2", "p1", "p0"]
    assert all(job.losses == () for job in jobs)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"steps": 0}, "steps"),
        ({"batch_size": 4097}, "batch_size"),
        ({"batch_size": 0}, "batch_size"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"policy": "No Name"}, "cannot name a policy"),
        ({"dataset": "../etc"}, "cannot name a data set"),
        ({"create": SftPolicy(chunk=257)}, "chunk"),
        ({"create": SftPolicy(chunk=0)}, "chunk"),
    ],
)
def test_a_spec_out_of_range_is_refused_in_one_sentence_with_its_field(
    world: World, change: dict[str, object], word: str
) -> None:
    push(world)
    refused = world.refused(SubmitJob(key="k", spec=sft(**change)))
    assert refused.code is ErrorCode.INVALID
    assert word in refused.message
    assert not world.journal.of(JobRecord)


def test_a_data_set_that_does_not_exist_is_refused_at_once(world: World) -> None:
    assert world.refused(SubmitJob(key="k", spec=sft())).code is ErrorCode.NOT_FOUND


# Evaluation


def evaluated(world: World, cluster: Cluster) -> None:
    push(world)
    submit(world, sft(steps=5), key="train")
    cluster.run()


def evaluation(**changes: object) -> EvaluateSpec:
    return msgspec.structs.replace(EvaluateSpec(policy="p", env="metaworld/reach-v3", episodes=12, videos=2), **changes)


def test_an_evaluation_counts_each_seed_once_and_gives_its_interval(world: World) -> None:
    cluster = Cluster(world)
    evaluated(world, cluster)
    job = submit(world, evaluation())
    cluster.run()
    done = info(world, job.job)
    assert (done.state, done.done, done.total) == ("succeeded", 12, 12)
    result = done.evaluation
    assert result is not None
    assert [episode.seed for episode in result.results] == list(range(12))
    assert (result.successes, result.episodes, result.success) == (6, 12, 0.5)
    assert (result.low, result.high) == wilson(6, 12)
    assert result.failures == {"limit": 6}
    assert result.software == {"mujoco": "3"}
    rollouts = [task for task in cluster.env.tasks if isinstance(task, Rollout)]
    assert [task.seeds for task in rollouts] == [tuple(range(5)), tuple(range(5, 10)), (10, 11)]
    assert [task.videos for task in rollouts] == [(0, 1), (), ()]
    assert world.core.may_read("a", f"{0:064x}"), "the tenant may fetch the video"
    assert not world.core.may_read("b", f"{0:064x}")


def test_an_evaluations_version_is_fixed_when_it_is_accepted(world: World) -> None:
    cluster = Cluster(world)
    evaluated(world, cluster)
    job = submit(world, evaluation())
    submit(world, sft(steps=3), key="more")
    cluster.run()
    assert world.ask(GetPolicy(policy="p"), PolicyInfo).versions[-1].version == 2
    assert info(world, job.job).version == 1
    assert {task.version for task in cluster.env.tasks if isinstance(task, Rollout)} == {1}


def test_an_evaluation_survives_a_restart_without_running_a_page_twice(world: World) -> None:
    cluster = Cluster(world)
    evaluated(world, cluster)
    job = submit(world, evaluation())
    cluster.env.work(1)
    assert len(world.journal.of(PageRecord)) == 1
    world.crash()
    cluster.env.connect()
    cluster.run()
    assert info(world, job.job).state == "succeeded"
    rollouts = [task.seeds[0] for task in cluster.env.tasks if isinstance(task, Rollout)]
    assert sorted(set(rollouts)) == [0, 5, 10]
    assert rollouts.count(0) == 1


def test_jobs_of_a_tenant_in_one_family_do_not_starve_its_jobs_in_another(world: World) -> None:
    evaluated(world, Cluster(world))
    env = FakeEnv(world, new_incarnation(), key="both", serves=("metaworld", "maniskill"))
    submit(world, evaluation(episodes=500, videos=0))
    short = submit(world, evaluation(env="maniskill/PickCube-v1", episodes=5, videos=0), key="short")
    for _ in range(2 * CoreConfig().job_pages):
        env.work(1)
        world.wait(0.01)
    assert info(world, short.job).state == "succeeded"


def test_a_page_of_a_dead_worker_is_done_again_from_its_seeds(world: World) -> None:
    cluster = Cluster(world)
    evaluated(world, cluster)
    job = submit(world, evaluation())
    lost = cluster.env.inbox[0].message
    assert isinstance(lost, Rollout)
    cluster.env.die()
    world.wait(2.5)
    cluster.trainer.beat()
    cluster.inference.beat()
    cluster.env = FakeEnv(world, new_incarnation(), key="env")
    cluster.run()
    again = cluster.env.tasks[0]
    assert isinstance(again, Rollout)
    assert (again.seeds, again.attempt) == (lost.seeds, 2)
    assert info(world, job.job).done == 12


def test_a_page_that_kills_three_workers_ends_the_job_with_the_reason(world: World) -> None:
    cluster = Cluster(world)
    evaluated(world, cluster)
    cluster.env.die()
    job = submit(world, evaluation(episodes=5))
    world.wait(8)  # the first one had it already
    for life in range(2):
        env = FakeEnv(world, new_incarnation(), key=f"env{life}")
        assert env.inbox
        env.die()
        world.wait(8)
    failed = info(world, job.job)
    assert failed.error is not None
    assert failed.error.code is ErrorCode.POISON


def test_a_page_that_kills_its_workers_ends_the_job_also_if_others_ran_beside_it(world: World) -> None:
    cluster = Cluster(world)
    evaluated(world, cluster)
    cluster.env.die()
    world.wait(8)
    job = submit(world, evaluation(episodes=10))
    for life in range(6):  # the first one over both, then each alone in turn
        env = FakeEnv(world, new_incarnation(), key=f"env{life}", credit={"simulator": 2, "data": 1})
        assert len(env.inbox) == (2 if life == 0 else 1)
        assert info(world, job.job).error is None
        env.die()
        world.wait(8)
    assert info(world, job.job).error.code is ErrorCode.POISON  # type: ignore[union-attr]


def test_an_answer_of_another_kind_than_asked_for_is_a_fault_of_its_worker(world: World) -> None:
    cluster = Cluster(world)
    evaluated(world, cluster)
    job = submit(world, evaluation(episodes=5))
    for _ in range(3):
        task = cluster.env.inbox.popleft().message
        assert isinstance(task, Rollout)
        world.say(cluster.env.peer, DatasetPrepared(task=task.task, attempt=task.attempt, manifest="m" * 64))
        for answer in (
            TrainDone(
                task=task.task,
                attempt=task.attempt,
                tenant="a",
                policy="p",
                seq=1,
                kind="publish",
                result=OpResult(policy="p", seq=1),
            ),
            PredictDone(task=task.task, attempt=task.attempt, items=()),
        ):
            world.say(cluster.env.peer, answer)
        world.wait(1.5)
        cluster.env.beat()
    error = info(world, job.job).error
    assert error is not None
    assert "dataset_prepared" in error.message


def test_a_cancellation_is_told_only_once_it_is_on_disk(world: World) -> None:
    push(world)
    job = submit(world, sft())
    world.auto_persist = False
    id = world.tell(CancelJob(job=job.job))
    assert world.answers(id) == []
    while world.unwritten:
        world.write()
    (answer,) = world.answers(id)
    assert answer.state == "cancelled"  # type: ignore[attr-defined]
    world.auto_persist = True
    world.crash()
    assert info(world, job.job).state == "cancelled"


def test_a_list_of_jobs_fits_into_a_message(world: World) -> None:
    cluster = Cluster(world)
    evaluated(world, cluster)
    cluster.env.die()
    spec = EvaluateDatasetSpec(policy="p", dataset="demos", episodes=tuple(range(10_000)))
    for number in range(60):
        world.ask(SubmitJob(key=f"k{number}", spec=spec), JobInfo)
    listed = world.ask(ListJobs(), JobList)
    encode(listed, id="x")
    assert len(listed.jobs) > 1


def test_the_largest_evaluation_fits_into_a_message() -> None:
    episodes = tuple(
        EpisodeResult(
            seed=2**30 + n,
            success=False,
            steps=500,
            reward=0.1,
            failure="terminated",
            video="v" * 64 * (n < checks.MAX_VIDEOS),
        )
        for n in range(checks.MAX_EPISODES)
    )
    spec = evaluation(episodes=checks.MAX_EPISODES)
    result = summarize(1, {"metaworld/x": episodes}, {"metaworld/x": "c" * 64}, {})
    encode(JobInfo(job="j", spec=spec, state="succeeded", done=1, total=1, evaluation=result), id="x")


def test_episodes_spread_over_env_workers(world: World) -> None:
    cluster = Cluster(world)
    evaluated(world, cluster)
    other = FakeEnv(world, new_incarnation(), key="env2")
    submit(world, evaluation(episodes=50))
    for _ in range(5):
        cluster.env.work(1)
        other.work(1)
    assert len([task for task in other.tasks if isinstance(task, Rollout)]) == 5


def test_an_evaluation_waits_for_a_worker_that_serves_its_simulator(world: World) -> None:
    cluster = Cluster(world)
    evaluated(world, cluster)
    job = submit(world, evaluation(env="libero/spatial"))
    waiting = info(world, job.job)
    assert (waiting.state, waiting.message) == ("waiting", "waits for an env worker that serves libero")
    FakeEnv(world, new_incarnation(), key="libero", serves=("libero",))
    assert info(world, job.job).state == "running"


def test_a_contract_that_the_simulator_contradicts_ends_the_job_with_the_field(world: World) -> None:
    cluster = Cluster(world)
    evaluated(world, cluster)
    sentence = "contract field 'robot' differs: the policy has 'arm', the environment has 'sawyer'"
    cluster.env.error = failure(ErrorCode.CONTRACT_MISMATCH, sentence)
    job = submit(world, evaluation())
    cluster.run()
    failed = info(world, job.job)
    assert (failed.state, failed.message) == ("failed", sentence)


def test_executing_more_of_a_chunk_than_it_has_is_refused(world: World) -> None:
    evaluated(world, Cluster(world))
    refused = world.refused(SubmitJob(key="k", spec=evaluation(execute=9)))
    assert (refused.code, refused.message) == (
        ErrorCode.INVALID,
        "execute is 9, but policy 'p' predicts chunks of 8",
    )


def test_a_simulator_that_fails_for_a_passing_reason_is_tried_again(world: World) -> None:
    cluster = Cluster(world)
    evaluated(world, cluster)
    cluster.env.error = failure(ErrorCode.UNAVAILABLE, "the simulator hung and was killed")
    job = submit(world, evaluation(episodes=5))
    cluster.run()
    cluster.env.error = None
    world.wait(1.5)
    cluster.run()
    assert info(world, job.job).state == "succeeded"


def test_an_unpublished_policy_cannot_be_evaluated(world: World) -> None:
    world.create()
    refused = world.refused(SubmitJob(key="k", spec=evaluation()))
    assert refused.code is ErrorCode.NOT_FOUND
    assert "publish one first" in refused.message


def test_cancelling_an_evaluation_tells_the_worker_and_frees_its_credit(world: World) -> None:
    cluster = Cluster(world)
    evaluated(world, cluster)
    job = submit(world, evaluation(episodes=100))
    task = cluster.env.inbox[0].message
    assert isinstance(task, Rollout)
    world.ask(CancelJob(job=job.job), JobInfo)
    cluster.env.beat()
    assert [message.cancelled for message in cluster.env.received if hasattr(message, "cancelled")][-1] == (task.task,)
    other = submit(world, evaluation(episodes=5), key="other")
    cluster.env.inbox.popleft()
    cluster.run()
    assert info(world, other.job).state == "succeeded"


def test_simulator_time_is_metered(world: World) -> None:
    cluster = Cluster(world)
    evaluated(world, cluster)
    submit(world, evaluation())
    cluster.run()
    lines = {(line.policy, line.job): line for line in world.ask(GetUsage(), UsageReport).lines}
    assert lines["p", "evaluate-2"].env_s == pytest.approx(1.5)
    assert lines["p", "sft-1"].env_s > 0  # sampling
    assert lines["", ""].env_s > 0  # preparing the data set
    assert lines["", ""].bytes_stored > 0


def test_an_evaluation_on_a_data_set_gives_the_action_error(world: World) -> None:
    cluster = Cluster(world)
    evaluated(world, cluster)
    job = submit(world, EvaluateDatasetSpec(policy="p", dataset="demos", episodes=(0, 3)))
    task = cluster.env.inbox[0].message
    assert isinstance(task, EvaluateActions)
    assert task.spec == world.ask(GetPolicy(policy="p"), PolicyInfo).spec
    error = ActionError(
        version=1, policy=0.1, mean_action=0.5, repeat_state=0.4, per_dimension=(), per_step=(), samples=100
    )
    world.say(cluster.env.peer, ActionsEvaluated(task=task.task, attempt=1, result=error))
    done = info(world, job.job)
    assert (done.state, done.action_error, done.done) == ("succeeded", error, 2)
    world.crash()
    assert info(world, job.job).action_error == error


def test_an_episode_outside_the_data_set_is_refused(world: World) -> None:
    cluster = Cluster(world)
    evaluated(world, cluster)
    job = submit(world, EvaluateDatasetSpec(policy="p", dataset="demos", episodes=(4,)))
    assert "episodes 0 to 3" in info(world, job.job).message


# Plans


def test_a_training_plan_answers_by_position() -> None:
    plan = compile_training(sft(steps=3), initial=True, page_steps=2)
    assert [(plan.op(i).kind, plan.op(i).step) for i in range(plan.total)] == [
        ("publish", 0),
        ("train_step", 0),
        ("train_step", 1),
        ("train_step", 2),
        ("publish", 0),
    ]
    assert [plan.page(step) for step in range(3)] == [(0, 2), (0, 2), (2, 1)]


def test_an_evaluation_plan_covers_every_seed_once() -> None:
    plan = compile_evaluation(evaluation(episodes=13, first_seed=100, videos=6), page_episodes=5)
    seeds = [seed for page in range(plan.pages) for seed in plan.seeds(page)]
    assert seeds == list(range(100, 113))
    assert [seed for page in range(plan.pages) for seed in plan.recorded(page)] == list(range(100, 106))


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [(50, 50, 0.9286, 1.0), (0, 20, 0.0, 0.1611), (45, 50, 0.7864, 0.9565), (1, 2, 0.0945, 0.9055)],
)
def test_the_interval_is_wilsons(successes: int, count: int, low: float, high: float) -> None:
    assert wilson(successes, count) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize("rewards", [[1.7e308] * 3, [math.inf, -math.inf], [math.nan, 1.0]])
def test_rewards_that_have_no_mean_end_nothing(rewards: list[float]) -> None:
    episodes = [EpisodeResult(seed=0, success=False, steps=1, reward=reward) for reward in rewards]
    result = summarize(1, {"metaworld/reach-v3": episodes}, {"metaworld/reach-v3": "c"}, {})
    assert math.isnan(result.mean_reward)
    assert result.tasks[0].mean_steps == 1.0


def test_a_summary_names_reasons_of_failure() -> None:
    episodes = tuple(
        EpisodeResult(seed=i, success=i == 0, steps=10 * i, reward=1.0, failure="" if i == 0 else "terminated")
        for i in range(4)
    )
    result = summarize(7, {"metaworld/x": episodes}, {"metaworld/x": "c"}, {})
    assert (result.version, result.failures, result.mean_steps) == (7, {"terminated": 3}, 15.0)


def test_an_answer_has_a_bounded_part_of_a_curve(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(world)
    push(world)
    job = submit(world, sft())
    cluster.run()
    whole = info(world, job.job).losses
    monkeypatch.setattr(training_job, "_CURVE_POINTS", 60)
    assert info(world, job.job).losses == whole[:60]
    assert info(world, job.job, since=60).losses == whole[60:]


def test_a_job_that_was_cancelled_while_it_waited_is_not_remembered_by_what_it_waited_for(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    first = submit(world, sft())
    cluster.env.work()
    for number in range(5):
        waits = submit(world, sft(), key=f"waits{number}")
        assert "drives policy 'p'" in info(world, waits.job).message
        world.ask(CancelJob(job=waits.job), JobInfo)
    assert not world.core._jobs._waiting
    last = submit(world, sft(), key="last")
    cluster.run()
    assert [info(world, job.job).state for job in (first, last)] == ["succeeded"] * 2


@pytest.mark.parametrize("initial", [False, True])
def test_a_job_ends_also_if_its_version_was_durable_but_not_its_own_word_of_it(world: World, initial: bool) -> None:
    cluster = Cluster(world)
    push(world)
    cluster.inference.applies = False
    job = submit(world, sft(publish_initial=initial))
    cluster.run()
    assert info(world, job.job).state == "publishing"
    (record,) = world.journal.of(JobRecord)
    world.journal.append([msgspec.structs.replace(record, state="running", version=0, initial_version=0)])
    world.crash()
    for worker in (cluster.trainer, cluster.inference, cluster.env):
        worker.connect()
    cluster.run()
    done = info(world, job.job)
    assert (done.state, done.initial_version, done.version) == ("succeeded", int(initial), 1 + initial)


def test_a_curve_is_whole_also_if_the_disk_refused_one_checkpoint_of_several_and_the_master_died(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    job = submit(world, sft(checkpoint_every=5))
    cluster.env.work()
    world.auto_persist = False
    cluster.trainer.work(1)
    checkpoints = [
        record.seq for save in world.unwritten for record in save.records if isinstance(record, CheckpointRecord)
    ]
    assert len(checkpoints) > 1, "several are on their way to the disk together"
    for _ in range(len(world.unwritten)):
        records = world.unwritten[0].records
        world.journal.full = any(isinstance(one, CheckpointRecord) and one.seq == checkpoints[0] for one in records)
        world.write()
    world.journal.full, world.auto_persist = False, True
    world.crash()
    for worker in (cluster.trainer, cluster.inference, cluster.env):
        worker.connect()
    cluster.run()
    done = info(world, job.job)
    assert (done.state, len(done.losses), done.samples) == ("succeeded", 100, 100)
    assert not any(math.isnan(loss) for loss in done.losses)
