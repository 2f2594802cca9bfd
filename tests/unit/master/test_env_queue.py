"""Work for env workers: whoever has a simulator ready comes first, and nobody starves for that."""

from __future__ import annotations

import itertools

from joynexus.specs import EvaluateSpec
from joynexus.wire.back import Leaving, Rollout
from joynexus.wire.front import CancelJob, GetJob, JobInfo
from tests.unit.master.actors import FakeEnv, FakeInference, FakeTrainer, new_incarnation
from tests.unit.master.test_jobs import Cluster, info, push, sft, submit
from tests.unit.master.test_rl import check, rl
from tests.unit.master.world import World, run

REACH, PUSH = "metaworld/reach-v3", "metaworld/push-v3"


def with_policies(world: World, *tenants: str) -> None:
    """A policy with a version for each tenant; its workers are gone again."""
    cluster = Cluster(world)
    for tenant in tenants:
        push(world, tenant=tenant)
        submit(world, sft(steps=1), tenant=tenant)
    cluster.run()
    for worker in (cluster.trainer, cluster.inference, cluster.env):
        worker.die()
    world.wait(8)


def envs(world: World, count: int) -> list[FakeEnv]:
    return [FakeEnv(world, new_incarnation(), key=f"env{number}") for number in range(count)]


def tasks(env: FakeEnv) -> list[str]:
    return [task.env for task in env.tasks if isinstance(task, Rollout)]


def changes(names: list[str]) -> int:
    return sum(one != other for one, other in itertools.pairwise(names))


def test_workers_stay_with_the_simulator_they_have_ready_while_both_tenants_get_their_share() -> None:
    world = World()
    with_policies(world, "a", "b")
    inference = FakeInference(world, new_incarnation(), key="inference")
    workers = envs(world, 2)
    for tenant, env in (("a", REACH), ("b", PUSH)):
        submit(world, EvaluateSpec(policy="p", env=env, episodes=60), key="e", tenant=tenant)
    for _ in range(10):
        for worker in workers:
            worker.work(1)
        inference.work()
    names = [tasks(worker) for worker in workers]
    assert all(changes(each) <= 2 for each in names), names
    done = [sum(env == wanted for each in names for env in each) for wanted in (REACH, PUSH)]
    assert abs(done[0] - done[1]) <= 4, done


def test_one_worker_serves_two_tenants_by_turns_of_a_few_tasks() -> None:
    world = World()
    with_policies(world, "a", "b")
    (worker,) = envs(world, 1)
    for tenant, env in (("a", REACH), ("b", PUSH)):
        submit(world, EvaluateSpec(policy="p", env=env, episodes=100), key="e", tenant=tenant)
    worker.work(30)
    names = tasks(worker)
    assert 2 <= changes(names) <= 15, names
    for upto in range(1, 30):
        done = [names[:upto].count(env) for env in (REACH, PUSH)]
        assert abs(done[0] - done[1]) <= 4, names


def test_a_task_goes_to_the_free_worker_that_has_it_ready() -> None:
    world = World()
    with_policies(world, "a")
    workers = envs(world, 3)
    for round_, env in enumerate((REACH, PUSH, REACH, PUSH, REACH)):
        job = submit(world, EvaluateSpec(policy="p", env=env, episodes=1), key=f"e{round_}")
        run(*workers)
        assert info(world, job.job).state == "succeeded"
    assert sorted(tasks(worker) for worker in workers) == [[], [PUSH] * 2, [REACH] * 3]


def test_workers_that_join_and_leave_in_the_middle_change_nothing_but_who_does_the_work() -> None:
    world = World()
    trainer = FakeTrainer(world, new_incarnation(), key="trainer")
    inference = FakeInference(world, new_incarnation(), key="inference")
    pool = envs(world, 1)
    spec = rl(updates=12, max_staleness=1, episodes=32)
    job = submit(world, spec)
    number = 1
    for turn in range(2000):
        if turn % 7 == 3 and len(pool) < 4:
            number += 1
            pool.append(FakeEnv(world, new_incarnation(), key=f"joiner{number}"))
        if turn % 11 == 5 and len(pool) > 1:
            leaver = pool.pop(0)
            world.say(leaver.peer, Leaving())
            leaver.work()  # finishes what it has
            leaver.die()
        if not trainer.work(1) + inference.work(1) + sum(worker.work(1) for worker in pool):
            break
    assert number > 4
    assert world.ask(GetJob(job=job.job), JobInfo).state == "succeeded"
    check(world, spec)


def test_work_that_was_cancelled_leaves_nothing_behind_though_nobody_serves_it() -> None:
    world = World()
    with_policies(world, "a", "b")
    kept = submit(world, EvaluateSpec(policy="p", env="libero/libero_object/0", episodes=5), key="kept", tenant="b")
    for number in range(20):
        spec = EvaluateSpec(policy="p", env="libero/libero_object/0", episodes=50)
        job = submit(world, spec, key=f"e{number}")
        world.ask(CancelJob(job=job.job), JobInfo)
    assert sum(map(len, world.core._env._waiting.values())) == 1
    (worker,) = [FakeEnv(world, new_incarnation(), key="env", serves=("libero",))]
    worker.work()
    assert info(world, kept.job, tenant="b").state == "succeeded"
