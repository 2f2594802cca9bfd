"""Acting: requests travel as they came, the answer names its version, a lost worker loses nothing."""

from __future__ import annotations

import gc
import weakref

import msgspec
import numpy as np
import pytest

from joynexus.specs import EvaluateDatasetSpec, EvaluateSpec
from joynexus.wire import Array, ErrorCode, Failure
from joynexus.wire.back import EvaluateActions, Leaving, PredictDone, Predicted, PredictGroup, Rollout, WorkerAct
from joynexus.wire.errors import failure
from joynexus.wire.front import (
    Actions,
    DatasetInfo,
    Exploration,
    FileEntry,
    GetPolicy,
    JobInfo,
    PolicyInfo,
    PushDataset,
    SubmitJob,
)
from services.master.config import CoreConfig
from tests.unit.master.actors import FakeEnv, FakeInference, new_incarnation
from tests.unit.master.acts import ACT, STATE, act, publish
from tests.unit.master.world import World, run


@pytest.fixture
def world() -> World:
    world = World()
    world.create()
    return world


def test_an_act_reaches_the_worker_as_it_came_and_its_answer_the_asker(world: World) -> None:
    publish(world)
    worker = FakeInference(world, new_incarnation())
    run(worker)
    id = act(world)
    send = worker.inbox[0]
    group = send.message
    assert isinstance(group, PredictGroup)
    assert group.items[0].act == msgspec.msgpack.encode(ACT)
    assert send.buffers == (STATE,)
    run(worker)
    assert world.answers(id) == [Actions(version=1, actions=Array(dtype="<f4", shape=(1, 1, 2), frame=0))]


def test_a_worker_that_registers_without_credit_since_it_leaves_is_asked_nothing(world: World) -> None:
    publish(world)
    leaves = FakeInference(world, new_incarnation(), key="leaves", credit=0)
    run(leaves)
    act(world)
    world.wait(1)
    assert not leaves.inbox
    world.say(leaves.peer, Leaving())
    stays = FakeInference(world, new_incarnation(), key="stays")
    run(leaves, stays)
    assert [len(worker.groups) for worker in (leaves, stays)] == [0, 1]


def test_requests_that_wait_share_a_group_and_find_their_own_buffers(world: World) -> None:
    publish(world)
    for index in range(8):
        world.tell(ACT, buffers=(bytes([index]) * 8,), peer=world.new_peer("front"))
    worker = FakeInference(world, new_incarnation())
    (send,) = [send for send in worker.inbox if isinstance(send.message, PredictGroup)]
    assert len(send.message.items) == 8  # type: ignore[attr-defined]
    for index, item in enumerate(send.message.items):  # type: ignore[attr-defined]
        assert send.buffers[item.first_buffer] == bytes([index]) * 8


def test_what_was_drawn_comes_back_to_whoever_asked_with_its_own_arrays(world: World) -> None:
    publish(world)
    asked = [world.tell(ACT, buffers=(bytes([index]) * 8,), peer=world.new_peer("front")) for index in range(2)]
    worker = FakeInference(world, new_incarnation(), credit=1)
    run_offers = [send for send in worker.inbox if not isinstance(send.message, PredictGroup)]
    worker.inbox.clear()
    for send in run_offers:
        worker.do(send)
    groups = [message for message in worker.received if isinstance(message, PredictGroup)]
    assert [len(group.items) for group in groups] == [2]
    buffers = tuple(bytes([index]) for index in range(8))
    items = [
        Predicted(
            request=item.request,
            version=1,
            actions=Array(dtype="|u1", shape=(1,), frame=4 * index + 2),
            exploration=Exploration(
                sample=Array(dtype="|u1", shape=(1,), frame=4 * index),
                log_prob=Array(dtype="|u1", shape=(1,), frame=4 * index + 3),
                value=Array(dtype="|u1", shape=(1,), frame=4 * index + 1),
            ),
        )
        for index, item in enumerate(groups[0].items)
    ]
    world.say(worker.peer, PredictDone(task=groups[0].task, attempt=1, items=tuple(items)), buffers=buffers)
    for index, id in enumerate(asked):
        (send,) = [send for send in world.told if send.re == id]
        answer = send.message
        assert isinstance(answer, Actions)
        drawn = answer.exploration
        assert drawn is not None
        frames = [answer.actions.frame, drawn.sample.frame, drawn.log_prob.frame, drawn.value.frame]
        assert [send.buffers[frame] for frame in frames] == [bytes([4 * index + at]) for at in (2, 0, 3, 1)]


def test_a_contract_that_differs_is_refused(world: World) -> None:
    publish(world)
    (refused,) = world.answers(act(world, contract="0" * 32))
    assert isinstance(refused, Failure)
    assert refused.code is ErrorCode.CONTRACT_MISMATCH
    good = world.ask(GetPolicy(policy="p"), PolicyInfo).contract_digest
    assert world.answers(act(world, contract=good)) == []


@pytest.mark.parametrize("rows", [0, 65])
def test_rows_have_limits(world: World, rows: int) -> None:
    publish(world)
    (refused,) = world.answers(act(world, state=Array(dtype="<f4", shape=(rows, 2), frame=0)))
    assert isinstance(refused, Failure)
    assert refused.code is ErrorCode.INVALID


def test_anothers_policy_is_not_found(world: World) -> None:
    publish(world)
    mine = world.tell(ACT, tenant="b", buffers=(STATE,))
    nobodys = world.tell(msgspec.structs.replace(ACT, policy="q"), tenant="b", buffers=(STATE,))
    answers = [world.answers(id)[0].message.replace("'q'", "'p'") for id in (mine, nobodys)]  # type: ignore[attr-defined]
    assert answers[0] == answers[1]


def test_a_request_is_done_by_another_worker_if_its_own_dies(world: World) -> None:
    publish(world)
    first = FakeInference(world, new_incarnation(), key="first")
    id = act(world)
    first.die()
    world.wait(3)
    second = FakeInference(world, new_incarnation(), key="second")
    world.wait(5)
    run(second)
    assert isinstance(world.answers(id)[0], Actions)


def test_a_request_that_kills_three_workers_is_set_aside_and_others_are_answered(world: World) -> None:
    publish(world)
    deadly = b"\xff" * 8
    bad = world.tell(ACT, buffers=(deadly,), deadline_ms=60_000)
    good = world.tell(ACT, buffers=(STATE,), deadline_ms=60_000, peer=world.new_peer("front"))
    for life in range(1 + CoreConfig().kills):
        worker = FakeInference(world, new_incarnation(), key=f"life{life}")
        worker.killed_by = deadly
        run(worker)
        world.wait(8)
    last = FakeInference(world, new_incarnation(), key="last")
    run(last)
    (answer,) = world.answers(bad)
    assert isinstance(answer, Failure)
    assert answer.code is ErrorCode.POISON
    assert isinstance(world.answers(good)[0], Actions)


def given(worker: FakeInference) -> list[int]:
    """Rows of the groups that a worker has been sent and has not answered."""
    return [len(send.message.items) for send in worker.inbox if isinstance(send.message, PredictGroup)]


def test_what_a_dead_worker_had_goes_alone_to_a_worker_and_only_deaths_over_it_alone_count() -> None:
    world = World(CoreConfig(batch_rows=2, max_rows=2, kills=2))
    world.create()
    publish(world)
    ids = [world.tell(ACT, buffers=(STATE,), deadline_ms=90_000, peer=world.new_peer("front")) for _ in range(4)]
    had = []
    for life in range(2):
        worker = FakeInference(world, new_incarnation(), key=f"life{life}", credit=2)
        world.wait(1)
        had.append(given(worker))
        worker.die()
        world.wait(8)
    assert had == [[2, 2], [1]], "side by side, and nobody beside a suspect"
    last = FakeInference(world, new_incarnation(), key="last", credit=2)
    run(last)
    assert [type(world.answers(id)[0]) for id in ids] == [Actions] * 4, "two deaths, of which one was over one alone"


def test_a_request_without_any_worker_ends_in_a_sentence_at_its_deadline(world: World) -> None:
    publish(world)
    id = world.tell(ACT, buffers=(STATE,), deadline_ms=2000)
    world.wait(1.5)
    assert world.answers(id) == []
    world.wait(1)
    (answer,) = world.answers(id)
    assert isinstance(answer, Failure)
    assert answer.code is ErrorCode.UNAVAILABLE
    assert "backbone 'lite'" in answer.message


def test_a_request_that_a_busy_worker_never_reaches_ends_at_its_deadline(world: World) -> None:
    publish(world)
    worker = FakeInference(world, new_incarnation())
    worker.applies = False
    first = world.tell(ACT, buffers=(STATE,), deadline_ms=60_000)
    second = world.tell(ACT, buffers=(STATE,), deadline_ms=1_000, peer=world.new_peer("front"))
    world.wait(2)
    (answer,) = world.answers(second)
    assert answer.code is ErrorCode.DEADLINE  # type: ignore[attr-defined]
    run(worker)
    assert isinstance(world.answers(first)[0], Actions)
    assert len(worker.groups) == 1


def test_too_many_requests_of_one_tenant_are_told_to_come_later() -> None:
    world = World(CoreConfig(max_waiting_acts=3))
    world.create()
    publish(world)
    ids = [act(world) for _ in range(4)]
    (answer,) = world.answers(ids[-1])
    assert answer.code is ErrorCode.OVERLOADED  # type: ignore[attr-defined]


def test_requests_that_expired_do_not_count_as_waiting() -> None:
    world = World(CoreConfig(max_waiting_acts=3))
    world.create()
    publish(world)
    for _ in range(2):  # without the first ones' end, the second ones would be refused
        ids = [world.tell(ACT, buffers=(STATE,), deadline_ms=1000) for _ in range(3)]
        world.wait(2)
        assert [world.answers(id)[0].code for id in ids] == [ErrorCode.UNAVAILABLE] * 3  # type: ignore[attr-defined]
    id = act(world)
    run(FakeInference(world, new_incarnation()))
    assert isinstance(world.answers(id)[0], Actions)


def test_answered_requests_free_their_pictures_before_their_deadline(world: World) -> None:
    publish(world)
    worker = FakeInference(world, new_incarnation())
    run(worker)
    picture = np.zeros(8, np.uint8)
    kept = weakref.ref(picture)
    id = world.tell(ACT, buffers=(picture.data,), deadline_ms=3_000_000)
    run(worker)
    assert isinstance(world.answers(id)[0], Actions)
    del picture
    world.sent.clear()
    gc.collect()
    assert kept() is None


def test_bytes_of_one_tenants_requests_are_bounded_and_freed_by_answers() -> None:
    world = World(CoreConfig(max_act_bytes=400))
    world.create()
    publish(world)
    first = world.tell(ACT, buffers=(bytes(300),))
    second = world.tell(ACT, buffers=(bytes(300),))
    assert world.answers(second)[0].code is ErrorCode.OVERLOADED  # type: ignore[attr-defined]
    worker = FakeInference(world, new_incarnation())
    run(worker)
    assert isinstance(world.answers(first)[0], Actions)
    third = world.tell(ACT, buffers=(bytes(300),))
    run(worker)
    assert isinstance(world.answers(third)[0], Actions)


def test_a_request_too_large_to_pass_on_is_refused(world: World) -> None:
    publish(world)
    long = msgspec.structs.replace(ACT, instructions=("x" * 600_000,))
    assert world.refused(long, buffers=(STATE,)).code is ErrorCode.TOO_LARGE


def test_asking_again_while_it_is_under_way_is_one_request(world: World) -> None:
    publish(world)
    worker = FakeInference(world, new_incarnation())
    for _ in range(3):
        world.tell(ACT, buffers=(STATE,), id="same")
    run(worker)
    assert len(world.answers("same")) == 1


def test_an_error_of_one_item_is_its_own(world: World) -> None:
    publish(world)
    worker = FakeInference(world, new_incarnation(), credit=2)
    worker.inbox.clear()
    first, second = act(world), act(world)
    groups = [send.message for send in worker.inbox if isinstance(send.message, PredictGroup)]
    error = failure(ErrorCode.INVALID, "state has 2 values, the policy expects 3")
    items = tuple(Predicted(request=item.request, error=error) for item in groups[0].items)
    world.say(worker.peer, PredictDone(task=groups[0].task, attempt=1, items=items))
    assert world.answers(first) == [error]
    worker.inbox.popleft()
    run(worker)
    assert isinstance(world.answers(second)[0], Actions)


# Rollouts ask through their task


def rollout(world: World) -> tuple[FakeEnv, Rollout]:
    env = FakeEnv(world, new_incarnation(), key="env")
    spec = EvaluateSpec(policy="p", env="metaworld/reach-v3", episodes=5)
    world.ask(SubmitJob(key="k", spec=spec), JobInfo)
    message = env.inbox[0].message
    assert isinstance(message, Rollout)
    return env, message


def test_a_rollout_acts_with_its_tasks_version_whatever_it_says(world: World) -> None:
    publish(world)
    env, task = rollout(world)
    publish(world)
    worker = FakeInference(world, new_incarnation(), key="inference")
    forged = msgspec.msgpack.encode(msgspec.structs.replace(ACT, policy="other", version=9))
    id = world.say(env.peer, WorkerAct(task=task.task, attempt=1, act=forged), buffers=(STATE,))
    run(worker)
    item = worker.groups[-1].items[0]
    assert (item.tenant, item.policy, item.version) == ("a", "p", 1)
    assert isinstance(world.answers(id)[0], Actions)


def test_a_worker_cannot_act_for_a_task_that_is_not_its_own(world: World) -> None:
    publish(world)
    env, task = rollout(world)
    other = FakeEnv(world, new_incarnation(), key="other")
    body = msgspec.msgpack.encode(ACT)
    for peer, attempt in ((other.peer, 1), (env.peer, 2)):
        (answer,) = world.answers(world.say(peer, WorkerAct(task=task.task, attempt=attempt, act=body)))
        assert answer.code is ErrorCode.STALE  # type: ignore[attr-defined]


def test_a_rollouts_request_that_cannot_be_read_is_invalid(world: World) -> None:
    publish(world)
    env, task = rollout(world)
    (answer,) = world.answers(world.say(env.peer, WorkerAct(task=task.task, attempt=1, act=b"\xc1")))
    assert answer.code is ErrorCode.INVALID  # type: ignore[attr-defined]


@pytest.mark.parametrize(("files", "scope"), [(True, "tenant:a"), (False, "shared:demo")])
def test_pictures_of_a_data_set_carry_its_feature_scope_and_others_none(world: World, files: bool, scope: str) -> None:
    publish(world)
    env = FakeEnv(world, new_incarnation(), key="env", mounted=() if files else ("demo",))
    if files:
        world.upload("f" * 64)
        world.ask(PushDataset(dataset="demo", files=(FileEntry(path="x", digest="f" * 64, nbytes=10),)), DatasetInfo)
    job = world.ask(SubmitJob(key="k", spec=EvaluateDatasetSpec(policy="p", dataset="demo", episodes=(0,))), JobInfo)
    env.work(1)  # the set is prepared
    task = env.inbox[0].message
    assert isinstance(task, EvaluateActions), job
    worker = FakeInference(world, new_incarnation(), key="inference")
    world.say(env.peer, WorkerAct(task=task.task, attempt=1, act=msgspec.msgpack.encode(ACT)), buffers=(STATE,))
    act(world)
    run(worker)
    assert [item.feature_scope for group in worker.groups for item in group.items] == [scope, ""]
