"""Policies, leases, and the small requests."""

from __future__ import annotations

import math

import msgspec
import pytest

from common.journal.records import LeaseRecord, PolicyRecord
from joynexus.specs import OptimizerSpec, PolicySpec
from joynexus.wire import ErrorCode, limits
from joynexus.wire.back import Beat
from joynexus.wire.front import (
    Accepted,
    AcquireLease,
    CreatePolicy,
    Done,
    GetPolicy,
    GetVersion,
    Hello,
    Lease,
    ListPolicies,
    OptimStep,
    Ping,
    PolicyInfo,
    PolicyList,
    Pong,
    ReleaseLease,
    Welcome,
)
from tests.unit.master.world import CONTRACT, SPEC, STATISTICS, World


def test_hello_says_who_you_are_and_the_limits(world: World) -> None:
    welcome = world.ask(Hello(protocol_min=1, protocol_max=99, client="test"), Welcome, tenant="b", operator=True)
    assert (welcome.tenant, welcome.protocol, welcome.operator) == ("b", limits.PROTOCOL, True)
    assert welcome.inline_bytes == limits.INLINE_BYTES


def test_a_client_of_another_age_is_told_to_upgrade(world: World) -> None:
    assert world.refused(Hello(protocol_min=98, protocol_max=99, client="t")).code is ErrorCode.UPGRADE_REQUIRED


def test_ping_is_answered(world: World) -> None:
    assert world.ask(Ping(), Pong) == Pong()


def test_what_is_no_request_of_tenants_is_refused(world: World) -> None:
    assert world.refused(Beat(progress=1, phase="idle", busy_s=0.0)).code is ErrorCode.INVALID


def test_a_policy_exists_once_it_is_on_disk(world: World) -> None:
    world.auto_persist = False
    id = world.tell(CreatePolicy(policy="p", spec=SPEC))
    assert world.answers(id) == []
    assert world.refused(GetPolicy(policy="p")).code is ErrorCode.NOT_FOUND
    world.write()
    assert isinstance(world.answers(id)[0], PolicyInfo)
    world.auto_persist = True
    world.crash()
    assert world.ask(GetPolicy(policy="p"), PolicyInfo).spec == SPEC


def test_creating_the_same_again_is_answered_alike_also_while_it_is_under_way(world: World) -> None:
    world.auto_persist = False
    ids = [world.tell(CreatePolicy(policy="p", spec=SPEC)) for _ in range(2)]
    other = world.refused(CreatePolicy(policy="p", spec=msgspec.structs.replace(SPEC, seed=1)))
    assert other.code is ErrorCode.CONFLICT
    world.auto_persist = True
    world.settle()
    assert world.answers(ids[0]) == world.answers(ids[1])
    world.create()
    assert len(world.journal.of(PolicyRecord)) == 1


def test_another_spec_is_a_conflict_that_names_the_field(world: World) -> None:
    world.create()
    refused = world.refused(CreatePolicy(policy="p", spec=msgspec.structs.replace(SPEC, chunk=4)))
    assert refused.code is ErrorCode.CONFLICT
    assert "another 'chunk'" in refused.message


def test_a_policy_that_the_disk_refuses_can_be_created_later(world: World) -> None:
    world.journal.full = True
    assert world.refused(CreatePolicy(policy="p", spec=SPEC)).code is ErrorCode.UNAVAILABLE
    world.journal.full = False
    world.create()


def test_tenants_have_their_own_names(world: World) -> None:
    world.create(tenant="a")
    world.create(tenant="b", spec=msgspec.structs.replace(SPEC, seed=7))
    assert world.ask(ListPolicies(), PolicyList, tenant="b").policies[0].spec.seed == 7


def test_unknown_and_foreign_policies_are_refused_in_the_same_words(world: World) -> None:
    world.create("secret", tenant="a")
    for make in (
        lambda name: GetPolicy(policy=name),
        lambda name: GetVersion(policy=name),
        lambda name: AcquireLease(policy=name, holder="h"),
        lambda name: OptimStep(policy=name, lease="l", seq=1),
    ):
        foreign = world.refused(make("secret"), tenant="b")
        unknown = world.refused(make("nothing"), tenant="b")
        assert foreign.code is unknown.code is ErrorCode.NOT_FOUND
        assert foreign.message.replace("secret", "x") == unknown.message.replace("nothing", "x")


@pytest.mark.parametrize("name", ["", "Has Capitals", "../x", "x" * 65, "-x", "p\n"])
def test_names_are_checked(world: World, name: str) -> None:
    assert world.refused(CreatePolicy(policy=name, spec=SPEC)).code is ErrorCode.INVALID


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chunk": 0}, "chunk must lie between 1 and 256"),
        ({"statistics": None}, "needs statistics"),
        ({"contract": msgspec.structs.replace(CONTRACT, action_dim=3)}, "the contract's action_dim is 3"),
        ({"contract": msgspec.structs.replace(CONTRACT, action_dim=0)}, "action_dim must lie"),
        ({"contract": msgspec.structs.replace(CONTRACT, rate_hz=math.nan)}, "rate_hz is not finite"),
        ({"contract": msgspec.structs.replace(CONTRACT, action_high=(0.0, math.inf))}, "action_high is not finite"),
        ({"head_config": {"scale": math.nan}}, "head_config has nan for 'scale'"),
        ({"optimizer": OptimizerSpec(lr=math.nan)}, "lr must lie"),
        ({"optimizer": OptimizerSpec(lr=-1.0)}, "lr must lie"),
        ({"optimizer": OptimizerSpec(lr=0.0)}, "lr must lie above 0"),
        ({"optimizer": OptimizerSpec(betas=(0.9, 1.0))}, "betas"),
        ({"backbone": ""}, "backbone"),
        ({"seed": -1}, "seed"),
        (
            {
                "statistics": msgspec.structs.replace(
                    STATISTICS, state=msgspec.structs.replace(STATISTICS.state, mean=(0.0, math.inf))
                )
            },
            "not finite",
        ),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused_in_one_sentence(
    world: World, change: dict[str, object], words: str
) -> None:
    spec: PolicySpec = msgspec.structs.replace(SPEC, **change)
    refused = world.refused(CreatePolicy(policy="p", spec=spec))
    assert refused.code is ErrorCode.INVALID
    assert words in refused.message


def test_a_spec_too_large_to_travel_with_samples_is_refused(world: World) -> None:
    spec = msgspec.structs.replace(SPEC, head_config={"note": "x" * 500_000})
    refused = world.refused(CreatePolicy(policy="p", spec=spec))
    assert (refused.code, "500" in refused.message) == (ErrorCode.INVALID, True)


def test_a_policy_without_versions_says_what_to_do(world: World) -> None:
    world.create()
    assert "publish one first" in world.refused(GetVersion(policy="p")).message


# Leases


def acquire(world: World, holder: str = "h", **how: object) -> Lease:
    return world.ask(AcquireLease(policy="p", holder=holder, ttl_ms=5_000), Lease, **how)


def test_the_same_holder_gets_the_same_lease(world: World) -> None:
    world.create()
    assert acquire(world) == acquire(world)


def test_somebody_else_is_refused_until_the_driver_was_silent_for_its_ttl(world: World) -> None:
    world.create()
    acquire(world)
    world.wait(4)
    refused = world.refused(AcquireLease(policy="p", holder="other"))
    assert refused.code is ErrorCode.CONFLICT
    assert "5 s" in refused.message
    world.wait(1.5)
    acquire(world, "other")


def test_ops_keep_a_lease_alive(world: World) -> None:
    world.create()
    lease = acquire(world).lease
    for seq in range(1, 5):
        world.wait(4)
        world.ask(OptimStep(policy="p", lease=lease, seq=seq), Accepted)
    assert world.refused(AcquireLease(policy="p", holder="other")).code is ErrorCode.CONFLICT


def test_asking_again_for_the_result_of_a_long_op_keeps_a_lease_alive(world: World) -> None:
    world.create()
    lease = acquire(world).lease
    for _ in range(4):
        world.tell(OptimStep(policy="p", lease=lease, seq=1))
        world.wait(4)
    assert world.refused(AcquireLease(policy="p", holder="other")).code is ErrorCode.CONFLICT


def test_a_release_is_told_only_once_it_is_on_disk(world: World) -> None:
    world.create()
    lease = acquire(world).lease
    world.auto_persist = False
    id = world.tell(ReleaseLease(policy="p", lease=lease))
    assert world.answers(id) == []
    world.write()
    assert world.answers(id) == [Done()]


def test_an_op_without_the_lease_is_refused(world: World) -> None:
    world.create()
    assert "acquire it" in world.refused(OptimStep(policy="p", lease="none", seq=1)).message
    acquire(world)
    assert "another loop" in world.refused(OptimStep(policy="p", lease="none", seq=1)).message


def test_a_released_lease_is_free_and_releasing_twice_is_fine(world: World) -> None:
    world.create()
    lease = acquire(world).lease
    for _ in range(2):
        world.ask(ReleaseLease(policy="p", lease=lease), Done)
    acquire(world, "other")
    world.ask(ReleaseLease(policy="p", lease=lease), Done)
    assert world.ask(GetPolicy(policy="p"), PolicyInfo).driver == "loop"


def test_a_lease_survives_a_restart_and_its_silence_counts_from_there(world: World) -> None:
    world.create()
    lease = acquire(world).lease
    world.wait(4)
    world.crash()
    world.wait(4)
    world.ask(OptimStep(policy="p", lease=lease, seq=1), Accepted)
    world.wait(6)
    acquire(world, "other")
    assert len(world.journal.of(LeaseRecord)) == 1


def test_a_lease_that_the_disk_refuses_is_not_held(world: World) -> None:
    world.create()
    world.journal.full = True
    assert world.refused(AcquireLease(policy="p", holder="h")).code is ErrorCode.UNAVAILABLE
    world.journal.full = False
    acquire(world, "other")


@pytest.mark.parametrize("message", [{"ttl_ms": 10}, {"ttl_ms": 10**9}, {"holder": ""}])
def test_lease_requests_are_checked(world: World, message: dict[str, object]) -> None:
    world.create()
    fields = {"policy": "p", "holder": "h", **message}
    assert world.refused(AcquireLease(**fields)).code is ErrorCode.INVALID  # type: ignore[arg-type]
