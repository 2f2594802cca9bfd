"""A message over which the core raises costs whoever sent it: the master goes on for all others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from joynexus.wire import ErrorCode, Failure, Header, Message, kind_of
from joynexus.wire.back import Beat, Registered, TrainDone
from joynexus.wire.front import Accepted, GetPolicy, OpResult, OptimStep
from services.master.commands import Log, Send
from services.master.core import MessageFaultError
from services.master.events import FrontMessage, Tick
from services.master.guard import SET_ASIDE_S, Guard
from tests.unit.master.actors import FakeTrainer, new_incarnation
from tests.unit.master.world import World, run


class Guarded(World):
    """A world whose shell has a guard, and in whose core bugs can be planted."""

    def __init__(self) -> None:
        super().__init__()
        self.guard = Guard(self.core)
        self.met = 0

    def event(self, event: Any) -> None:
        self._run(self.guard.handle(event, self.now))
        self._run(self.guard.handle(Tick(), self.now))
        self.settle()

    def plant(self, kind: type[Message], *, when: Any = lambda message: True, after: bool = False) -> None:
        """Have the core raise over messages of a kind, before or after it did what it does."""
        for table in (self.core._front, self.core._back):
            handler = table.get(kind)
            if handler is not None:
                table[kind] = self._bug(handler, when, after)

    def _bug(self, handler: Any, when: Any, after: bool) -> Any:
        def handle(asked: Any, message: Any) -> None:
            if not when(message) or after:
                handler(asked, message)
            if when(message):
                self.met += 1
                raise KeyError("planted")

        return handle


@pytest.fixture
def world() -> Guarded:
    world = Guarded()
    world.create()
    world.create(tenant="b")
    return world


def lines(world: World) -> list[Log]:
    return [log for log in world.logs if log.event == "message_met_a_bug"]


def test_a_request_that_meets_a_bug_is_answered_and_others_are_served(world: Guarded) -> None:
    world.plant(GetPolicy, when=lambda message: message.policy == "p")
    failed = world.refused(GetPolicy(policy="p"))
    assert failed.code is ErrorCode.INTERNAL
    assert "planted" not in failed.message
    assert "Traceback" not in failed.message
    assert world.refused(GetPolicy(policy="q"), tenant="b").code is ErrorCode.NOT_FOUND
    (line,) = lines(world)
    assert "planted" in str(line.fields["trace"])
    assert line.fields["sender"] == "a"


def test_the_same_request_is_not_tried_again_for_a_while_by_that_tenant(world: Guarded) -> None:
    world.plant(GetPolicy)
    for _ in range(5):
        assert world.refused(GetPolicy(policy="p"), peer=world.new_peer("front")).code is ErrorCode.INTERNAL
    assert world.met == 1
    world.refused(GetPolicy(policy="p"), tenant="b")
    assert world.met == 2, "another tenant's request is its own"
    world.now += SET_ASIDE_S
    world.refused(GetPolicy(policy="p"))
    assert world.met == 3


def test_what_was_commanded_before_the_bug_is_carried_out(world: Guarded) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    lease = world.lease()
    world.plant(OptimStep, after=True)
    answers = world.answers(world.tell(OptimStep(policy="p", lease=lease, seq=1)))
    run(trainer)
    kinds = [type(answer) for answer in answers]
    assert kinds == [Failure, Accepted, OpResult], "the op was entered before the bug: it is journaled and done"
    assert trainer.applied["a", "p", 1] == 1


def test_a_worker_whose_word_meets_a_bug_is_dismissed_and_its_work_is_done_anew(world: Guarded) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    lease = world.lease()
    world.plant(TrainDone, when=lambda message: world.met == 0)
    id = world.tell(OptimStep(policy="p", lease=lease, seq=1))
    run(trainer)
    assert world.met == 1
    assert [type(answer) for answer in world.answers(id)] == [Accepted]
    (lost,) = [log for log in world.logs if log.event == "worker_lost"]
    assert "bug" in str(lost.fields["why"])
    trainer.beat()
    trainer.connect()  # it was told that it is not registered
    registered = [got for got in trainer.received if isinstance(got, Registered)]
    assert len(registered) == 2
    run(trainer)
    assert [type(answer) for answer in world.answers(id)] == [Accepted, OpResult]


def test_a_worker_is_told_to_register_again_after_its_beat_met_a_bug(world: Guarded) -> None:
    trainer = FakeTrainer(world, new_incarnation())
    world.plant(Beat, when=lambda message: world.met == 0)
    trainer.beat()
    trainer.beat()
    last = trainer.received[-1]
    assert isinstance(last, Failure)
    assert last.code is ErrorCode.NOT_REGISTERED


def test_what_nobody_asked_for_ends_the_master(world: Guarded) -> None:
    def broken() -> None:
        raise KeyError("planted")

    world.core._outbox.after(1.0, broken)
    world.now += 2.0
    with pytest.raises(KeyError):
        world.guard.handle(Tick(), world.now)


def test_a_flood_of_requests_that_meet_a_bug_fills_neither_log_nor_memory(world: Guarded) -> None:
    world.plant(GetPolicy)
    for number in range(3000):
        world.refused(GetPolicy(policy=f"p{number}"))
    assert len(lines(world)) == 12
    assert len(world.guard._set_aside) <= 1000
    assert world.guard.faults["get_policy"] == 3000


def test_the_core_alone_hides_no_bug(world: Guarded) -> None:
    world.plant(GetPolicy)
    message = GetPolicy(policy="p")
    asked = FrontMessage(
        peer=world.client("a"),
        tenant="a",
        scope="all",
        operator=False,
        header=Header(kind=kind_of(message), id="x"),
        message=message,
        body=msgspec.msgpack.encode(message),
    )
    with pytest.raises(MessageFaultError) as caught:
        world.core.handle(asked, world.now)
    assert isinstance(caught.value.__cause__, KeyError)
    assert all(isinstance(command, Send) for command in world.core.after_fault(asked))
