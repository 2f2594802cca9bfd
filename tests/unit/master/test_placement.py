"""Several trainers: where policies live, and how they move without losing or repeating anything."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from joynexus.wire.back import Leaving
from joynexus.wire.errors import ErrorCode, Failure
from joynexus.wire.front import GetPolicy, JobInfo, MovePolicy, OpResult, OptimStep, PolicyInfo
from services.master.config import CoreConfig
from services.master.placement import Place, Smoothed, best_mover, choose, lopsided
from tests.unit.master.actors import FakeEnv, FakeInference, FakeTrainer, new_incarnation
from tests.unit.master.jobs import info, push, sft, submit
from tests.unit.master.ops import BUFFERS, forward
from tests.unit.master.queued import items, steps
from tests.unit.master.world import SPEC, World, run

OPS = 40


def place(name: str, load: float, **more: int) -> Place:
    return Place(name=name, load=load, **more)


def pair(world: World, **register: object) -> list[FakeTrainer]:
    return [FakeTrainer(world, new_incarnation(), key=f"k{i}", credit=1, **register) for i in range(2)]


def move(world: World, trainer: str, policy: str = "p", **how: object) -> str:
    return world.tell(MovePolicy(policy=policy, trainer=trainer), operator=True, **how)  # type: ignore[arg-type]


def home(world: World, policy: str = "p") -> str:
    return world.ask(GetPolicy(policy=policy), PolicyInfo).home


def moved_halfway(world: World, trainers: list[FakeTrainer]) -> str:
    """Have a policy that is being trained begin to move; return the request's id."""
    world.create()
    steps(world, world.lease(), 1, OPS)
    trainers[0].work(1)
    id = move(world, "trainer-2")
    assert not world.answers(id), "not before it is there"
    return id


def check(world: World, *trainers: FakeTrainer, replays: bool = False) -> None:
    """Everything was done, once and in order (or again with the same outcome)."""
    assert world.core._policies.get("a", "p").applied == OPS
    assert max(trainer.slots["a", "p"].step for trainer in trainers if trainer.slots) == OPS
    assert not any(log.event == "replay_differs" for log in world.logs)
    if not replays:
        done = [key for trainer in trainers for key in trainer.applied.elements()]
        assert sorted(done) == [("a", "p", seq) for seq in range(1, OPS + 1)]
        assert not any(item.replay for trainer in trainers for item in items(trainer))


# The choice


def test_a_policy_goes_where_it_fits_then_where_least_is_to_do_then_where_fewest_live() -> None:
    full = place("full", 0.0, nbytes=90, room=100)
    assert choose([full, place("busy", 5.0)], 20) == place("busy", 5.0)
    assert choose([place("a", 2.0), place("b", 1.0)], 20) == place("b", 1.0)
    assert choose([place("a", 1.01, policies=3), place("b", 1.02, policies=1)], 1) == place("b", 1.02, policies=1)
    assert choose([full], 20) == full, "others are paged for it"
    assert choose([], 1) is None


def test_small_differences_move_nothing_and_large_ones_shrink() -> None:
    assert lopsided([place("a", 3.0)]) is None
    assert lopsided([place("a", 2.0), place("b", 1.0)]) is None
    assert lopsided([place("a", 40.0), place("b", 36.0)]) is None
    gap = lopsided([place("a", 4.0), place("b", 0.0), place("c", 2.0)])
    assert gap is not None
    assert (gap.source, gap.target) == ("a", "b")
    assert best_mover([0.1, 1.0, 4.0], gap) == 1, "the largest that does not turn it round"
    assert best_mover([4.0, 0.0], gap) is None


def test_a_level_that_was_long_ago_hardly_counts() -> None:
    level = Smoothed(0.0)
    level.set(0.0, 4.0)
    assert level.mean(0.0) == 0.0
    assert level.mean(200.0) == pytest.approx(4.0, abs=0.01)
    level.set(200.0, 0.0)
    assert level.mean(205.0) > 2
    assert level.mean(400.0) < 0.01


# Moving


def test_a_policy_moves_in_the_middle_of_its_ops_and_nothing_is_replayed(world: World) -> None:
    trainers = pair(world)
    id = moved_halfway(world, trainers)
    run(*trainers)
    (answer,) = world.answers(id)
    assert isinstance(answer, PolicyInfo)
    assert answer.home == home(world) == "trainer-2"
    assert all(trainer.applied for trainer in trainers)
    check(world, *trainers)
    assert ("a", "p") in trainers[1].slots
    assert move_again(world).home == "trainer-2", "asking again is answered alike"
    assert [log.fields["why"] for log in world.logs if log.event == "policy_moves"] == ["an operator asked for it"]


def move_again(world: World) -> PolicyInfo:
    return world.ask(MovePolicy(policy="p", trainer="trainer-2"), PolicyInfo, operator=True)


def test_an_sft_jobs_curve_is_that_of_the_unmoved_one() -> None:
    curves = []
    for moves in (False, True):
        world = World()
        workers = [FakeInference(world, new_incarnation(), key="i"), FakeEnv(world, new_incarnation(), key="e")]
        trainers = pair(world)
        push(world)
        job: JobInfo = submit(world, sft())
        run(workers[1])
        while trainers[0].work(1) and info(world, job.job).done < 45:
            pass
        if moves:
            move(world, "trainer-2")
        run(*trainers, *workers)
        assert info(world, job.job).state == "succeeded"
        assert bool(trainers[1].applied) is moves
        curves.append(info(world, job.job).losses)
    assert curves[0] == curves[1]


def test_the_policy_waits_for_its_optimizer_step_before_it_moves(world: World) -> None:
    trainers = pair(world)
    world.create()
    lease = world.lease()
    world.tell(forward(lease, 1), buffers=BUFFERS)
    run(*trainers)
    id = move(world, "trainer-2")
    run(*trainers)
    assert home(world) == "trainer-1"
    steps(world, lease, 2, 3)
    run(*trainers)
    assert isinstance(world.answers(id)[-1], PolicyInfo)
    assert [seq for _, _, seq in trainers[1].applied] == [3]


def test_a_step_that_does_not_come_holds_a_move_up_for_a_while_only(world: World) -> None:
    trainers = pair(world)
    world.create()
    lease = world.lease()
    world.tell(forward(lease, 1), buffers=BUFFERS)
    run(*trainers)
    id = move(world, "trainer-2")
    for _ in range(12):
        world.wait(1)
        for trainer in trainers:
            trainer.beat()
    assert isinstance(world.answers(id)[-1], PolicyInfo)
    steps(world, lease, 2, 2)
    run(*trainers)
    assert trainers[1].slots["a", "p"].step == 1
    assert not any(log.event == "replay_differs" for log in world.logs)


def test_the_old_home_dies_in_the_middle_of_a_move(world: World) -> None:
    trainers = pair(world)
    id = moved_halfway(world, trainers)
    trainers[0].die()
    for _ in range(10):
        world.wait(1)
        trainers[1].beat()
    run(trainers[1])
    assert isinstance(world.answers(id)[-1], PolicyInfo)
    check(world, *trainers, replays=True)


def test_the_new_home_dies_in_the_middle_of_a_move_and_the_policy_stays(world: World) -> None:
    trainers = pair(world)
    id = moved_halfway(world, trainers)
    trainers[1].die()
    for _ in range(10):
        world.wait(1)
        trainers[0].beat()
    (answer,) = world.answers(id)
    assert isinstance(answer, Failure)
    assert "trainer-2 was lost" in answer.message
    run(trainers[0])
    check(world, trainers[0])


def test_a_master_that_restarts_in_the_middle_of_a_move_starts_over(world: World) -> None:
    trainers = pair(world)
    moved_halfway(world, trainers)
    world.crash()
    for trainer in trainers:
        trainer.connect()
    run(*trainers)
    check(world, *trainers, replays=True)
    id = move(world, "trainer-2")
    run(*trainers)
    assert isinstance(world.answers(id)[-1], PolicyInfo)


def test_a_policy_that_cannot_be_checkpointed_stays_and_goes_on(world: World) -> None:
    trainers = pair(world)
    trainers[0].checkpoints_fail = True
    id = moved_halfway(world, trainers)
    run(*trainers)
    (answer,) = world.answers(id)
    assert isinstance(answer, Failure)
    assert "disk full" in answer.message
    check(world, trainers[0])


@pytest.mark.parametrize(
    ("trainer", "code", "part"),
    [
        ("trainer-9", ErrorCode.NOT_FOUND, "there is no trainer 'trainer-9'"),
        ("trainer-3", ErrorCode.INVALID, "has backbone 'qwen'"),
        ("trainer-4", ErrorCode.CONFLICT, "would change the numbers"),
        ("trainer-5", ErrorCode.UNAVAILABLE, "is leaving"),
        ("trainer-6", ErrorCode.CONFLICT, "on its way to trainer-2"),
    ],
)
def test_a_move_that_cannot_be_is_refused_with_the_reason(
    world: World, trainer: str, code: ErrorCode, part: str
) -> None:
    trainers = pair(world)
    FakeTrainer(world, new_incarnation(), key="other", backbone_name="qwen")
    moved_halfway(world, trainers)
    for index in (4, 5, 6):
        FakeTrainer(world, new_incarnation(), key=f"late{index}")
    core = world.core._training._trainers
    kind = core["trainer-4"].worker
    kind.register = msgspec.structs.replace(kind.register, batch_key="bf16")
    core["trainer-5"].worker.leaving = True
    refused = world.refused(MovePolicy(policy="p", trainer=trainer), operator=True)
    assert refused.code is code
    assert part in refused.message


def test_only_operators_move_policies_and_somebody_elses_is_named_by_its_tenant(world: World) -> None:
    trainers = pair(world)
    world.create()
    steps(world, world.lease(), 1, 1)
    run(*trainers)
    assert world.refused(MovePolicy(policy="p", trainer="trainer-2")).code is ErrorCode.FORBIDDEN
    message = MovePolicy(policy="p", trainer="trainer-2", tenant="a")
    id = world.tell(message, tenant="operator", operator=True)
    run(*trainers)
    assert isinstance(world.answers(id)[-1], PolicyInfo)
    assert world.refused(MovePolicy(policy="q", trainer="trainer-2"), operator=True).code is ErrorCode.NOT_FOUND


# Trainers that come and go


def test_a_trainer_that_joins_under_load_is_given_policies_and_the_reason_is_logged() -> None:
    world = World(CoreConfig(max_inflight_ops=5000, silent_s=1e6))
    first = FakeTrainer(world, new_incarnation(), credit=1)
    for policy in "pqrs":
        world.create(policy)
        steps(world, world.lease(policy), 1, 1000, policy=policy)
    for _ in range(60):
        first.work(1)
        world.wait(1)
    second = FakeTrainer(world, new_incarnation(), key="second", credit=1)
    for _ in range(60):
        first.work(1)
        second.work(1)
        world.wait(1)
    assert sorted(home(world, policy) for policy in "pqrs") == ["trainer-1"] * 2 + ["trainer-2"] * 2
    reasons = [log.fields["why"] for log in world.logs if log.event == "policy_moves"]
    assert len(reasons) == 2, "and not back and forth"
    assert "trainer-1 has a load of" in str(reasons[0])
    run(first, second)
    assert set((first.applied + second.applied).values()) == {1}
    assert len(first.applied + second.applied) == 4000


def test_policies_that_wait_when_the_master_starts_go_to_all_trainers_that_come_within_some_time() -> None:
    world = World(CoreConfig(silent_s=10.0))
    for index in range(200):
        world.create(f"p{index}")
        steps(world, world.lease(f"p{index}"), 1, 2, policy=f"p{index}")
    world.crash()
    first = FakeTrainer(world, new_incarnation(), key="1")
    assert len(world.core._training._trainers["trainer-1"].homed) <= 16, "an event gives homes to a few only"
    world.wait(0.2)
    second = FakeTrainer(world, new_incarnation(), key="2")
    world.wait(2.0)
    lives = Counter(home(world, f"p{index}") for index in range(200))
    assert 50 <= lives["trainer-1"] <= 150
    assert lives["trainer-1"] + lives["trainer-2"] == 200
    second.die()
    for _ in range(14):
        first.beat()
        world.wait(1.0)
    run(first)
    assert {(policy, seq) for _, policy, seq in first.applied} == {
        (f"p{index}", seq) for index in range(200) for seq in (1, 2)
    }


def test_a_trainer_that_leaves_hands_its_policies_over_without_a_replay(world: World) -> None:
    trainers = pair(world)
    world.create()
    steps(world, world.lease(), 1, OPS)
    trainers[0].work(1)
    world.say(trainers[0].peer, Leaving())
    kinds = [item.kind for send in trainers[0].inbox for item in getattr(send.message, "items", ())]
    assert kinds[-1] == "checkpoint", "it is asked for before it hears that it may go"
    trainers[0].work()
    trainers[0].die()
    run(trainers[1])
    check(world, *trainers)


def test_policies_wait_for_the_next_trainer_with_their_checkpoint_if_the_only_one_leaves(world: World) -> None:
    only = FakeTrainer(world, new_incarnation(), credit=1)
    world.create()
    lease = world.lease()
    steps(world, lease, 1, OPS - 1)
    run(only)
    world.say(only.peer, Leaving())
    run(only)
    only.die()
    later = FakeTrainer(world, new_incarnation(), key="later")
    (id,) = [world.tell(OptimStep(policy="p", lease=lease, seq=OPS))]
    run(later)
    assert isinstance(world.answers(id)[-1], OpResult)
    check(world, only, later)


def test_heads_are_known_from_what_trainers_register(world: World) -> None:
    FakeTrainer(world, new_incarnation(), heads=("oft", "groot"))
    assert world.create("q", spec=msgspec.structs.replace(SPEC, head="groot")).spec.head == "groot"
    assert world.core._training.known_heads("lite") == {"oft", "groot"}
