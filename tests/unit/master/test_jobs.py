"""Jobs: submitted once, listed, told in messages of bounded size, and planned."""

from __future__ import annotations

import math

import msgspec
import pytest

from common.journal.records import CheckpointRecord, JobRecord
from joynexus.specs import EvaluateDatasetSpec, SftPolicy
from joynexus.wire import ErrorCode, encode
from joynexus.wire.front import CancelJob, EpisodeResult, GetJob, JobInfo, JobList, ListJobs, SubmitJob
from services.master import training_job
from services.master.plan import compile_evaluation, compile_training, summarize, wilson
from tests.unit.master.jobs import Cluster, evaluated, evaluation, info, push, sft, submit
from tests.unit.master.world import World

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
