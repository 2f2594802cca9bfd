"""Jobs that evaluate: each seed counts once, whoever dies over it."""

from __future__ import annotations

import pytest

from common.journal.records import PageRecord
from joynexus.specs import EvaluateDatasetSpec
from joynexus.wire import ErrorCode, encode
from joynexus.wire.back import ActionsEvaluated, DatasetPrepared, EvaluateActions, PredictDone, Rollout, TrainDone
from joynexus.wire.errors import failure
from joynexus.wire.front import (
    ActionError,
    CancelJob,
    EpisodeResult,
    GetPolicy,
    GetUsage,
    JobInfo,
    OpResult,
    PolicyInfo,
    SubmitJob,
    UsageReport,
)
from services.master import checks
from services.master.config import CoreConfig
from services.master.plan import summarize, wilson
from tests.unit.master.actors import FakeEnv, new_incarnation
from tests.unit.master.jobs import Cluster, evaluated, evaluation, info, sft, submit
from tests.unit.master.world import World


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
