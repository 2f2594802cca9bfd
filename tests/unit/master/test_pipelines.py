"""Pipelines: stages one after another, durable, and never begun twice; evaluations over several tasks."""

from __future__ import annotations

import msgspec
import pytest

from common.journal.records import JobRecord
from joynexus.contract import Camera
from joynexus.datasets import Fault
from joynexus.specs import EvaluateSpec, PipelineSpec, RlPolicy, SftPolicy
from joynexus.wire import ErrorCode
from joynexus.wire.back import DatasetPrepared, PrepareDataset, Rollout
from joynexus.wire.errors import failure
from joynexus.wire.front import (
    CancelJob,
    FileEntry,
    GetPolicy,
    JobInfo,
    JobList,
    ListJobs,
    PolicyInfo,
    PushDataset,
    ResumeJob,
    SubmitJob,
)
from services.master.plan import compile_evaluation
from tests.unit.master.jobs import Cluster, info, push, sft, submit
from tests.unit.master.rl import rl
from tests.unit.master.world import CONTRACT, World

EVALUATE = EvaluateSpec(policy="p", env="metaworld/reach-v3", episodes=4)
STEPS = sft(steps=5)


def pipeline(*stages: object) -> PipelineSpec:
    return PipelineSpec(policy="p", stages=stages or (STEPS, rl(updates=2), EVALUATE))  # type: ignore[arg-type]


def test_stages_run_one_after_another_each_on_what_the_one_before_it_made(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    job = submit(world, pipeline())
    assert [stage.kind for stage in job.stages] == ["sft", "rl", "evaluate"]
    cluster.run()
    done = info(world, job.job)
    assert (done.state, done.done, done.total, done.version) == ("succeeded", 3, 3, 4)
    assert [(stage.job, stage.state) for stage in done.stages] == [
        ("sft-2", "succeeded"),
        ("rl-3", "succeeded"),
        ("evaluate-4", "succeeded"),
    ]
    evaluation = info(world, "evaluate-4")
    assert evaluation.evaluation is not None
    assert evaluation.evaluation.version == 4
    assert {task.version for task in cluster.env.tasks if isinstance(task, Rollout) and not task.collect} == {4}
    listed = world.ask(ListJobs(), JobList).jobs
    assert [job.job for job in listed] == ["evaluate-4", "rl-3", "sft-2", "pipeline-1"]


def test_a_restart_at_any_moment_begins_no_stage_twice() -> None:
    for crash in range(0, 60, 3):
        world = World()
        cluster = Cluster(world)
        push(world)
        job = submit(world, pipeline())
        for step in range(2000):
            if step == crash:
                world.crash()
                for worker in (cluster.trainer, cluster.inference, cluster.env):
                    worker.connect()
            if not cluster.trainer.work(1) + cluster.env.work(1) + cluster.inference.work(1) and step > crash:
                break
        done = info(world, job.job)
        assert (done.state, [stage.job for stage in done.stages]) == ("succeeded", ["sft-2", "rl-3", "evaluate-4"])
        assert len(world.journal.of(JobRecord)) == 4


def test_a_stage_that_fails_ends_the_pipeline_with_its_sentence(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    cluster.env.error = None
    job = submit(world, pipeline(STEPS, rl(create=rl().create, env="metaworld/reach-v9")))
    while info(world, job.job).done < 1:
        assert cluster.trainer.work(1) + cluster.env.work(1) + cluster.inference.work(1)
    cluster.env.error = failure(ErrorCode.INVALID, "there is no task 'reach-v9'")
    cluster.run()
    done = info(world, job.job)
    assert done.state == "failed"
    assert done.message == "stage 2 (rl, job 'rl-3') failed: there is no task 'reach-v9'"
    assert [stage.state for stage in done.stages] == ["succeeded", "failed"]


def test_a_stage_that_is_refused_at_its_turn_ends_the_pipeline_with_its_number_and_reason(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    world.upload("e" * 64)
    files = (FileEntry(path="meta/info.json", digest="e" * 64, nbytes=10),)
    world.tell(PushDataset(dataset="second", files=files))
    job = submit(world, pipeline(STEPS, sft(dataset="second", steps=5), EVALUATE))
    cluster.env.work(1)
    check = cluster.env.inbox.popleft().message
    assert isinstance(check, PrepareDataset)
    faults = (Fault(severity="error", where="meta", what="there is no episode"),)
    world.say(cluster.env.peer, DatasetPrepared(task=check.task, attempt=1, faults=faults))
    cluster.run()
    done = info(world, job.job)
    sentence = "stage 2 (sft) failed: data set 'second' cannot be used: meta: there is no episode"
    assert (done.state, done.message) == ("failed", sentence)
    assert [stage.state for stage in done.stages] == ["succeeded", "failed", "waiting"]
    world.crash()
    assert info(world, job.job) == done


def test_a_stage_that_is_parked_parks_the_pipeline_and_goes_on_with_it(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    veto = failure(ErrorCode.NON_FINITE, "the loss is nan")
    cluster.trainer.errors = dict.fromkeys((2, 3, 4), veto)
    job = submit(world, pipeline(STEPS, EVALUATE))
    cluster.run()
    parked = info(world, job.job)
    assert parked.state == "parked"
    assert "3 steps in a row were vetoed" in parked.message
    assert parked.stages[0].state == "parked"
    cluster.trainer.errors = {}
    world.ask(ResumeJob(job=job.job), JobInfo)
    cluster.run()
    assert info(world, job.job).state == "succeeded"


def test_only_a_parked_pipeline_is_resumed(world: World) -> None:
    push(world)
    job = submit(world, pipeline())
    assert world.refused(ResumeJob(job=job.job)).code is ErrorCode.CONFLICT


def test_cancelling_a_pipeline_cancels_its_stage_and_frees_the_policy(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    job = submit(world, pipeline())
    while info(world, job.job).done < 1:
        assert cluster.trainer.work(1) + cluster.env.work(1) + cluster.inference.work(1)
    cluster.env.work(1)
    world.ask(CancelJob(job=job.job), JobInfo)
    world.crash()
    done = info(world, job.job)
    assert (done.state, info(world, "rl-3").state) == ("cancelled", "cancelled")
    assert [stage.kind for stage in done.stages] == ["sft", "rl", "evaluate"]
    assert world.ask(GetPolicy(policy="p"), PolicyInfo).driver == ""
    assert not any(job.job.startswith("evaluate") for job in world.ask(ListJobs(), JobList).jobs)


@pytest.mark.parametrize("writes", range(6))
def test_a_pipeline_cancelled_while_a_stage_is_being_written_down_leaves_none_running(
    world: World, writes: int
) -> None:
    Cluster(world)
    push(world)
    world.auto_persist = False
    world.tell(SubmitJob(key="k", spec=pipeline()), id="s")
    world.write()  # the pipeline; its first stage is on its way
    cancelled = world.tell(CancelJob(job="pipeline-1"))
    for _ in range(writes):
        if world.unwritten:
            world.write()
    known = bool(world.answers(cancelled))
    world.crash()
    world.auto_persist = True
    world.settle()
    states = {record.job: record.state for record in world.journal.of(JobRecord)}
    assert set(states.values()) == {"cancelled"} or (not known and "cancelled" not in states.values())


def test_cancelling_a_stage_ends_its_pipeline(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    job = submit(world, pipeline())
    cluster.env.work()
    world.ask(CancelJob(job="sft-2"), JobInfo)
    assert info(world, job.job).state == "cancelled"


def test_a_pipeline_says_what_its_stage_waits_for(world: World) -> None:
    push(world)
    job = submit(world, pipeline(rl(), EVALUATE))
    waiting = info(world, job.job)
    assert (waiting.state, waiting.message) == ("waiting", "waits for an env worker that serves metaworld")


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ((STEPS, msgspec.structs.replace(EVALUATE, policy="q")), "stage 2 is about policy 'q'"),
        ((rl(updates=0),), "updates must lie between"),
        ((EVALUATE, STEPS), "there is no policy 'p'"),
        ((STEPS, msgspec.structs.replace(EVALUATE, version=3)), "there is no policy 'p'"),
        ((STEPS, sft(dataset="nowhere")), "there is no data set 'nowhere'"),
    ],
)
def test_a_pipeline_that_could_never_run_is_refused_before_it_begins(
    world: World, stages: tuple[object, ...], says: str
) -> None:
    push(world)
    assert says in world.refused(SubmitJob(key="k", spec=pipeline(*stages))).message


def test_an_empty_pipeline_is_refused(world: World) -> None:
    refused = world.refused(SubmitJob(key="k", spec=PipelineSpec(policy="p", stages=())))
    assert "number of stages must lie between 1" in refused.message


def test_a_later_stage_may_name_no_recipe_of_its_own(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    recipe = SftPolicy(chunk=4)
    job = submit(world, pipeline(sft(steps=5, create=recipe), rl(updates=1)))
    cluster.run()
    assert info(world, job.job).state == "succeeded"


def test_a_stage_without_a_recipe_takes_the_policy_of_the_one_before_it_also_on_another_backbone(world: World) -> None:
    cluster = Cluster(world, backbone="tiny")
    push(world)
    job = submit(world, pipeline(sft(steps=5, create=SftPolicy(backbone="tiny")), rl(updates=1)))
    cluster.run()
    assert info(world, job.job).state == "succeeded"
    assert world.ask(GetPolicy(policy="p"), PolicyInfo).spec.backbone == "tiny"


CAMERA = Camera(name="front", height=8, width=8)


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (sft(create=SftPolicy(chunk=4)), rl(create=RlPolicy(chunk=2)), "its 'chunk' is 4, the job's 'create' says 2"),
        (sft(), rl(create=RlPolicy(chunk=8, cameras=(CAMERA,))), "its 'cameras' is"),
        (rl(), sft(create=SftPolicy(chunk=1, action_target="relative_to_state")), "its 'action_target' is 'absolute'"),
        (sft(create=SftPolicy(chunk=4)), rl(execute=5), "execute is 5, but policy 'p' predicts chunks of 4"),
        (rl(), msgspec.structs.replace(EVALUATE, execute=2), "execute is 2, but policy 'p' predicts chunks of 1"),
    ],
)
def test_a_stage_that_contradicts_the_policy_that_one_before_it_makes_is_refused_with_the_pipeline(
    world: World, first: object, second: object, says: str
) -> None:
    cluster = Cluster(world)
    push(world)
    cluster.run()
    refused = world.refused(SubmitJob(key="k", spec=pipeline(first, second)))
    assert says in refused.message
    if "its" in says:
        assert refused.message.startswith("stage 2 contradicts stage 1, which makes policy 'p': ")


def test_stages_may_say_the_same_recipe_again(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    cluster.run()
    again = RlPolicy(chunk=4, cameras=CONTRACT.cameras)
    job = submit(world, pipeline(sft(steps=5, create=SftPolicy(chunk=4)), rl(updates=1, create=again)))
    cluster.run()
    assert info(world, job.job).state == "succeeded"


# Evaluations over several tasks


def several(**changes: object) -> EvaluateSpec:
    spec = EvaluateSpec(policy="p", env=("metaworld/reach-v3", "metaworld/push-v3"), episodes=7, videos=1)
    return msgspec.structs.replace(spec, **changes)


def test_pages_go_over_tasks_and_seeds() -> None:
    plan = compile_evaluation(several(), page_episodes=5)
    pages = [(plan.task(page), plan.seeds(page), plan.recorded(page)) for page in range(plan.pages)]
    assert pages == [
        ("metaworld/reach-v3", (0, 1, 2, 3, 4), (0,)),
        ("metaworld/reach-v3", (5, 6), ()),
        ("metaworld/push-v3", (0, 1, 2, 3, 4), (0,)),
        ("metaworld/push-v3", (5, 6), ()),
    ]


def test_an_evaluation_over_several_tasks_tells_them_apart(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    submit(world, STEPS, key="train")
    cluster.run()
    job = submit(world, several())
    cluster.run()
    done = info(world, job.job)
    assert (done.state, done.done, done.total) == ("succeeded", 14, 14)
    result = done.evaluation
    assert result is not None
    assert [(task.env, task.successes, task.episodes) for task in result.tasks] == [
        ("metaworld/reach-v3", 4, 7),
        ("metaworld/push-v3", 4, 7),
    ]
    assert (result.successes, result.episodes) == (8, 14)
    assert [episode.env for episode in result.results] == ["metaworld/reach-v3"] * 7 + ["metaworld/push-v3"] * 7
    assert {task.env for task in cluster.env.tasks if isinstance(task, Rollout)} == set(several().tasks)


def test_one_task_alone_gives_what_it_gave_before(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    submit(world, STEPS, key="train")
    cluster.run()
    job = submit(world, EVALUATE)
    cluster.run()
    result = info(world, job.job).evaluation
    assert result is not None
    assert [episode.env for episode in result.results] == [""] * 4
    assert [task.env for task in result.tasks] == ["metaworld/reach-v3"]


def test_an_evaluation_waits_for_the_workers_of_all_its_tasks(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    submit(world, STEPS, key="train")
    cluster.run()
    job = submit(world, several(env=("metaworld/reach-v3", "libero/libero_object/0")))
    cluster.run()
    assert info(world, job.job).message == "waits for an env worker that serves libero"


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ((), "number of tasks must lie between 1"),
        (("metaworld/reach-v3",) * 2, "names a task twice"),
        (("metaworld/reach-v3", "atari/pong"), "no simulator family 'atari'"),
    ],
)
def test_tasks_that_cannot_be_are_refused(world: World, env: tuple[str, ...], says: str) -> None:
    assert says in world.refused(SubmitJob(key="k", spec=several(env=env))).message
