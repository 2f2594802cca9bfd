"""Acting of many tenants: one bad request is one tenant's, and each is charged its own share."""

from __future__ import annotations

import pytest

from joynexus.wire import Array, ErrorCode
from joynexus.wire.back import PredictDone, Predicted, PredictGroup
from joynexus.wire.errors import failure
from joynexus.wire.front import Actions, ClusterStatus, GetUsage, OptimStep, Status, UsageReport
from services.master.config import CoreConfig
from tests.unit.master.actors import FakeInference, new_incarnation
from tests.unit.master.acts import ACT, STATE, TRAINERS, act, publish
from tests.unit.master.world import World, run


@pytest.fixture
def world() -> World:
    world = World()
    world.create()
    return world


def test_tenants_see_their_own_use_and_operators_that_of_all(world: World) -> None:
    world.create("theirs", tenant="b")
    lease = world.lease("theirs", tenant="b")
    publish(world)
    world.tell(OptimStep(policy="theirs", lease=lease, seq=1), tenant="b")
    run(TRAINERS[world])

    def seen(**how: object) -> set[tuple[str, str]]:
        return {(line.tenant, line.policy) for line in world.ask(GetUsage(), UsageReport, **how).lines if line.policy}

    assert seen(tenant="a") == {("a", "p")}
    assert seen(tenant="b") == {("b", "theirs")}
    assert seen(tenant="c", operator=True) == {("a", "p"), ("b", "theirs")}


def test_use_of_inference_is_metered_by_policy(world: World) -> None:
    publish(world)
    worker = FakeInference(world, new_incarnation())
    for _ in range(3):
        act(world)
        run(worker)
    (line,) = [line for line in world.ask(GetUsage(), UsageReport).lines if line.policy == "p"]
    assert line.inference_s == pytest.approx(0.003)
    assert line.bytes_in > 3 * len(STATE)
    world.wait(2)
    world.crash()
    (again,) = [line for line in world.ask(GetUsage(), UsageReport).lines if line.policy == "p"]
    assert again.inference_s == line.inference_s


# One bad request among many tenants


TENANTS = [f"t{index}" for index in range(8)]


@pytest.fixture
def tenants() -> World:
    world = World()
    for tenant in TENANTS:
        world.create(tenant=tenant)
        publish(world, tenant=tenant)
    return world


def test_of_eight_tenants_only_the_one_whose_request_kills_workers_is_set_aside(tenants: World) -> None:
    deadly = b"\xff" * 8
    ids = {
        tenant: tenants.tell(ACT, tenant=tenant, buffers=(deadly if tenant == "t3" else STATE,), deadline_ms=90_000)
        for tenant in TENANTS
    }
    for life in range(1 + CoreConfig().kills):
        worker = FakeInference(tenants, new_incarnation(), key=f"life{life}")
        worker.killed_by = deadly
        run(worker)
        tenants.wait(8)
    answers = {tenant: tenants.answers(id)[0] for tenant, id in ids.items()}
    assert answers.pop("t3").code is ErrorCode.POISON  # type: ignore[attr-defined]
    assert all(isinstance(answer, Actions) for answer in answers.values())


def test_a_request_that_is_answered_with_an_error_costs_others_of_its_group_nothing(tenants: World) -> None:
    ids = [tenants.tell(ACT, tenant=tenant, buffers=(STATE,)) for tenant in TENANTS]
    worker = FakeInference(tenants, new_incarnation())
    (group,) = [send.message for send in worker.inbox if isinstance(send.message, PredictGroup)]
    error = failure(ErrorCode.INVALID, "state has 2 values, the policy expects 3")
    bad = next(item.request for item in group.items if item.tenant == "t3")
    items = tuple(
        Predicted(request=item.request, error=error)
        if item.request == bad
        else Predicted(request=item.request, version=1, rows=1, actions=Array(dtype="<f4", shape=(1,), frame=0))
        for item in group.items
    )
    tenants.say(worker.peer, PredictDone(task=group.task, attempt=1, items=items), buffers=(b"1234",))
    for tenant, id in zip(TENANTS, ids, strict=True):
        (answer,) = tenants.answers(id)
        assert answer == error if tenant == "t3" else isinstance(answer, Actions)


def test_each_is_charged_its_own_share_and_the_estimate_is_trued_up(tenants: World) -> None:
    for tenant in TENANTS[:2]:
        tenants.tell(ACT, tenant=tenant, buffers=(STATE,))
    worker = FakeInference(tenants, new_incarnation())
    (group,) = [send.message for send in worker.inbox if isinstance(send.message, PredictGroup)]
    items = tuple(
        Predicted(request=item.request, version=1, rows=1, busy_s=3.0 if item.tenant == "t0" else 1.0,
                  actions=Array(dtype="<f4", shape=(1,), frame=0))
        for item in group.items
    )  # fmt: skip
    tenants.say(worker.peer, PredictDone(task=group.task, attempt=1, items=items), buffers=(b"1234",))
    for tenant in TENANTS[:2]:
        tenants.tell(ACT, tenant=tenant, buffers=(STATE,))
    lanes = tenants.ask(Status(), ClusterStatus, operator=True).lanes
    used = {lane.tenant: lane.used_s for lane in lanes if lane.queue == "inference"}
    assert used["t0"] - used["t1"] == pytest.approx(2.0, abs=0.5)


def test_a_tenant_sees_its_own_lanes_alone_also_among_many(tenants: World) -> None:
    for tenant in TENANTS:
        for _ in range(3):
            tenants.tell(ACT, tenant=tenant, buffers=(STATE,), peer=tenants.new_peer("front"))
    tenants.wait(2)
    (lane,) = tenants.ask(Status(), ClusterStatus, tenant="t3").lanes
    assert (lane.queue, lane.tenant, lane.waiting, lane.running) == ("inference", "t3", 3, 0)
    assert lane.oldest_s == pytest.approx(2.0)
    everything = tenants.ask(Status(), ClusterStatus, operator=True).lanes
    assert [lane.tenant for lane in everything] == TENANTS
