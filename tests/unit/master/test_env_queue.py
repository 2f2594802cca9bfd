"""Work for env workers: whoever has a simulator ready comes first, and nobody starves for that."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from common.blobs import BlobStore
from common.journal.journal import Journal, journal_url
from common.settings import MasterSettings, load_settings
from joynexus.specs import EvaluateSpec
from joynexus.wire import ErrorCode
from joynexus.wire.back import Leaving, Rollout
from joynexus.wire.front import CancelJob, ClusterStatus, GetJob, JobInfo, Status
from services.master.config import CoreConfig
from services.master.make_core import make_core
from services.master.sources import ShellSources
from tests.unit.master.actors import FakeEnv, FakeInference, FakeTrainer, new_incarnation
from tests.unit.master.jobs import Cluster, info, push, sft, submit
from tests.unit.master.rl import check, rl
from tests.unit.master.world import FakeWorker, World, run

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


WIDE = {"simulator": 3, "data": 2}


def evaluate(env: str, episodes: int) -> EvaluateSpec:
    return EvaluateSpec(policy="p", env=env, episodes=episodes)


def die_over(world: World, guilty: str, *, lives: int, count: int = 1) -> list[list[int]]:
    """Workers that die over one simulator task, one life after another; return how much each had at once, by life."""
    together = []
    for life in range(lives):
        workers = [FakeEnv(world, new_incarnation(), key=f"life{life}-{n}", credit=WIDE) for n in range(count)]
        had = [len(worker.inbox) for worker in workers]
        while any(worker.inbox for worker in workers):
            for worker in workers:
                if any(isinstance(send.message, Rollout) and send.message.env == guilty for send in worker.inbox):
                    worker.die()
                elif worker.inbox:
                    worker.work(1)
        together.append(had)
        for worker in workers:
            if worker.peer in world.actors:
                worker.die()
        world.wait(8)
    return together


def test_work_that_kills_its_workers_takes_nobody_elses_with_it() -> None:
    world = World()
    with_policies(world, "a", "b", "c")
    jobs = {
        tenant: submit(world, evaluate(env, 5), key="e", tenant=tenant)
        for tenant, env in (("a", REACH), ("b", PUSH), ("c", REACH))
    }
    (first, *later) = die_over(world, PUSH, lives=2 + CoreConfig().kills)
    assert first == [3], "they ran side by side"
    assert later[0] == [1], "and nobody does after a death"
    states = {tenant: info(world, job.job, tenant=tenant) for tenant, job in jobs.items()}
    assert (states["a"].state, states["c"].state) == ("succeeded", "succeeded")
    error = states["b"].error
    assert error is not None
    assert error.code is ErrorCode.POISON


def test_only_deaths_over_a_piece_alone_count_against_it() -> None:
    world = World(CoreConfig(kills=2))
    with_policies(world, "a", "b")
    jobs = [submit(world, evaluate(REACH, 5), key="e", tenant=t) for t in ("a", "b")]
    for life in range(3):  # over both; over one; over the other
        FakeEnv(world, new_incarnation(), key=f"env{life}", credit=WIDE).die()
        world.wait(8)
    assert [info(world, job.job, tenant=t).error for job, t in zip(jobs, "ab", strict=True)] == [None, None]
    env = FakeEnv(world, new_incarnation(), key="env", credit=WIDE)
    run(env)
    assert [info(world, job.job, tenant=t).state for job, t in zip(jobs, "ab", strict=True)] == ["succeeded"] * 2


def test_how_many_deaths_are_borne_is_the_operators_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JOYNEXUS_MAX_KILLS", "10000")
    journal = Journal(journal_url(tmp_path / "journal.db"))
    try:
        core = make_core(load_settings(MasterSettings), ShellSources(journal, BlobStore(tmp_path)), 0.0)
    finally:
        journal.close()
    assert core._env._config.kills == 10_000


def test_after_a_death_the_pieces_go_alone_to_as_many_workers_as_are_free() -> None:
    world = World()
    with_policies(world, "a", "b")
    for tenant in ("a", "b"):
        submit(world, evaluate(REACH, 10), key="e", tenant=tenant)
    first = FakeEnv(world, new_incarnation(), key="first", credit=WIDE)
    assert len(first.inbox) == 3
    first.die()
    world.wait(8)
    workers = [FakeEnv(world, new_incarnation(), key=f"env{n}", credit=WIDE) for n in range(4)]
    assert [len(worker.inbox) for worker in workers] == [1, 1, 1, 1], "three alone; the fourth has what had not run yet"


def test_a_busy_worker_is_emptied_for_what_must_be_alone_and_the_others_go_on() -> None:
    world = World()
    with_policies(world, "a", "b")
    doomed = FakeEnv(world, new_incarnation(), key="doomed", credit={"simulator": 1})
    suspect = submit(world, evaluate(PUSH, 5), key="e", tenant="b")
    assert len(doomed.inbox) == 1
    workers = [FakeEnv(world, new_incarnation(), key=f"env{n}", credit=WIDE) for n in range(2)]
    submit(world, evaluate(REACH, 200), key="e", tenant="a")
    assert [len(worker.inbox) for worker in workers] == [3, 3]
    doomed.die()
    for _ in range(8):
        world.wait(1.0)
        for worker in workers:
            worker.beat()
    alone = None
    for _ in range(12):
        for worker in workers:
            worker.work(1)
            has = [send.message.env for send in worker.inbox if isinstance(send.message, Rollout)]
            if PUSH in has:
                assert has == [PUSH]
                alone = worker
        assert max(len(worker.inbox) for worker in workers) == 3, "whoever is not emptied goes on"
    assert alone is not None
    assert len(alone.inbox) == 3, "and afterwards it works as before"
    assert info(world, suspect.job, tenant="b").state == "succeeded"


def test_a_worker_that_was_emptied_for_nothing_works_on() -> None:
    world = World()
    with_policies(world, "a", "b")
    doomed = FakeEnv(world, new_incarnation(), key="doomed", credit={"simulator": 1})
    guilty = submit(world, evaluate(PUSH, 5), key="e", tenant="b")
    worker = FakeEnv(world, new_incarnation(), key="env", credit=WIDE)
    submit(world, evaluate(REACH, 200), key="e", tenant="a")
    doomed.die()
    for _ in range(8):
        world.wait(1.0)
        worker.beat()
    worker.work(1)
    assert len(worker.inbox) == 2, "it is being emptied"
    status = world.ask(Status(), ClusterStatus, tenant="b")
    assert [lane.waiting for lane in status.lanes if lane.queue == "env"] == [1]
    world.ask(CancelJob(job=guilty.job), JobInfo, tenant="b")
    assert len(worker.inbox) == 3


def phases(world: World) -> dict[str, str]:
    """What operators see of env workers, by name."""
    status = world.ask(Status(), ClusterStatus, operator=True)
    return {role.worker: role.phase for role in status.roles if role.role == "env" and role.phase != "lost"}


def take_turns(*workers: FakeWorker) -> None:
    """Have each do one piece of work after the other until nobody has any."""
    while sum(worker.work(1) for worker in workers):
        pass


def work_of(env: FakeEnv, name: str) -> int:
    return sum(isinstance(task, Rollout) and task.env == name for task in env.tasks)


def test_a_worker_that_makes_nothing_of_what_others_do_well_gets_no_more_work_until_it_is_restarted() -> None:
    world = World()
    with_policies(world, "a", "b")
    well, broken = envs(world, 2)
    broken.broken = {REACH}
    jobs = [submit(world, evaluate(REACH, 60), key="e", tenant=tenant) for tenant in ("a", "b")]
    inference = FakeInference(world, new_incarnation(), key="inference")
    take_turns(well, broken, inference)
    for job, tenant in zip(jobs, "ab", strict=True):
        ended = info(world, job.job, tenant=tenant)
        assert ended.state == "succeeded"
        assert ended.evaluation is not None
        (task,) = ended.evaluation.tasks
        assert (task.episodes, task.successes, set(task.failures)) == (60, 30, {"limit"}), "no episode was lost"
    assert 3 <= work_of(broken, REACH) <= 6, "a few more were on their way"
    quarantined = next(name for name, phase in phases(world).items() if phase == "quarantined")
    assert [log.fields["worker"] for log in world.logs if log.event == "worker_quarantined"] == [quarantined]
    role = next(r for r in world.ask(Status(), ClusterStatus, operator=True).roles if r.worker == quarantined)
    assert "3 pieces of work for metaworld in a row came to nothing here" in role.detail["quarantined"]
    broken.die()
    for _ in range(8):
        world.wait(1)
        well.beat()
    assert quarantined not in phases(world)
    broken.connect()
    assert phases(world)[quarantined] == "quarantined", "it was only silent"
    broken.die()
    restarted = FakeEnv(world, new_incarnation(), key="env1")
    for _ in range(8):
        world.wait(1)
        well.beat()
        restarted.beat()
    submit(world, evaluate(REACH, 60), key="again", tenant="a")
    assert len(restarted.inbox) == 1
    assert "quarantined" not in phases(world).values()


def test_work_that_comes_to_nothing_everywhere_costs_no_worker_its_name() -> None:
    world = World()
    with_policies(world, "a", "b")
    workers = envs(world, 2)
    for worker in workers:
        worker.broken = {PUSH}
    bad, good = (submit(world, evaluate(env, 60), key="e", tenant=t) for t, env in (("b", PUSH), ("a", REACH)))
    inference = FakeInference(world, new_incarnation(), key="inference")
    take_turns(*workers, inference)
    assert info(world, good.job, tenant="a").state == "succeeded"
    ended = info(world, bad.job, tenant="b")
    assert ended.evaluation is None or ended.evaluation.tasks[0].successes == 0
    pages = 60 // 5
    assert sum(work_of(worker, PUSH) for worker in workers) <= 2 * pages, "each is tried twice at most"
    assert all(work_of(worker, PUSH) for worker in workers)
    assert "quarantined" not in phases(world).values()


def test_work_that_waits_for_another_worker_goes_back_when_there_is_none() -> None:
    world = World()
    with_policies(world, "a")
    broken, other = envs(world, 2)
    broken.broken = {REACH}
    job = submit(world, evaluate(REACH, 60), key="e", tenant="a")
    broken.work(1)
    other.die()
    for _ in range(10):
        world.wait(1.0)
        broken.beat()
    take_turns(broken, FakeInference(world, new_incarnation(), key="inference"))
    assert info(world, job.job, tenant="a").state in ("succeeded", "failed")
    assert "quarantined" not in phases(world).values(), "nobody did it well"


def test_what_a_worker_does_well_ends_the_row_of_what_came_to_nothing() -> None:
    world = World()
    with_policies(world, "a")
    well, shaky = envs(world, 2)
    inference = FakeInference(world, new_incarnation(), key="inference")
    for round_ in range(6):
        shaky.broken = {REACH} if round_ % 3 else set()
        job = submit(world, evaluate(REACH, 10), key=f"e{round_}", tenant="a")
        take_turns(shaky, well, inference)
        assert info(world, job.job, tenant="a").state == "succeeded"
    assert "quarantined" not in phases(world).values()
