"""RL jobs: two loops that meet in the Training queue, and nothing lost, repeated or too old between them."""

from __future__ import annotations

import msgspec
import pytest

from common.journal.records import CurveRecord, PageRecord, VersionRecord
from joynexus.specs import EvaluateSpec, GrpoSpec, PpoSpec, RlPolicy, RlSpec
from joynexus.wire import ErrorCode
from joynexus.wire.back import DescribeSimulator, RlBegin, RlEpoch
from joynexus.wire.front import CancelJob, CreatePolicy, GetVersion, PolicyInfo, SubmitJob, VersionInfo
from services.master.plan import compile_rl
from tests.unit.master.actors import PAGES, FakeEnv, new_incarnation
from tests.unit.master.jobs import Cluster, info, submit
from tests.unit.master.rl import check, items, policy, rl, rollouts, versions
from tests.unit.master.world import CONTRACT, SPEC, STATISTICS, World, run

# The loop


def test_an_rl_job_creates_its_policy_from_the_simulator_and_improves_it(world: World) -> None:
    cluster = Cluster(world)
    job = submit(world, rl())
    cluster.run()
    done = info(world, job.job)
    assert (done.state, done.done, done.total) == ("succeeded", 4, 4)
    assert (done.initial_version, done.version) == (1, 5)
    spec = policy(world).spec
    assert spec.contract == msgspec.structs.replace(CONTRACT, cameras=())
    assert (spec.statistics, spec.chunk) == (STATISTICS, 1)
    described = cluster.env.tasks[0]
    assert isinstance(described, DescribeSimulator)
    assert (described.warmup_episodes, described.cameras, described.seed) == (8, (), 1_000_000)
    kinds = [item.kind for item in items(cluster.trainer)]
    assert kinds == ["rl_begin", "publish", *["rl_epoch", "rl_epoch", "publish"] * 4]
    check(world, rl())


def test_ops_say_all_that_the_trainer_needs_to_know(world: World) -> None:
    cluster = Cluster(world)
    submit(world, rl(algorithm=PpoSpec(epochs=2, level="action"), create=RlPolicy(chunk=4), reward_scale=0.5))
    cluster.run()
    begin, _, first, second, *_ = items(cluster.trainer)
    assert isinstance(begin.rl, RlBegin)
    assert begin.rl.critic is not None
    assert begin.rl.values == 4
    assert begin.rl.optimizer == policy(world).spec.optimizer
    assert isinstance(first.rl, RlEpoch)
    assert isinstance(second.rl, RlEpoch)
    assert (first.rl.update, first.rl.epoch, second.rl.epoch) == (0, 0, 1)
    assert (first.rl.reward_scale, first.rl.seed, first.rl.weight_limit) == (0.5, 3, 0.0)
    assert len(first.rl.rollouts) == 2
    assert first.feature_scope == "tenant:a"  # where what was explored from is found again
    page = rollouts(cluster.env)[0]
    assert page.collect is not None
    assert page.collect.value


def test_grpo_has_no_critic_and_whole_advantage_groups_in_each_page(world: World) -> None:
    cluster = Cluster(world)
    spec = rl(algorithm=GrpoSpec(epochs=2, group_size=4), episodes=12)
    job = submit(world, spec)
    cluster.run()
    assert info(world, job.job).state == "succeeded"
    begin = items(cluster.trainer)[0].rl
    assert isinstance(begin, RlBegin)
    assert (begin.critic, begin.values) == (None, 0)
    pages = rollouts(cluster.env)
    assert [len(page.seeds) for page in pages[:2]] == [8, 4]
    assert pages[0].seeds == (1_000_000,) * 4 + (1_000_001,) * 4
    assert len({draw for page in pages for draw in page.draws}) == 4 * 12
    check(world, spec)


def test_a_group_larger_than_a_page_is_one_page() -> None:
    plan = compile_rl(rl(algorithm=GrpoSpec(group_size=16), episodes=32), rollout_episodes=8)
    assert (plan.pages, len(plan.page(0)[0])) == (2, 16)


def test_the_learning_curve_says_how_each_update_went(world: World) -> None:
    cluster = Cluster(world)
    job = submit(world, rl())
    cluster.run()
    points = info(world, job.job).updates
    assert [point.update for point in points] == [0, 1, 2, 3]
    assert [point.version for point in points] == [2, 3, 4, 5]
    assert {(point.episodes, point.steps, point.success, point.reward, point.length) for point in points} == {
        (12, 120, 0.5, 1.0, 10.0)
    }
    assert len({point.metrics["policy_loss"] for point in points}) == 4
    assert info(world, job.job, since=3).updates == points[3:]
    before = info(world, job.job)
    world.crash()
    assert info(world, job.job) == before
    assert (before.samples, before.backbone_forwards) == (8, 8)  # what the fake trainer counts for each epoch


def test_without_staleness_rollouts_and_training_take_turns(world: World) -> None:
    cluster = Cluster(world)
    submit(world, rl())
    run(cluster.env)
    cluster.trainer.work()
    run(cluster.env)
    assert len(rollouts(cluster.env)) == 2
    cluster.run()
    assert [page.version for page in rollouts(cluster.env)] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_asynchronous_rollouts_run_ahead_as_far_as_staleness_allows(world: World) -> None:
    cluster = Cluster(world)
    spec = rl(max_staleness=2)
    submit(world, spec)
    run(cluster.env)
    cluster.trainer.work()  # begins, publishes, and has nothing to train on
    run(cluster.env)
    assert [page.version for page in rollouts(cluster.env)] == [1] * 6  # three updates of two pages
    cluster.run()
    check(world, spec)
    epoch = items(cluster.trainer)[2].rl
    assert isinstance(epoch, RlEpoch)
    assert epoch.weight_limit == spec.weight_limit
    done = info(world, "rl-1")
    assert max(point.staleness for point in done.updates) == 2


def test_a_job_stops_early_once_its_episodes_succeed_often_enough(world: World) -> None:
    cluster = Cluster(world)
    job = submit(world, rl(stop_at=0.5))
    cluster.run()
    done = info(world, job.job)
    assert (done.state, done.done, done.total, done.version) == ("succeeded", 1, 1, 2)
    assert len(rollouts(cluster.env)) == 2
    world.crash()
    assert info(world, job.job) == done


def test_rollouts_ahead_are_dropped_when_a_job_stops_early(world: World) -> None:
    cluster = Cluster(world)
    job = submit(world, rl(stop_at=0.5, max_staleness=3))
    cluster.run()
    assert info(world, job.job).done == 1
    assert not world.journal.of(PageRecord)
    assert set(world.deleted) & set(PAGES)


def test_a_policy_that_exists_is_improved_with_its_own_recipe(world: World) -> None:
    cluster = Cluster(world)
    world.ask(CreatePolicy(policy="p", spec=SPEC), PolicyInfo)
    job = submit(world, rl())
    cluster.run()
    assert info(world, job.job).state == "succeeded"
    (described,) = (task for task in cluster.env.tasks if isinstance(task, DescribeSimulator))
    assert described.warmup_episodes == 0
    assert policy(world).spec == SPEC


def test_a_policy_that_does_not_fit_the_simulator_is_refused_before_anything_of_it_changes(world: World) -> None:
    cluster = Cluster(world)
    contract = msgspec.structs.replace(SPEC.contract, action_dim=SPEC.contract.action_dim + 1)
    spec = msgspec.structs.replace(SPEC, contract=contract, normalization="none", statistics=None)
    world.ask(CreatePolicy(policy="p", spec=spec), PolicyInfo)
    job = submit(world, rl())
    cluster.run()
    ended = info(world, job.job)
    assert ended.error is not None
    assert ended.error.code is ErrorCode.CONTRACT_MISMATCH
    assert "policy 'p' does not fit 'metaworld/reach-v3': contract field 'action_dim' differs" in ended.message
    assert policy(world).next_seq == 1
    assert not policy(world).driver


def test_a_policy_that_is_made_while_its_simulator_is_described_is_improved_as_it_is(world: World) -> None:
    cluster = Cluster(world)
    job = submit(world, rl(updates=1))
    world.create()  # with a camera
    cluster.run()
    assert info(world, job.job).state == "succeeded"
    described = [task for task in cluster.env.tasks if isinstance(task, DescribeSimulator)]
    assert [task.cameras for task in described] == [(), SPEC.contract.cameras]


def test_a_policy_with_another_recipe_is_not_improved(world: World) -> None:
    world.ask(CreatePolicy(policy="p", spec=SPEC), PolicyInfo)
    refused = world.refused(SubmitJob(key="k", spec=rl(create=RlPolicy(head="groot"))))
    assert refused.code is ErrorCode.CONFLICT
    assert "'head'" in refused.message


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (rl(episodes=200, episode_limit=1000), "episode_limit, or"),
        (
            rl(episodes=200, episode_limit=1000),
            "has up to 200000 decisions, but is trained on at most 65536: use at most 65 ",
        ),
        (
            rl(episodes=200, episode_limit=1000, create=RlPolicy(chunk=3)),
            "a decision every 3, has up to 66800 decisions",
        ),
        (rl(episodes=2, episode_limit=70_000), "65536: use a smaller episode_limit, or execute more of each chunk"),
        (
            rl(algorithm=GrpoSpec(group_size=8), episodes=80, episode_limit=1000),
            "use at most 64 episodes",  # whole groups
        ),
    ],
)
def test_an_update_with_more_decisions_than_are_trained_on_is_refused_with_the_job(
    world: World, spec: RlSpec, says: str
) -> None:
    refused = world.refused(SubmitJob(key="k", spec=spec))
    assert refused.code is ErrorCode.INVALID
    assert says in refused.message
    submit(world, rl(episodes=65, episode_limit=1000))


@pytest.mark.parametrize("exists", [False, True])
def test_an_update_that_the_simulators_own_limit_makes_too_large_is_refused_before_its_first_episode(
    world: World, exists: bool
) -> None:
    cluster = Cluster(world)
    cluster.env.episode_limit = 1000
    if exists:
        world.create()
    job = submit(world, rl(episodes=528))
    cluster.run()
    failed = info(world, job.job)
    assert failed.state == "failed"
    assert "but is trained on at most 65536" in failed.message
    assert not rollouts(cluster.env)
    assert not versions(world)


def test_an_update_is_refused_with_the_job_if_the_policys_own_limit_makes_it_too_large(world: World) -> None:
    world.create(spec=msgspec.structs.replace(SPEC, contract=msgspec.structs.replace(CONTRACT, episode_limit=1000)))
    assert "up to 66000 decisions" in world.refused(SubmitJob(key="k", spec=rl(episodes=528))).message
    submit(world, rl(episodes=520))


# What is kept, and for how long


def test_pages_are_kept_until_a_checkpoint_covers_their_update(world: World) -> None:
    cluster = Cluster(world)
    submit(world, rl(checkpoint_every=2, updates=4))
    deleted: list[int] = []
    while cluster.trainer.work(1) + cluster.env.work(1) + cluster.inference.work(1):
        held = {page.trajectories for page in world.journal.of(PageRecord)}
        assert not held & set(world.deleted)
        deleted.append(len(set(world.deleted) & set(PAGES)))
    assert deleted[-1] == 8  # all are gone in the end
    assert not world.journal.of(PageRecord)
    assert len(world.journal.of(CurveRecord)) == 2


@pytest.mark.parametrize("writes", range(5))
def test_a_master_killed_while_a_job_is_cancelled_finds_its_pages_or_the_cancelled_job(
    world: World, writes: int
) -> None:
    cluster = Cluster(world)
    job = submit(world, rl(max_staleness=2, updates=8))
    while len(world.journal.of(PageRecord)) < 3:
        assert cluster.trainer.work(1) + cluster.env.work(1) + cluster.inference.work(1)
    cluster.env.work(1)
    world.auto_persist = False
    cluster.env.work(1)  # one more page is on its way to the disk
    world.tell(CancelJob(job=job.job))
    for _ in range(writes):
        if world.unwritten:
            world.write()
    world.crash()
    kept = {page.trajectories for page in world.journal.of(PageRecord)}
    cancelled = info(world, job.job).state == "cancelled"
    assert cancelled or not kept & set(world.deleted)
    assert cancelled == (writes > 1)
    world.auto_persist = True
    world.settle()
    assert bool(world.journal.of(PageRecord)) != cancelled


def test_hundreds_of_updates_leave_two_versions(world: World) -> None:
    cluster = Cluster(world)
    spec = rl(updates=300, episodes=1, algorithm=PpoSpec(epochs=1), checkpoint_every=50)
    job = submit(world, spec)
    most = 0
    while cluster.trainer.work(1) + cluster.env.work(1) + cluster.inference.work(1):
        most = max(most, len(policy(world).versions))
    assert info(world, job.job).state == "succeeded"
    assert [version.version for version in policy(world).versions] == [1, 301]
    assert [version.version for version in world.journal.of(VersionRecord)] == [1, 301]
    assert most <= 4
    gone = world.refused(GetVersion(policy="p", version=7))
    assert gone.code is ErrorCode.NOT_FOUND
    assert "only the first and the last are kept" in gone.message
    assert world.ask(GetVersion(policy="p"), VersionInfo).version == 301


def test_a_version_that_is_being_evaluated_stays_until_that_has_ended(world: World) -> None:
    cluster = Cluster(world)
    evaluating = FakeEnv(world, new_incarnation(), key="slow", serves=("libero",))
    submit(world, rl())
    while not any(offer.version == 2 for offer in cluster.inference.offers):
        assert cluster.trainer.work(1) + cluster.env.work(1) + cluster.inference.work(1)
    evaluation = submit(world, EvaluateSpec(policy="p", version=2, env="libero/libero_object/0", episodes=3), key="e")
    cluster.run()
    assert [version.version for version in policy(world).versions] == [1, 2, 5]
    world.crash()
    evaluating.connect()
    assert [version.version for version in policy(world).versions] == [1, 2, 5]
    evaluating.work()
    assert info(world, evaluation.job).state == "succeeded"
    assert [version.version for version in policy(world).versions] == [1, 5]
