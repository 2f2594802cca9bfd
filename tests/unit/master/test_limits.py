"""Limits by tenant: shares and places in line take effect at once, what exceeds a limit is refused with a hint."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from joynexus.specs import RlSpec
from joynexus.tenants import TenantLimits
from joynexus.wire import Array, ErrorCode, Failure
from joynexus.wire.front import (
    Accepted,
    AcquireLease,
    Act,
    Actions,
    CancelJob,
    ClusterStatus,
    CreatePolicy,
    DatasetInfo,
    FileEntry,
    Hello,
    JobInfo,
    Lease,
    OptimStep,
    Publish,
    PushDataset,
    SaveState,
    Status,
    SubmitJob,
    Welcome,
)
from services.master import holdings
from services.master.config import CoreConfig
from services.master.events import LimitsChanged
from services.master.limits import Pace
from tests.unit.master.actors import FakeInference, FakeTrainer, new_incarnation
from tests.unit.master.acts import publish
from tests.unit.master.world import SPEC, World, run

ACT = Act(policy="p", state=Array(dtype="<f4", shape=(1, 2), frame=0), images=(), instructions=("go",))
STATE = np.ones((1, 2), np.float32).tobytes()


@pytest.fixture
def world() -> World:
    world = World()
    world.create()
    return world


def limit(world: World, **limits: TenantLimits) -> None:
    world.event(LimitsChanged(limits=limits))


def steps(world: World, seqs: range, lease: str, tenant: str = "a") -> list[str]:
    return [world.tell(OptimStep(policy="p", lease=lease, seq=seq), tenant=tenant) for seq in seqs]


def test_an_op_too_many_is_refused_with_what_is_full_and_when_to_come_back(world: World) -> None:
    limit(world, a=TenantLimits(max_inflight_ops=2))
    ids = steps(world, range(1, 4), world.lease())
    (refused,) = world.answers(ids[2])
    assert isinstance(refused, Failure)
    assert refused.code is ErrorCode.OVERLOADED
    assert refused.details == {"limit": 2, "waiting": 2, "running": 0}
    assert refused.retry_after_ms > 0


def test_a_client_is_told_its_own_limit(world: World) -> None:
    limit(world, a=TenantLimits(max_inflight_ops=5))
    hello = Hello(client="c", protocol_min=1, protocol_max=1)
    assert world.ask(hello, Welcome).max_inflight_ops == 5
    assert world.ask(hello, Welcome, tenant="b").max_inflight_ops == CoreConfig().max_inflight_ops


def test_a_limit_that_sinks_loses_nothing_that_was_accepted(world: World) -> None:
    lease = world.lease()
    ids = steps(world, range(1, 9), lease)
    limit(world, a=TenantLimits(max_inflight_ops=1, quota_bytes=0, max_policies=0))
    assert world.answers(steps(world, range(9, 10), lease)[0])[0].code is ErrorCode.OVERLOADED  # type: ignore[attr-defined]
    run(FakeTrainer(world, new_incarnation()))
    for id in ids:
        accepted, result = world.answers(id)
        assert isinstance(accepted, Accepted)
        assert result.error is None  # type: ignore[attr-defined]
    assert isinstance(world.answers(steps(world, range(9, 10), lease)[0])[0], Accepted)


def test_limits_that_are_taken_away_are_the_defaults_again(world: World) -> None:
    limit(world, a=TenantLimits(max_inflight_ops=0))
    lease = world.lease()
    (refused,) = world.answers(steps(world, range(1, 2), lease)[0])
    assert isinstance(refused, Failure)
    limit(world)
    assert isinstance(world.answers(steps(world, range(1, 2), lease)[0])[0], Accepted)


def test_waiting_acts_and_their_bytes_are_limited_by_tenant(world: World) -> None:
    world.create(tenant="b")
    publish(world)
    publish(world, tenant="b")
    limit(world, a=TenantLimits(max_waiting_acts=1), b=TenantLimits(max_act_bytes=400))
    first, second = (world.tell(ACT, buffers=(STATE,)) for _ in range(2))
    (refused,) = world.answers(second)
    assert refused.details == {"limit": 1, "waiting": 1, "running": 0}  # type: ignore[attr-defined]
    large, larger = (world.tell(ACT, buffers=(bytes(300),), tenant="b") for _ in range(2))
    assert world.answers(larger)[0].details["limit"] == 400  # type: ignore[attr-defined]
    run(FakeInference(world, new_incarnation()))
    assert isinstance(world.answers(first)[0], Actions)
    assert isinstance(world.answers(large)[0], Actions)


def test_a_quota_of_ones_own_holds_for_uploads(world: World) -> None:
    limit(world, a=TenantLimits(quota_bytes=5))
    (refused,) = world.upload("d" * 64, 10)
    assert refused.code is ErrorCode.TOO_LARGE  # type: ignore[attr-defined]
    assert "quota of 5 bytes" in refused.message  # type: ignore[attr-defined]
    assert world.upload("d" * 64, 10, tenant="b")[0].complete  # type: ignore[attr-defined]


def test_a_tenant_keeps_few_blobs_however_small_they_are(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "_LEAST_BLOBS", 3)
    limit(world, a=TenantLimits(quota_bytes=4 * 65_536))
    for digit in "1234":
        assert world.upload(digit * 64, 1)[0].complete  # type: ignore[attr-defined]
    (refused,) = world.upload("5" * 64, 1)
    assert refused.code is ErrorCode.TOO_LARGE  # type: ignore[attr-defined]
    assert "allows 4" in refused.message  # type: ignore[attr-defined]
    assert world.upload("4" * 64, 1)[0].complete, "it is there already"  # type: ignore[attr-defined]
    assert world.upload("5" * 64, 1, tenant="b")[0].complete  # type: ignore[attr-defined]


def test_over_its_quota_a_tenant_makes_no_more_versions_and_states(world: World) -> None:
    world.upload("d" * 64, 10)
    lease = world.lease()
    world.ask(SaveState(policy="p", lease=lease, seq=1, state="mine"), Accepted)
    limit(world, a=TenantLimits(quota_bytes=9))
    for message in (
        Publish(policy="p", lease=lease, seq=2),
        SaveState(policy="p", lease=lease, seq=2, state="another"),
    ):
        refused = world.refused(message)
        assert refused.code is ErrorCode.TOO_LARGE
        assert "10 bytes, more than its quota of 9" in refused.message
    world.ask(SaveState(policy="p", lease=lease, seq=2, state="mine"), Accepted)  # in place of the one before
    world.ask(OptimStep(policy="p", lease=lease, seq=3), Accepted)


def test_a_policy_has_few_states() -> None:
    world = World(CoreConfig(max_states=2))
    world.create()
    lease = world.lease()
    for seq, state in enumerate(("one", "two", "one"), 1):
        world.ask(SaveState(policy="p", lease=lease, seq=seq, state=state), Accepted)
    assert world.refused(SaveState(policy="p", lease=lease, seq=4, state="three")).code is ErrorCode.TOO_LARGE


def test_a_tenant_has_few_data_sets() -> None:
    world = World(CoreConfig(max_datasets=2))
    world.upload("d" * 64, 10)
    world.upload("e" * 64, 10)
    one, other = ((FileEntry(path="meta/info.json", digest=digit * 64, nbytes=10),) for digit in "de")
    for name in ("one", "two"):
        world.ask(PushDataset(dataset=name, files=one), DatasetInfo)
    assert world.refused(PushDataset(dataset="three", files=one)).code is ErrorCode.TOO_LARGE
    world.ask(PushDataset(dataset="one", files=other), DatasetInfo)


def test_a_tenant_has_few_jobs_that_have_not_ended_and_those_it_has_are_found() -> None:
    world = World(CoreConfig(max_jobs=2))
    spec = RlSpec(policy="p", env="metaworld/reach-v3")
    first, _ = (world.ask(SubmitJob(key=key, spec=spec), JobInfo) for key in "12")
    refused = world.refused(SubmitJob(key="3", spec=spec))
    assert refused.code is ErrorCode.OVERLOADED
    assert refused.retry_after_ms
    assert world.ask(SubmitJob(key="1", spec=spec), JobInfo).job == first.job
    world.ask(SubmitJob(key="1", spec=spec), JobInfo, tenant="b")
    world.ask(CancelJob(job=first.job), JobInfo)
    world.ask(SubmitJob(key="3", spec=spec), JobInfo)


def test_asking_for_a_long_lease_again_and_again_takes_no_memory(world: World) -> None:
    for _ in range(100):
        world.ask(AcquireLease(policy="p", holder="loop", ttl_ms=3_600_000), Lease)
    world.wait(6)
    assert len(world.core._outbox._timers) < 10
    world.wait(3_600 - 10, step=60)
    assert world.refused(AcquireLease(policy="p", holder="other")).code is ErrorCode.CONFLICT
    world.wait(10)
    world.ask(AcquireLease(policy="p", holder="other"), Lease)


def test_one_policy_too_many_is_refused_and_those_that_exist_are_found(world: World) -> None:
    limit(world, a=TenantLimits(max_policies=1))
    refused = world.refused(CreatePolicy(policy="q", spec=SPEC))
    assert refused.code is ErrorCode.TOO_LARGE
    assert "ask the operator" in refused.message
    world.create()
    world.create("q", tenant="b")


def test_a_higher_priority_goes_first_in_every_queue_even_if_it_was_set_while_waiting() -> None:
    world = World(CoreConfig(batch_rows=1, max_rows=1, group_ops=1))
    for tenant in ("a", "b"):
        world.create(tenant=tenant)
        publish(world, tenant=tenant)
    for tenant in ("a", "b"):
        for _ in range(3):
            world.tell(ACT, buffers=(STATE,), tenant=tenant, peer=world.new_peer("front"))
    limit(world, b=TenantLimits(priority=1))
    worker = FakeInference(world, new_incarnation(), key="inference")
    run(worker)
    assert [group.items[0].tenant for group in worker.groups] == ["b"] * 3 + ["a"] * 3


def test_status_shows_what_the_operator_set(world: World) -> None:
    limit(world, a=TenantLimits(weight=2.5, priority=-1))
    steps(world, range(1, 4), world.lease())
    (lane,) = world.ask(Status(), ClusterStatus).lanes
    assert (lane.weight, lane.priority) == (2.5, -1)


# Hints


def test_a_hint_grows_with_the_refusals_before_it_and_shrinks_as_the_lane_moves() -> None:
    pace = Pace()

    def hint(now: float) -> int:
        return pace.overloaded("lane", now, "full", limit=1, waiting=1, running=0).failure.retry_after_ms

    for index in range(200):
        pace.moved("lane", index * 0.02)
    hints = [hint(4.0) for _ in range(10)]
    assert hints == sorted(hints)
    assert hints[0] == pytest.approx(20, abs=3)
    assert hints[-1] == pytest.approx(200, rel=0.2)
    for index in range(200, 210):
        pace.moved("lane", index * 0.02)
    assert hint(4.2) == pytest.approx(20, abs=3)


def test_a_hint_has_bounds() -> None:
    pace = Pace()
    hints = [pace.overloaded("lane", 0.0, "full", limit=1, waiting=1, running=0) for _ in range(1000)]
    assert hints[0].failure.retry_after_ms >= 10
    assert hints[-1].failure.retry_after_ms == 5000


def test_limits_cannot_be_read_as_anything_else() -> None:
    weights = (b'{"weight": 0}', b'{"weight": -1}', b'{"weight": 1e-320}', b'{"weight": 1e7}')
    for text in (*weights, b'{"priority": 11}', b'{"max_policies": -1}', b'{"wieght": 1}'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(text, type=TenantLimits)
