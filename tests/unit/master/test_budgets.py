"""Budgets: over it jobs pause and nothing new is accepted; what was accepted is finished; they go on by themselves."""

from __future__ import annotations

from decimal import Decimal

import pytest

from joynexus.prices import Prices
from joynexus.specs import RlSpec
from joynexus.tenants import TenantLimits
from joynexus.wire import ErrorCode
from joynexus.wire.front import (
    CancelJob,
    DatasetInfo,
    FileEntry,
    GetUsage,
    JobInfo,
    JobList,
    ListJobs,
    OptimStep,
    PushDataset,
    Status,
    SubmitJob,
    UsageReport,
)
from services.master.calendar import end_of_month
from services.master.config import CoreConfig
from services.master.events import LimitsChanged, PricesChanged
from tests.unit.master.actors import FakeEnv, FakeInference, FakeTrainer
from tests.unit.master.acts import ACT
from tests.unit.master.jobs import FILE, Cluster, evaluation, info, push, sft, submit
from tests.unit.master.rl import rl
from tests.unit.master.world import World

PRICES = Prices(currency="EUR", trainer_s=Decimal(1), inference_s=Decimal(1), env_s=Decimal(1))
DAY = 86_400.0


def allow(world: World, budget: float | None, tenant: str = "a") -> None:
    world.event(PricesChanged(prices=PRICES))
    world.event(LimitsChanged(limits={tenant: TenantLimits(budget=budget)}))


def spend(world: World, seconds: float, tenant: str = "a") -> None:
    """Have a tenant use something, and the flush that notices it."""
    from services.master.metering import Account

    world.core._meter.add(Account(tenant, "elsewhere"), {"env_s": seconds})
    world.wait(1.5)


def logged(world: World, event: str) -> list[dict[str, object]]:
    return [log.fields for log in world.logs if log.event == event]


@pytest.fixture
def world() -> World:
    return World(CoreConfig(checkpoint_steps=5, job_ops=4))


@pytest.fixture
def cluster(world: World) -> Cluster:
    return Cluster(world)


def test_a_job_pauses_over_the_budget_and_goes_on_when_it_is_raised(world: World, cluster: Cluster) -> None:
    allow(world, 10.0)
    push(world)
    submit(world, sft(steps=40))
    cluster.trainer.work(1)
    spend(world, 10.0)
    cluster.run()  # what was accepted is finished
    paused = info(world, "sft-1")
    assert (paused.state, paused.done < 40) == ("paused", True)
    assert "has used up its budget of 10 EUR for 1970-01" in paused.message
    assert "operator raises the budget" in paused.message
    before = len(cluster.trainer.groups)
    world.wait(5)
    cluster.run()
    assert len(cluster.trainer.groups) == before
    allow(world, 1000.0)
    cluster.run()
    done = info(world, "sft-1")
    assert (done.state, done.done) == ("succeeded", 40)


def test_a_paused_job_ends_as_one_that_never_paused(world: World, cluster: Cluster) -> None:
    def losses(*, pause: bool) -> tuple[float, ...]:
        world = World(CoreConfig(checkpoint_steps=5, job_ops=4))
        cluster = Cluster(world)
        allow(world, 1000.0)
        push(world)
        submit(world, sft(steps=40))
        cluster.trainer.work(1)
        if pause:
            allow(world, 0.0)
            cluster.run()
            assert info(world, "sft-1").state == "paused"
            allow(world, 1000.0)
        cluster.run()
        return info(world, "sft-1").losses

    assert losses(pause=True) == losses(pause=False)


def test_a_new_month_begins_with_the_whole_budget(world: World, cluster: Cluster) -> None:
    allow(world, 10.0)
    push(world)
    submit(world, sft(steps=40))
    spend(world, 11.0)
    cluster.run()
    assert info(world, "sft-1").state == "paused"
    for worker in (cluster.trainer, cluster.env, cluster.inference):
        worker.die()
    world.wait(end_of_month(world.now) - world.now + 2, step=DAY)
    cluster = Cluster(world)
    cluster.run()
    assert info(world, "sft-1").state == "succeeded"


def test_a_master_that_is_restarted_leaves_it_paused(world: World, cluster: Cluster) -> None:
    allow(world, 10.0)
    push(world)
    submit(world, sft(steps=40))
    cluster.trainer.work(1)
    spend(world, 10.0)
    cluster.run()
    done = info(world, "sft-1").done
    world.standing = [PricesChanged(prices=PRICES), LimitsChanged(limits={"a": TenantLimits(budget=10.0)})]
    world.crash()
    assert not world.core._env.tenants(), "nothing was begun"
    cluster = Cluster(world)
    cluster.run()
    assert (info(world, "sft-1").state, info(world, "sft-1").done) == ("paused", done)
    allow(world, None)
    cluster.run()
    assert info(world, "sft-1").state == "succeeded"


def test_own_ops_and_acts_are_refused_before_they_are_accepted(world: World, cluster: Cluster) -> None:
    allow(world, 10.0)
    world.create()
    lease = world.lease()
    before = world.ask(OptimStep(policy="p", lease=lease, seq=1), object)
    spend(world, 10.0)
    refused = world.refused(OptimStep(policy="p", lease=lease, seq=2))
    assert (refused.code, refused.category) == (ErrorCode.OVER_BUDGET, "user")
    assert "has used up its budget" in refused.message
    again = world.ask(OptimStep(policy="p", lease=lease, seq=1), object)  # of what was accepted one may ask
    assert type(again) is type(before)
    assert world.refused(ACT).code is ErrorCode.OVER_BUDGET
    assert world.tell(Status(), tenant="a")
    allow(world, 100.0)
    assert world.ask(OptimStep(policy="p", lease=lease, seq=2), object) is not None
    assert world.refused(ACT).code is not ErrorCode.OVER_BUDGET


def test_no_new_data_set_is_prepared_and_one_that_is_there_is_answered_as_ever(world: World, cluster: Cluster) -> None:
    push(world)
    cluster.run()
    allow(world, 0.0)
    world.upload("e" * 64)
    other = (FileEntry(path="meta/info.json", digest="e" * 64, nbytes=10),)
    assert world.refused(PushDataset(dataset="other", files=other)).code is ErrorCode.OVER_BUDGET
    files = (FileEntry(path="meta/info.json", digest=FILE, nbytes=10),)
    for name in ("demos", "copy"):
        assert world.ask(PushDataset(dataset=name, files=files), DatasetInfo).state == "ready"


def test_other_tenants_go_on(world: World, cluster: Cluster) -> None:
    allow(world, 0.0)
    push(world, tenant="b")
    submit(world, sft(steps=10), tenant="b")
    cluster.run()
    assert info(world, "sft-1", tenant="b").state == "succeeded"


def test_an_evaluation_gives_out_no_page_that_has_not_begun(world: World, cluster: Cluster) -> None:
    allow(world, 1000.0)
    push(world)
    submit(world, sft(steps=5))
    cluster.run()
    job = submit(world, evaluation(episodes=40), key="e")
    cluster.env.work(1)
    allow(world, 0.0)
    cluster.run()
    paused = info(world, job.job)
    assert (paused.state, 0 < paused.done < paused.total) == ("paused", True)
    allow(world, 1000.0)
    cluster.run()
    ended = info(world, job.job)
    assert (ended.state, ended.done) == ("succeeded", ended.total)
    tasks = [task for task in cluster.env.tasks if getattr(task, "seeds", None)]
    assert len({task.seeds for task in tasks}) == len(tasks), "a page was run twice"


def test_rl_pauses_and_goes_on_with_every_page_once(world: World) -> None:
    world = World(CoreConfig(rollout_episodes=2))
    trainer, inference, env = (kind(world, f"i{n}") for n, kind in enumerate((FakeTrainer, FakeInference, FakeEnv)))
    allow(world, 1000.0)
    spec = rl(updates=4, episodes=6)
    assert isinstance(spec, RlSpec)
    submit(world, spec)
    crew = (trainer, inference, env)
    for _ in range(12):
        for worker in crew:
            worker.work(1)
    allow(world, 0.0)
    while sum(worker.work() for worker in crew):
        pass
    paused = info(world, "rl-1")
    assert (paused.state, paused.done < 4) == ("paused", True)
    allow(world, 1000.0)
    while sum(worker.work() for worker in crew):
        pass
    assert info(world, "rl-1").state == "succeeded"
    pages = [task.draws for task in env.tasks if getattr(task, "draws", None)]
    assert len(set(pages)) == len(pages), "a page was run twice"


def test_a_job_may_be_submitted_and_cancelled_while_its_tenant_is_over(world: World, cluster: Cluster) -> None:
    push(world)
    allow(world, 0.0)
    job = world.ask(SubmitJob(key="k", spec=sft()), JobInfo)
    assert job.state == "paused"
    (listed,) = world.ask(ListJobs(), JobList).jobs
    assert (listed.state, "has used up" in listed.message) == ("paused", True)
    assert world.ask(CancelJob(job=job.job), JobInfo).state == "cancelled"


def test_a_parked_job_stays_parked(world: World, cluster: Cluster) -> None:
    from joynexus.wire import failure

    allow(world, 1000.0)
    push(world)
    cluster.trainer.errors = {seq: failure(ErrorCode.NON_FINITE, "nan") for seq in range(1, 30)}
    submit(world, sft(steps=40))
    cluster.run()
    assert info(world, "sft-1").state == "parked"
    allow(world, 0.0)
    assert info(world, "sft-1").state == "parked"
    allow(world, 1000.0)
    cluster.run()
    assert info(world, "sft-1").state == "parked"


def test_of_most_of_a_budget_it_is_warned_once(world: World) -> None:
    allow(world, 10.0)
    for _ in range(3):
        spend(world, 2.7)
    assert logged(world, "budget_nearly_used") == [{"tenant": "a", "cost": "8.10 EUR", "budget": "10"}]
    spend(world, 0.1)
    assert len(logged(world, "budget_nearly_used")) == 1
    assert logged(world, "over_budget") == []
    spend(world, 5.0)
    assert logged(world, "over_budget") == [{"tenant": "a", "cost": "13.20 EUR", "budget": "10"}]
    allow(world, 20.0)
    assert len(logged(world, "within_budget")) == 1


def test_without_prices_there_is_no_budget(world: World) -> None:
    allow(world, 10.0)
    spend(world, 20.0)
    assert logged(world, "over_budget")
    world.event(PricesChanged(prices=None))
    assert logged(world, "within_budget")
    assert world.ask(GetUsage(), UsageReport).prices == {}


def test_a_report_has_the_prices(world: World) -> None:
    allow(world, None)
    assert world.ask(GetUsage(), UsageReport).prices == PRICES.as_text()


@pytest.mark.parametrize(
    ("budget", "text"), [(10.0, "10"), (0.1, "0.1"), (2_500_000.0, "2500000"), (1234567.5, "1234567.5")]
)
def test_a_budget_is_told_with_all_its_digits(world: World, budget: float, text: str) -> None:
    allow(world, budget)
    spend(world, budget)
    (said,) = logged(world, "over_budget")
    assert said["budget"] == text
