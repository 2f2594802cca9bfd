"""Jobs on one policy that does not exist yet: the first one makes it, those behind it take it as it is then."""

from __future__ import annotations

import pytest

from joynexus.specs import PipelineSpec, PolicySpec, RlPolicy, SftPolicy
from joynexus.wire import ErrorCode
from joynexus.wire.front import CancelJob, GetPolicy, JobInfo, PolicyInfo, SubmitJob
from tests.unit.master.jobs import Cluster, info, push, sft, submit
from tests.unit.master.rl import rl
from tests.unit.master.world import World

TINY = SftPolicy(backbone="tiny", chunk=2)


@pytest.fixture
def cluster(world: World) -> Cluster:
    """A cluster whose only backbone is not the default one."""
    return Cluster(world, backbone="tiny")


def spec(world: World) -> PolicySpec:
    return world.ask(GetPolicy(policy="p"), PolicyInfo).spec


@pytest.mark.parametrize("crash", [False, True])
def test_rl_without_a_recipe_waits_for_the_job_that_makes_its_policy(
    world: World, cluster: Cluster, crash: bool
) -> None:
    push(world)
    submit(world, sft(steps=5, create=TINY), key="make")
    job = submit(world, rl(updates=1), key="improve")
    assert info(world, job.job).message == "waits for job 'sft-1', which makes policy 'p'"
    if crash:
        world.crash()
        for worker in (cluster.trainer, cluster.inference, cluster.env):
            worker.connect()
    cluster.run()
    assert (info(world, "sft-1").state, info(world, "rl-2").state) == ("succeeded", "succeeded")
    assert (spec(world).backbone, spec(world).chunk) == ("tiny", 2)


def test_a_job_waits_for_one_that_is_still_being_written_down(world: World, cluster: Cluster) -> None:
    push(world)
    cluster.run()
    world.auto_persist = False
    first = world.tell(SubmitJob(key="make", spec=sft(steps=5, create=TINY)))
    second = world.tell(SubmitJob(key="improve", spec=rl(updates=1)))
    world.auto_persist = True
    world.settle()
    assert all(isinstance(world.answers(id)[0], JobInfo) for id in (first, second))
    cluster.run()
    assert info(world, "rl-2").state == "succeeded"


def test_a_pipeline_comes_before_what_was_submitted_after_it_whenever_its_stages_begin(
    world: World, cluster: Cluster
) -> None:
    push(world)
    stages = (sft(steps=5, create=TINY), sft(steps=5))
    world.auto_persist = False
    world.tell(SubmitJob(key="make", spec=PipelineSpec(policy="p", stages=stages)))
    world.tell(SubmitJob(key="improve", spec=rl(updates=1)))  # gets its number before the stages
    world.auto_persist = True
    world.settle()
    cluster.run()
    jobs = {name: info(world, name).state for name in ("pipeline-1", "rl-2", "sft-3", "sft-4")}
    assert set(jobs.values()) == {"succeeded"}
    assert spec(world).backbone == "tiny"


def test_a_pipeline_without_a_recipe_waits_too(world: World, cluster: Cluster) -> None:
    push(world)
    submit(world, sft(steps=5, create=TINY), key="make")
    job = submit(world, PipelineSpec(policy="p", stages=(rl(updates=1), sft(steps=5))), key="improve")
    assert info(world, job.job).message == "waits for job 'sft-1', which makes policy 'p'"
    cluster.run()
    assert info(world, job.job).state == "succeeded"


def test_a_job_whose_maker_ends_early_goes_on_by_itself(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    submit(world, sft(create=SftPolicy(chunk=2)), key="make")
    job = submit(world, rl(updates=1), key="improve")
    world.ask(CancelJob(job="sft-1"), JobInfo)
    cluster.run()
    assert info(world, job.job).state == "succeeded"
    assert spec(world).chunk == 1


def test_a_job_that_waited_in_vain_is_refused_what_the_policy_that_it_would_make_cannot_do(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    submit(world, sft(create=SftPolicy(chunk=8)), key="make")
    job = submit(world, rl(updates=1, execute=4), key="improve")
    world.ask(CancelJob(job="sft-1"), JobInfo)
    cluster.run()
    failed = info(world, job.job)
    assert (failed.state, failed.message) == ("failed", "execute is 4, but policy 'p' predicts chunks of 1")
    assert world.refused(GetPolicy(policy="p")).code is ErrorCode.NOT_FOUND


def test_a_job_with_a_recipe_of_its_own_does_not_wait_for_others(world: World, cluster: Cluster) -> None:
    push(world)
    submit(world, sft(steps=5, create=TINY), key="make")
    job = submit(world, rl(updates=1, create=RlPolicy(backbone="tiny")), key="own")
    assert info(world, job.job).message == ""


def test_without_a_maker_a_backbone_that_is_not_there_is_refused_as_before(world: World, cluster: Cluster) -> None:
    refused = world.refused(SubmitJob(key="k", spec=rl()))
    assert refused.code is ErrorCode.INVALID
    assert "no trainer here has backbone 'lite'" in refused.message
