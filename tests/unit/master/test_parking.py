"""Parked jobs, jobs that ended long ago, and policies that could never be built."""

from __future__ import annotations

import math

import msgspec
import pytest

from common.journal.records import CurveRecord, JobRecord, PageRecord
from joynexus.specs import EvaluateSpec, SftPolicy
from joynexus.wire.errors import ErrorCode, failure
from joynexus.wire.front import (
    AcquireLease,
    CancelJob,
    CreatePolicy,
    GetPolicy,
    JobInfo,
    JobList,
    ListJobs,
    OpResult,
    OptimStep,
    PolicyInfo,
    ResumeJob,
    SubmitJob,
)
from services.master.config import CoreConfig
from tests.unit.master.actors import FakeEnv, FakeTrainer, new_incarnation
from tests.unit.master.jobs import Cluster, info, push, sft, submit
from tests.unit.master.world import SPEC, World

VETO = failure(ErrorCode.NON_FINITE, "the loss is nan")


def parked(world: World, cluster: Cluster) -> JobInfo:
    """Train until three steps in a row were vetoed: the ops 41 to 43."""
    cluster.trainer.errors = dict.fromkeys((7, 41, 42, 43), VETO)
    push(world)
    job = submit(world, sft())
    cluster.run()
    return info(world, job.job)


def straight(errors: dict[int, object]) -> tuple[float, ...]:
    """The curve of the same job when nothing parks it."""
    world = World(CoreConfig(vetoes=1000))
    cluster = Cluster(world)
    cluster.trainer.errors = errors  # type: ignore[assignment]
    push(world)
    job = submit(world, sft())
    cluster.run()
    return info(world, job.job).losses


def same(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return [repr(loss) for loss in one] == [repr(loss) for loss in other]


def test_three_vetoes_in_a_row_park_the_job_with_the_reason_and_its_lease(world: World) -> None:
    job = parked(world, Cluster(world))
    assert (job.state, job.done) == ("parked", 43)
    assert "the loss is nan" in job.message
    assert "3 steps in a row" in job.message
    assert job.error is not None
    assert job.error.code is ErrorCode.NON_FINITE
    assert world.ask(GetPolicy(policy="p"), PolicyInfo).driver == f"job:{job.job}"
    assert world.refused(AcquireLease(policy="p", holder="me")).code is ErrorCode.CONFLICT


def test_nothing_behind_the_third_veto_is_trained_on_and_a_resumed_job_ends_as_if_never_parked(world: World) -> None:
    cluster = Cluster(world)
    job = parked(world, cluster)
    assert world.core._training._trainees["a", "p"].policy.applied == 43  # ops behind it were queued already
    assert world.ask(ResumeJob(job=job.job), JobInfo).state == "running"
    cluster.run()
    done = info(world, job.job)
    assert (done.state, done.done) == ("succeeded", 100)
    assert same(done.losses, straight(dict.fromkeys((7, 41, 42, 43), VETO)))
    assert not any(log.event == "replay_differs" for log in world.logs)


def test_after_resuming_vetoes_count_from_zero(world: World) -> None:
    cluster = Cluster(world)
    job = parked(world, cluster)
    cluster.trainer.errors |= dict.fromkeys((44, 45), VETO)
    world.ask(ResumeJob(job=job.job), JobInfo)
    cluster.run()
    assert info(world, job.job).state == "succeeded"


def test_a_parked_job_survives_a_restart_and_goes_on_where_it_stopped(world: World) -> None:
    job = parked(world, Cluster(world))
    world.crash()
    cluster = Cluster(world)
    cluster.run()
    again = info(world, job.job)
    assert (again.state, again.done, again.message) == ("parked", 43, job.message)
    assert not cluster.trainer.applied, "it issues and replays nothing"
    cluster.trainer.errors = dict.fromkeys((41, 42, 43), VETO)  # the same steps come out the same
    world.ask(ResumeJob(job=job.job), JobInfo)
    cluster.run()
    assert same(info(world, job.job).losses, straight(dict.fromkeys((7, 41, 42, 43), VETO)))


def test_a_resumed_job_does_not_count_old_vetoes_after_a_restart(world: World) -> None:
    job = parked(world, Cluster(world))
    world.ask(ResumeJob(job=job.job), JobInfo)
    world.crash()
    Cluster(world).run()
    assert info(world, job.job).state == "succeeded"


def test_a_job_whose_third_veto_was_durable_but_not_its_parking_is_parked_after_the_restart(world: World) -> None:
    job = parked(world, Cluster(world))
    (record,) = world.journal.of(JobRecord)
    world.journal.append([msgspec.structs.replace(record, state="running", error=None)])
    world.crash()
    assert info(world, job.job).state == "parked"


def test_a_parked_job_can_be_cancelled_and_what_was_held_back_is_never_done(world: World) -> None:
    cluster = Cluster(world)
    job = parked(world, cluster)
    assert world.ask(CancelJob(job=job.job), JobInfo).state == "cancelled"
    lease = world.lease()
    next_seq = world.ask(GetPolicy(policy="p"), PolicyInfo).next_seq
    id = world.tell(OptimStep(policy="p", lease=lease, seq=next_seq))
    cluster.run()
    assert isinstance(world.answers(id)[-1], OpResult)
    assert cluster.trainer.slots["a", "p"].step == 43 - 4 + 1
    ended = info(world, job.job)
    assert (ended.done, ended.state) == (43, "cancelled")
    world.crash()
    assert info(world, job.job).done == 43


@pytest.mark.parametrize("dies", ["", "master", "trainer"])
def test_when_a_job_is_cancelled_only_what_a_trainer_has_is_still_trained_on(dies: str) -> None:
    world = World(CoreConfig(group_ops=4))
    cluster = Cluster(world)
    push(world)
    job = submit(world, sft())
    cluster.env.work()
    with_trainer = [item.seq for send in cluster.trainer.inbox for item in send.message.items]  # type: ignore[attr-defined]
    policy = world.core._training._trainees["a", "p"].policy
    assert (with_trainer, policy.journaled) == ([1, 2, 3, 4, 5, 6, 7, 8], 32)
    assert world.ask(CancelJob(job=job.job), JobInfo).state == "cancelled"
    if dies == "master":
        world.crash()
        cluster = Cluster(world)
    elif dies == "trainer":
        cluster.trainer.die()
        world.wait(10)
        cluster = Cluster(world)
    cluster.run()
    done = 0 if dies else 8
    assert {seq for _, _, seq in cluster.trainer.applied} == set(range(1, done + 1))
    policy = world.core._training._trainees["a", "p"].policy
    assert policy.applied == policy.journaled == 32
    assert info(world, job.job).done == done
    id = world.tell(OptimStep(policy="p", lease=world.lease(), seq=33))
    cluster.run()
    result = world.answers(id)[-1]
    assert isinstance(result, OpResult)
    assert (result.error, cluster.trainer.slots["a", "p"].step) == (None, done + 1)


def test_ops_that_were_on_their_way_to_the_disk_when_their_job_was_cancelled_are_never_done(world: World) -> None:
    env = FakeEnv(world, new_incarnation(), key="env")
    push(world)
    env.work()
    job = submit(world, sft())
    world.auto_persist = False
    env.work()
    world.tell(CancelJob(job=job.job))
    world.auto_persist = True
    world.settle()
    trainer = FakeTrainer(world, new_incarnation())
    trainer.work()
    policy = world.core._training._trainees["a", "p"].policy
    assert policy.applied == policy.journaled == 32
    assert not trainer.applied


def test_only_a_parked_job_is_resumed(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    job = submit(world, sft())
    cluster.run()
    refused = world.refused(ResumeJob(job=job.job))
    assert (refused.code, "succeeded" in refused.message) == (ErrorCode.CONFLICT, True)
    assert world.refused(ResumeJob(job="sft-9")).code is ErrorCode.NOT_FOUND
    assert world.refused(ResumeJob(job=job.job), tenant="b").code is ErrorCode.NOT_FOUND


def test_a_step_that_kills_three_trainers_parks_its_job_and_is_left_out_when_it_goes_on(world: World) -> None:
    push(world)
    job = submit(world, sft())
    for _life in range(1 + CoreConfig().kills):  # the first one had other steps as well
        cluster = Cluster(world)
        cluster.trainer.killed_by = {5}
        cluster.run()
        cluster.trainer.die()
        world.wait(10)
    stopped = info(world, job.job)
    assert (stopped.state, stopped.done) == ("parked", 5)
    assert stopped.error is not None
    assert stopped.error.code is ErrorCode.POISON
    world.ask(ResumeJob(job=job.job), JobInfo)
    Cluster(world).run()
    done = info(world, job.job)
    assert done.state == "succeeded"
    assert [step for step, loss in enumerate(done.losses) if math.isnan(loss)] == [4]


# Jobs that ended long ago


def test_only_the_newest_ended_jobs_are_kept_also_in_the_journal() -> None:
    world = World(CoreConfig(kept_jobs=2))
    cluster = Cluster(world)
    push(world)
    jobs = []
    for number in range(4):
        jobs.append(submit(world, sft(steps=10, checkpoint_every=5), key=f"k{number}").job)
        cluster.run()
    spec = EvaluateSpec(policy="p", env="metaworld/reach-v3", episodes=5, videos=1)
    for number in range(3):
        jobs.append(submit(world, spec, key=f"e{number}").job)
        cluster.run()
    for _ in range(2):
        kept = [job.job for job in world.ask(ListJobs(), JobList).jobs]
        assert kept == jobs[:-3:-1]
        assert {record.job for record in world.journal.of(JobRecord)} == set(kept)
        assert not world.journal.of(CurveRecord)
        assert {record.job for record in world.journal.of(PageRecord)} == set(kept)
        world.crash()
        cluster = Cluster(world)
    assert submit(world, sft(steps=10), key="new").job == "sft-8", "numbers are not used again"


# Specs that no trainer can build


def test_a_policy_that_could_never_be_built_is_created_again_with_another_spec(world: World) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    trainer.refuses = failure(ErrorCode.INVALID, "oft has no option 'wdith'")
    wrong = msgspec.structs.replace(SPEC, head_config={"wdith": 3})
    right = msgspec.structs.replace(SPEC, head_config={"width": 3})
    world.create(spec=wrong)
    assert world.refused(CreatePolicy(policy="p", spec=right)).code is ErrorCode.CONFLICT
    lease = world.lease()
    world.tell(OptimStep(policy="p", lease=lease, seq=1))
    trainer.work()
    trainer.refuses = None
    assert world.refused(CreatePolicy(policy="p", spec=right)).code is ErrorCode.CONFLICT, "a loop drives it"
    world.wait(61)
    trainer.connect()
    assert world.create(spec=right).spec == right
    for restarted in (False, True):
        if restarted:
            world.crash()
            trainer = FakeTrainer(world, new_incarnation())
        lease, seq = world.lease(), world.ask(GetPolicy(policy="p"), PolicyInfo).next_seq
        id = world.tell(OptimStep(policy="p", lease=lease, seq=seq))
        trainer.work()
        result = world.answers(id)[-1]
        assert isinstance(result, OpResult)
        assert result.error is None
        assert trainer.groups[0 if restarted else -1].slots[0].spec == right
    assert world.refused(CreatePolicy(policy="p", spec=wrong)).code is ErrorCode.CONFLICT, "it has weights now"


def test_a_job_whose_recipe_could_not_be_built_does_not_use_the_name_up(world: World) -> None:
    cluster = Cluster(world)
    cluster.trainer.refuses = failure(ErrorCode.INVALID, "oft has no option 'wdith'")
    push(world)
    job = submit(world, sft(create=SftPolicy(head_config={"wdith": 3})))
    cluster.run()
    assert "wdith" in info(world, job.job).message
    cluster.trainer.refuses = None
    again = world.ask(SubmitJob(key="again", spec=sft(create=SftPolicy(head_config={"width": 3}))), JobInfo)
    cluster.run()
    assert info(world, again.job).state == "succeeded"
