"""All busy time is somebody's: a tenant's by policy, job and month, or the service's own, whatever dies meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from common.journal.records import LifeRecord, PageRecord, Record, UsageRecord
from joynexus.wire import ErrorCode, Failure, failure
from joynexus.wire.back import Rollout, RolloutDone, TrainDone, TrainGroup
from joynexus.wire.front import CancelJob, GetUsage, JobInfo, OptimStep, UsageLine, UsageReport
from services.master import metering
from services.master.calendar import end_of_month, month_of, months_between
from services.master.config import CoreConfig
from services.master.metering import Account
from tests.unit.master.actors import FakeEnv, FakeInference, FakeTrainer, new_incarnation
from tests.unit.master.jobs import Cluster, evaluation, info, push, sft, submit
from tests.unit.master.queued import steps
from tests.unit.master.rl import rl
from tests.unit.master.test_rl_faults import CONFIG, Crew
from tests.unit.master.world import FakeWorker, World, run

HOUR = 3600.0
SECONDS = ("trainer_s", "inference_s", "env_s")


def lines(world: World, tenant: str = "a", **asked: object) -> list[UsageLine]:
    report = world.ask(GetUsage(**asked), UsageReport, tenant=tenant, operator=True)  # type: ignore[arg-type]
    return list(report.lines)


def charged(world: World) -> dict[str, float]:
    """Seconds by kind of worker, over all lines of all tenants and of the service."""
    return {field: sum(getattr(line, field) for line in lines(world)) for field in SECONDS}


def by_account(world: World) -> dict[tuple[str, str, str], float]:
    sums: Counter[tuple[str, str, str]] = Counter()
    for line in lines(world):
        sums[line.tenant, line.policy, line.job] += sum(getattr(line, field) for field in SECONDS)
    return {account: seconds for account, seconds in sums.items() if seconds}


class Ledger:
    """What all workers that ever lived have said about how busy they were."""

    def __init__(self, *workers: FakeWorker) -> None:
        self.workers = list(workers)

    def busy(self) -> dict[str, float]:
        sums = dict.fromkeys(SECONDS, 0.0)
        for worker in self.workers:
            sums[f"{worker.role}_s"] += worker.busy_s
        return sums

    def rest(self) -> None:
        """Everybody beats twice without doing anything between."""
        for _ in range(2):
            for worker in self.workers:
                if worker.peer in worker.world.actors:
                    worker.beat()


# Conservation


class Shift(Crew):
    """A crew whose workers load before their first beat, and take some time between pieces of work."""

    def __init__(self, world: World) -> None:
        self.ledger = Ledger()
        super().__init__(world)

    def make(self, name: str) -> FakeWorker:
        worker = super().make(name)
        worker.busy_s += 2.0  # its backbone, or its simulators
        worker.beat()
        self.ledger.workers.append(worker)
        return worker

    def kill(self, victim: str) -> None:
        if victim != "master":
            self.workers[victim].busy_s += 0.125  # it was in the middle of something
            self.workers[victim].beat()
        super().kill(victim)


@pytest.mark.parametrize("seed", range(12))
def test_all_busy_time_is_charged_once_whoever_dies(seed: int) -> None:
    chance = random.Random(seed)
    world = World(CONFIG)
    shift = Shift(world)
    push(world, tenant="b")
    submit(world, rl(updates=3, episodes=4, checkpoint_every=2))
    submit(world, sft(steps=30, checkpoint_every=7), tenant="b")
    while True:
        if chance.random() < 0.08:
            shift.kill(chance.choice(list(shift.workers)))
        elif chance.random() < 0.05:
            world.wait(1.5)  # what is not written down is
            shift.kill("master")
        busy = chance.choice(list(shift.workers.values()))
        busy.busy_s += 0.001  # between pieces of work
        if not shift.turn():
            break
    assert info(world, "rl-1").state == info(world, "sft-1", tenant="b").state == "succeeded"
    shift.ledger.rest()
    assert charged(world) == pytest.approx(shift.ledger.busy(), rel=1e-6)


def test_a_calm_run_has_hardly_anything_that_is_lost(world: World) -> None:
    shift = Shift(world)
    push(world, tenant="b")
    submit(world, rl(updates=3, episodes=4))
    submit(world, sft(steps=30, checkpoint_every=7), tenant="b")
    shift.finish()
    shift.ledger.rest()
    accounts = by_account(world)
    assert sum(accounts.values()) == pytest.approx(sum(shift.ledger.busy().values()))
    assert ("", "lost", "") not in accounts
    assert accounts["", "loading", ""] == pytest.approx(4 * 2.0 + 0.02 * 5)
    assert {account for account in accounts if account[0]} == {
        ("a", "p", "rl-1"), ("b", "p", "sft-1"), ("b", "", "")
    }  # fmt: skip


@pytest.fixture
def world() -> World:
    return World(CoreConfig(checkpoint_steps=10))


# Whose


def test_checkpoints_are_the_use_of_the_job_whose_ops_they_cover(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    submit(world, sft(steps=10, checkpoint_every=5))
    cluster.run()
    kinds = Counter(item.kind for group in cluster.trainer.groups for item in group.items)
    assert kinds["checkpoint"] >= 2
    (mine,) = [line for line in lines(world) if line.job == "sft-1"]
    assert mine.trainer_s == pytest.approx(0.01 * kinds.total())


def test_replays_and_void_work_are_the_services_own(world: World) -> None:
    world.create()
    lease = world.lease()
    first = FakeTrainer(world, new_incarnation())
    steps(world, lease, 1, 5)
    run(first)
    first.die()
    world.wait(10)
    second = FakeTrainer(world, new_incarnation())
    steps(world, lease, 6, 6)
    run(second)
    accounts = by_account(world)
    assert accounts["a", "p", ""] == pytest.approx(0.06)
    assert accounts["", "replay", ""] == pytest.approx(0.05)


def test_a_tenant_does_not_pay_for_what_the_service_did_wrong(world: World) -> None:
    world.create()
    lease = world.lease()
    trainer = FakeTrainer(world, new_incarnation())
    trainer.errors = {1: failure(ErrorCode.INTERNAL, "a fault"), 2: failure(ErrorCode.NON_FINITE, "vetoed")}
    steps(world, lease, 1, 2)
    run(trainer)
    accounts = by_account(world)
    assert accounts["", "failed", ""] == pytest.approx(0.01)
    assert accounts["a", "p", ""] == pytest.approx(0.01)


def test_work_that_is_tried_again_is_charged_once_to_the_tenant_and_once_to_the_service(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    cluster.env.error = failure(ErrorCode.UNAVAILABLE, "the disk is full", retry_after_ms=1000)
    submit(world, sft(steps=10))
    cluster.run()
    cluster.env.error = None
    world.wait(3)
    cluster.run()
    accounts = by_account(world)
    assert accounts["", "failed", ""] > 0
    assert info(world, "sft-1").state == "succeeded"


def test_a_cancelled_job_pays_for_what_its_workers_were_doing(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    submit(world, sft())
    cluster.run()
    job = submit(world, evaluation(), key="e")
    before = by_account(world).get(("a", "p", job.job), 0.0)
    begun = cluster.env.inbox.popleft()
    world.ask(CancelJob(job=job.job), JobInfo)
    answers = world.answers(world.say(cluster.env.peer, cluster.env.answer(begun.message)))
    assert answers == []  # it is welcome
    assert by_account(world)["a", "p", job.job] == pytest.approx(before + 0.5)


def test_a_result_that_comes_twice_is_charged_once(world: World) -> None:
    world.create()
    lease = world.lease()
    trainer = FakeTrainer(world, new_incarnation())
    steps(world, lease, 1, 1)
    (given,) = trainer.inbox
    run(trainer)
    group = given.message
    assert isinstance(group, TrainGroup)
    done = trainer.results["a", "p", 1, False]
    assert isinstance(done, TrainDone)
    world.say(trainer.peer, done)
    assert by_account(world) == {("a", "p", ""): pytest.approx(0.01)}


def test_the_use_of_a_result_is_as_durable_as_the_result(world: World) -> None:
    """Whatever the journal holds: of each op with an outcome the use is there, and of none without."""
    world.create()
    lease = world.lease()
    trainer = FakeTrainer(world, new_incarnation())
    steps(world, lease, 1, 3)
    run(trainer)
    world.crash()
    (line,) = [line for line in lines(world) if line.policy == "p"]
    assert (line.samples, line.trainer_s) == (3, pytest.approx(0.03))


def test_the_use_of_rollouts_is_in_the_transaction_of_their_page(world: World) -> None:
    shift = Shift(world)
    submit(world, rl(updates=1, episodes=4))
    pages, append = [], world.journal.append

    def look(records: Iterable[Record]) -> None:
        kept = list(records)
        if any(isinstance(record, PageRecord) and not record.gone for record in kept):
            pages.append(
                sum(record.env_s for record in kept if isinstance(record, UsageRecord) and record.job == "rl-1")
            )
        append(kept)

    world.journal.append = look  # type: ignore[method-assign]
    shift.finish()
    assert pages
    assert all(seconds > 0 for seconds in pages)
    assert pages == sorted(pages)


def test_what_a_worker_calls_void_itself_is_no_complaint_to_it(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    submit(world, sft())
    cluster.run()
    submit(world, evaluation(), key="e")
    begun = cluster.env.inbox.popleft().message
    world.wait(10)  # it is taken for dead
    cluster.env.connect()
    assert isinstance(begun, Rollout)
    void = RolloutDone(task=begun.task, attempt=begun.attempt, error=failure(ErrorCode.STALE, "void"), busy_s=1.0)
    assert world.answers(world.say(cluster.env.peer, void)) == []
    late = RolloutDone(task=begun.task, attempt=begun.attempt, busy_s=1.0)
    (answer,) = world.answers(world.say(cluster.env.peer, late))
    assert isinstance(answer, Failure)
    assert answer.code is ErrorCode.STALE


# Months, pages, bytes


def test_each_month_has_its_own_lines(world: World) -> None:
    world.create()
    lease = world.lease()
    trainer = FakeTrainer(world, new_incarnation())
    steps(world, lease, 1, 1)
    run(trainer)
    first = month_of(world.now)
    trainer.die()
    world.wait(end_of_month(world.now) - world.now + 1, step=HOUR * 24)
    trainer = FakeTrainer(world, new_incarnation())
    steps(world, world.lease(), 2, 2)
    run(trainer)
    used = {line.month: line.samples for line in lines(world) if line.policy == "p"}
    assert used == {first: 1, month_of(world.now): 1}
    assert [line.month for line in lines(world, since_month=month_of(world.now)) if line.policy == "p"] == [
        month_of(world.now)
    ]
    assert world.refused(GetUsage(since_month="2026-13")).code is ErrorCode.INVALID


def test_a_long_report_comes_in_pages(world: World) -> None:
    records = [
        UsageRecord(tenant=tenant, policy=f"p{number:04}", month="2026-11", samples=1)
        for tenant in ("a", "b")
        for number in range(700)
    ]
    world.journal.append(records)
    world.crash()
    first = world.ask(GetUsage(), UsageReport, operator=True)
    assert (len(first.lines), first.more) == (1000, True)
    last = first.lines[-1]
    after = (last.tenant, last.policy, last.job, last.month)
    second = world.ask(GetUsage(after=after), UsageReport, operator=True)
    assert (len(second.lines), second.more) == (400, False)
    assert [(line.tenant, line.policy) for line in (*first.lines, *second.lines)] == [
        (record.tenant, record.policy) for record in records
    ]
    assert len(world.ask(GetUsage(), UsageReport, tenant="b").lines) == 700  # and never another's


def test_lines_are_bounded_and_nothing_of_the_sums_is_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "_LINES", 20)
    monkeypatch.setattr(metering, "_FOLDED", 6)
    meter = world.core._meter
    for number in range(300):
        meter.add(Account("a", f"p{number % 40}", f"job-{number}"), {"env_s": 1.0, "samples": 2})
        meter.add(Account("b", "p", "job"), {"env_s": 0.5})
        if number % 7 == 0:
            world.wait(1.5)
        if number % 50 == 49:
            world.wait(1.5)
            world.crash()
            meter = world.core._meter
    world.wait(1.5)
    mine = [line for line in lines(world) if line.tenant == "a"]
    assert len(mine) <= 20
    assert len(world.journal.of(UsageRecord)) <= 20 + 1
    assert sum(line.env_s for line in mine) == 300
    assert sum(line.samples for line in mine) == 600
    assert ("p19", "job-299") in {(line.policy, line.job) for line in mine}  # the newest are told apart
    assert [line.env_s for line in lines(world) if line.tenant == "b"] == [150.0]


def test_bytes_kept_are_counted_over_time_and_over_restarts(world: World) -> None:
    world.upload("d" * 64, 1000)
    start = world.now
    world.wait(2)
    world.crash()
    world.now += 100  # nobody was there to count
    world.crash()
    (line,) = lines(world)
    assert line.stored_byte_s == pytest.approx(1000 * (world.now - start), rel=0.02)
    assert line.bytes_stored == 1000


def test_a_span_is_divided_by_months() -> None:
    turn = end_of_month(0.0)
    assert month_of(turn - 1) == "1970-01"
    assert month_of(turn) == "1970-02"
    assert list(months_between(turn - 10, turn + 5)) == [("1970-01", 10), ("1970-02", 5)]
    assert list(months_between(5.0, 5.0)) == []
    assert end_of_month(turn - 1) == turn
    assert month_of(end_of_month(1_798_675_199.0)) == "2027-01"  # behind December


def test_what_was_charged_of_a_life_is_forgotten_some_time_after_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.master.lives._REMEMBERED", 2)
    world.create()
    for _ in range(5):
        worker = FakeEnv(world, new_incarnation())
        worker.busy_s = 1.0
        worker.beat()
        worker.die()
        world.wait(10)
    world.upload("d" * 64)  # goes with whatever is written next
    world.wait(5)
    assert len(world.journal.of(LifeRecord)) == 2


def test_nobody_is_charged_for_what_no_number_is(world: World) -> None:
    worker = FakeInference(world, new_incarnation())
    for worker.busy_s in (float("inf"), float("nan"), -5.0):
        worker.beat()
        worker.beat()
    assert by_account(world) == {}


def test_ops_of_a_loop_and_of_a_job_are_told_apart(world: World) -> None:
    cluster = Cluster(world)
    push(world)
    submit(world, sft(steps=5))
    cluster.run()
    lease = world.lease()
    seq = world.core._policies.get("a", "p").next_seq
    world.tell(OptimStep(policy="p", lease=lease, seq=seq))
    cluster.run()
    assert {line.job for line in lines(world) if line.policy == "p"} >= {"", "sft-1"}
