"""The picture of the cluster: whole for operators and health, its own for a tenant, and never anything of another."""

from __future__ import annotations

import msgspec
import pytest

from joynexus.specs import EvaluateSpec
from joynexus.wire import ErrorCode, back, encode, limits
from joynexus.wire.front import ClusterStatus, JobInfo, OptimStep, Publish, Status, SubmitJob
from services.master.metering import Account
from services.master.view import EVERY_S, SHOWN, Views, _Progress
from tests.unit.master.actors import FakeEnv, FakeInference, FakeTrainer, new_incarnation
from tests.unit.master.acts import ACT, STATE
from tests.unit.master.desks import Desk, desk, enter, look
from tests.unit.master.jobs import sft
from tests.unit.master.rl import rl
from tests.unit.master.world import World, run

EVAL = EvaluateSpec(policy="p", env="metaworld/reach-v3", episodes=4)


@pytest.fixture
def dashboard(world: World) -> Desk:
    return desk(world, "dashboard", detail={"url": "http://127.0.0.1:5714"})


@pytest.fixture
def health(world: World) -> Desk:
    return desk(world, "health")


def served(world: World, *tenants: str) -> tuple[FakeTrainer, FakeInference, FakeEnv]:
    """A cluster in which each tenant has a policy `p` with a version in service."""
    trainer = FakeTrainer(world, new_incarnation(), key="t")
    inference = FakeInference(world, new_incarnation(), key="i")
    env = FakeEnv(world, new_incarnation(), key="e")
    for tenant in tenants:
        world.create("p", tenant=tenant)
        world.tell(Publish(policy="p", lease=world.lease(tenant=tenant), seq=1), tenant=tenant)
    run(trainer, inference)
    return trainer, inference, env


# What is seen


def test_an_operator_sees_all_and_a_tenant_its_own(world: World, dashboard: Desk) -> None:
    workers = served(world, "a", "b")
    for tenant in ("a", "b"):
        world.ask(SubmitJob(key="k", spec=EVAL), JobInfo, tenant=tenant)
    run(*workers)
    mine = look(dashboard, enter(world, dashboard).session)
    whole = look(dashboard, enter(world, dashboard, operator=True).session)
    assert (mine.tenant, mine.operator, whole.tenant, whole.operator) == ("a", False, "", True)
    assert {job.tenant for job in mine.jobs} == {"a"}
    assert {job.tenant for job in whole.jobs} == {"a", "b"}
    assert [(row.policy, row.version, row.versions_in_service) for row in mine.policies] == [("p", 1, 1)]
    assert (mine.policies_total, whole.policies_total, whole.jobs_total) == (1, 2, 2)
    assert {row.tenant for row in whole.use} == {"a", "b"}
    assert {row.tenant for row in mine.use} == {"a"}
    assert mine.demand == ()
    assert {row.role for row in whole.roles} == {"trainer", "inference", "env", "dashboard"}


def test_nothing_of_another_tenant_is_in_a_tenants_picture(world: World, dashboard: Desk, health: Desk) -> None:
    served(world, "a", "cnrytenant")
    world.create("cnrypolicy", tenant="cnrytenant")
    for key, spec in (("cnrykey", EVAL), ("rl", rl(policy="cnryrl")), ("sft", sft(policy="cnrysft", steps=3))):
        world.tell(SubmitJob(key=key, spec=spec), tenant="cnrytenant")
    world.tell(ACT, tenant="cnrytenant", buffers=(STATE,))
    world.tell(ACT, tenant="a", buffers=(STATE,))
    world.wait(1.0)
    world.core._outbox.log("warning", "cnryevent", tenant="cnrytenant", why="cnryreason")
    world.core._outbox.log("error", "cnryother", why="cnrynobody")
    row = back.InstanceRow(name="cnryinstance", instance="cnryhost/1", reason="cnrywhy")
    decision = back.Decision(at=1.0, group="env", before=1, after=2, reason="cnrydecision")
    health.ask(back.Supervised(instances=(row,), decisions=(decision,), desired={"cnrygroup": 1}))
    session = enter(world, dashboard, tenant="a").session
    assert b"cnry" not in msgspec.msgpack.encode(look(dashboard, session))
    seen = msgspec.msgpack.encode(look(health))
    words = (b"cnrytenant", b"cnrypolicy", b"cnryevent", b"cnryreason", b"cnryother", b"cnryinstance", b"cnrydecision")
    assert [word for word in words if word not in seen] == []
    for job in ("evaluate-1", "rl-1", "sft-1"):
        assert dashboard.ask(back.ViewJob(session=session, tenant="cnrytenant", job=job)).code is ErrorCode.NOT_FOUND


def test_a_tenant_is_told_what_went_wrong_with_its_work_and_not_what_was_written_for_operators(
    world: World, dashboard: Desk, health: Desk
) -> None:
    log = world.core._outbox.log
    log("error", "manifest_unreadable", tenant="a", reason="No such file: /srv/secret/blob")
    log("error", "job_ended", tenant="a", job="sft-1", state="failed", reason="the loss is nan")
    log("info", "job_ended", tenant="a", job="sft-2", state="succeeded")
    log("warning", "task_failed", tenant="b", task="t", need="metaworld", reason="the simulator hung")
    mine = look(dashboard, enter(world, dashboard).session).recent
    assert [(row.level, row.event, row.tenant, row.text) for row in mine] == [
        ("error", "job_ended", "a", "job sft-1: the loss is nan")
    ]
    assert [row.event for row in look(health).recent] == ["manifest_unreadable", "job_ended", "task_failed"]


def test_a_tenant_whose_work_fails_again_and_again_hides_nobody_elses(world: World, health: Desk) -> None:
    world.core._outbox.log("warning", "job_parked", tenant="b", job="rl-1", reason="vetoed")
    for number in range(1000):
        world.core._outbox.log("warning", "task_failed", tenant="a", task=f"t{number}", reason="it hung")
    assert "job_parked" in {row.event for row in look(health).recent}


def test_those_who_share_a_group_are_rows_to_each_other_and_names_to_an_operator(
    world: World, dashboard: Desk, health: Desk
) -> None:
    _, inference, _ = served(world, "a", "b", "c")
    for tenant in ("c", "a", "b"):  # the first is sent at once, the others meanwhile wait for each other
        world.tell(ACT, tenant=tenant, buffers=(STATE,))
    inference.work(1)
    world.wait(1.0)
    (group,) = look(health).groups
    assert (group.worker, group.kind, group.members) == ("inference-1", "act", (("a", "p", 1), ("b", "p", 1)))
    (mine,) = look(dashboard, enter(world, dashboard, tenant="a").session).groups
    assert mine.members == (("", "", 1), ("a", "p", 1))
    assert look(dashboard, enter(world, dashboard, tenant="c").session).groups == ()


def test_training_and_rollouts_are_shown_with_who_has_them(world: World, health: Desk) -> None:
    served(world, "a")
    world.tell(OptimStep(policy="p", lease=world.lease(), seq=2))
    world.ask(SubmitJob(key="k", spec=EVAL), JobInfo)
    groups = {group.kind: group for group in look(health).groups}
    assert groups["train"].members == (("a", "p", 1),)
    assert groups["rollout"].members == (("a", "p", 4),)
    assert {group.worker for group in groups.values()} == {"trainer-1", "env-1"}


def test_a_job_is_a_line_with_its_newest_number(world: World, health: Desk) -> None:
    workers = served(world, "a")
    job = world.ask(SubmitJob(key="k", spec=EVAL), JobInfo).job
    assert [(row.job, row.state, row.done, row.total, row.value_of) for row in look(health).jobs] == [
        (job, "running", 0, 4, "")
    ]
    world.wait(EVERY_S)
    run(*workers)
    (row,) = look(health).jobs
    assert (row.kind, row.policy, row.state, row.done, row.value_of) == ("evaluate", "p", "succeeded", 4, "success")
    assert 0 <= row.value <= 1


def test_a_viewer_sees_the_whole_of_its_own_job_and_an_operator_of_any(world: World, dashboard: Desk) -> None:
    served(world, "a")
    job = world.ask(SubmitJob(key="k", spec=EVAL), JobInfo).job
    for viewer in (enter(world, dashboard), enter(world, dashboard, tenant="b", operator=True)):
        info = dashboard.ask(back.ViewJob(session=viewer.session, tenant="a", job=job))
        assert isinstance(info, JobInfo)
        assert info.job == job
    other = enter(world, dashboard, tenant="b")
    assert dashboard.ask(back.ViewJob(session=other.session, tenant="a", job=job)).code is ErrorCode.NOT_FOUND
    assert dashboard.ask(back.ViewJob(session=other.session, tenant="b", job=job)).code is ErrorCode.NOT_FOUND


def test_what_health_told_stands_in_the_picture_and_in_status_while_health_is_there(world: World, health: Desk) -> None:
    FakeEnv(world, new_incarnation(), key="e", instance="host/env")
    row = back.InstanceRow(name="env", instance="host/env", role="env", state="running", restarts=3, reason="it hung")
    decision = back.Decision(at=1.0, group="env", before=1, after=2, reason="much waits")
    health.ask(back.Supervised(instances=(row,), decisions=(decision,), desired={"env": 2}))
    view = look(health)
    assert (view.instances, view.decisions, view.desired) == ((row,), (decision,), {"env": 2})
    status = world.ask(Status(), ClusterStatus, operator=True)
    assert [(role.restarts, role.reason, role.instance) for role in status.roles if role.role == "env"] == [
        (3, "it hung", "host/env")
    ]
    assert "it hung" not in str(world.ask(Status(), ClusterStatus)), "a tenant is told what it may use, and no more"
    world.say(health.peer, back.Gone())
    gone = world.ask(Status(), ClusterStatus, operator=True)
    assert [role.restarts for role in gone.roles if role.role == "env"] == [0]
    assert look(desk(world, "health")).instances == (row,), "the next one goes on where this one was"


# What waits


def test_demand_says_what_waits_for_each_kind_of_worker(world: World, health: Desk) -> None:
    served(world, "a", "b")
    for tenant in ("a", "b"):
        for number in range(4):
            spec = EvaluateSpec(policy="p", env="metaworld/reach-v3", episodes=10, first_seed=number)
            world.ask(SubmitJob(key=f"k{number}", spec=spec), JobInfo, tenant=tenant)
    world.wait(2.0)
    rows = {row.group: row for row in look(health).demand}
    simulators = rows["env:metaworld"]
    assert (simulators.role, simulators.need, simulators.workers, simulators.credit) == ("env", "metaworld", 1, 1)
    assert (simulators.running, simulators.waiting) == (1, 15), "pages of five episodes"
    assert simulators.oldest_s >= 2.0
    assert not simulators.starved
    assert rows["inference:lite"].workers == 1
    assert rows["training:lite"].workers == 1
    assert rows["env:datasets"].waiting == 0


def test_a_worker_that_leaves_or_is_gone_is_no_worker_of_its_group(world: World, health: Desk) -> None:
    workers = served(world, "a")
    for worker in workers:
        world.say(worker.peer, back.Leaving())
    assert {row.group: row.workers for row in look(health).demand if row.role != "env"} == {
        "inference:lite": 0,
        "training:lite": 0,
    }


def test_rollouts_that_a_trainer_waits_for_are_told_as_such(world: World, health: Desk) -> None:
    trainer, inference, env = served(world)
    world.ask(SubmitJob(key="k", spec=rl(policy="r")), JobInfo)
    for _ in range(20):
        trainer.work()
        inference.work()
        if any(isinstance(send.message, back.Rollout) for send in env.inbox):
            break
        env.work(1)
    assert [row.starved for row in look(health).demand if row.group == "env:metaworld"] == [True]


def test_a_tenants_own_environment_is_nobody_elses_demand(world: World, health: Desk) -> None:
    served(world, "a")
    spec = EvaluateSpec(policy="p", env="own/mine", episodes=2)
    world.tell(SubmitJob(key="k", spec=spec))
    assert [row.group for row in look(health).demand if "own" in row.group] == []


# What it costs


def test_a_picture_is_made_once_a_second_for_all_who_look(
    world: World, dashboard: Desk, health: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str | None] = []
    make = Views._make

    def counted(views: Views, tenant: str | None) -> back.ClusterView:
        made.append(tenant)
        return make(views, tenant)

    monkeypatch.setattr(Views, "_make", counted)
    sessions = [enter(world, dashboard, tenant=tenant).session for tenant in ("a", "a", "b")]
    for _ in range(5):
        look(health)
        for session in sessions:
            look(dashboard, session)
    assert sorted(made, key=str) == [None, "a", "b"]
    world.wait(EVERY_S)
    look(health)
    assert sorted(made, key=str) == [None, None, "a", "b"]


def test_workers_are_shown_as_they_are_now_to_health(world: World, health: Desk) -> None:
    look(health)
    FakeEnv(world, new_incarnation(), key="e")
    assert "env-1" in {role.worker for role in look(health).roles}


def test_a_picture_of_very_much_fits_into_a_message(world: World, health: Desk) -> None:
    served(world, "a")
    for number in range(2):
        for index in range(SHOWN):
            world.create(f"{'policy' * 8}-{index:04}", tenant=f"tenant-{number}")
    world.core._outbox.log("warning", "much", tenant="a", why="x" * 10_000)
    for number in range(700):
        spec = EvaluateSpec(policy="p", env="metaworld/reach-v3", episodes=1, first_seed=number)
        world.tell(SubmitJob(key=f"k{number}", spec=spec))
        if number % 20 == 19:
            world.core._jobs.find("a", f"evaluate-{number}").cancel()  # type: ignore[union-attr]
    view = look(health)
    assert len(view.policies) == SHOWN
    assert view.policies_total == 2 * SHOWN + 1
    assert sum(memoryview(frame).nbytes for frame in encode(view, id="x")) < limits.MAX_BODY_BYTES // 2


@pytest.mark.parametrize("state", ["steady", "stands still", "taken back", "slow"])
def test_the_rate_of_a_job_is_that_of_late(state: str) -> None:
    progress = _Progress()
    job = ("a", "sft-1")
    assert progress.rate(job, 100, 50.0, 0.0) == 2.0, "nothing was seen yet: since it began"
    match state:
        case "steady":
            rates = [progress.rate(job, 100 + 10 * second, 50.0 + second, float(second)) for second in range(1, 60)]
            assert rates == [10.0] * 59
        case "stands still":
            for second in range(1, 5):
                progress.rate(job, 100 + 10 * second, 50.0 + second, float(second))
            rates = [progress.rate(job, 140, 50.0 + second, float(second)) for second in (10, 100, 1000)]
            assert rates == sorted(rates, reverse=True)
            assert rates[-1] < 0.1
        case "taken back":
            progress.rate(job, 110, 51.0, 1.0)
            assert progress.rate(job, 50, 52.0, 2.0) > 0
        case _:
            for minute in (1, 2):
                progress.rate(job, 100 + minute, 50.0 + 60 * minute, 60.0 * minute)
            assert progress.rate(job, 102, 180.0, 130.0) == pytest.approx(1 / 60)


def test_device_time_of_the_last_minute_is_told_by_tenant(world: World, health: Desk) -> None:
    look(health)
    world.core._meter.add(Account("a", "p"), {"trainer_s": 2.0})
    world.wait(2.0)
    (row,) = look(health).use
    assert (row.tenant, row.trainer_s, row.recent_s) == ("a", 2.0, 2.0)
    for _ in range(100):
        world.now += 1.0
        health.beat()
        look(health)
    (row,) = look(health).use
    assert (row.trainer_s, row.recent_s) == (2.0, 0.0)
