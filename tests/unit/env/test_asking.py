"""Promises of asking for actions: patience while nobody can answer, no patience for a task that was given away."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from joynexus.wire import ErrorCode, Header, JoyNexusError, Message, Packet, failure, rebuild
from joynexus.wire.arrays import ArrayPacker, Buffer
from joynexus.wire.back import WorkerAct
from joynexus.wire.front import Act, Actions, Pong
from services.env import asking
from services.env.asking import Asker

STATES = np.arange(6, dtype=np.float32).reshape(2, 3)
IMAGES = [np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)]


class Master:
    """Answers what a test says, in order."""

    def __init__(self, *answers: Message | JoyNexusError) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[WorkerAct, list[Buffer]]] = []
        self.alive = 0
        self.rows = 2

    def request(self, message: WorkerAct, buffers: Sequence[Buffer] = (), *, timeout_s: float = 30.0) -> Packet:
        self.asked.append((message, list(buffers)))
        answer = self.answers.pop(0)
        if isinstance(answer, JoyNexusError):
            raise answer
        packer = ArrayPacker()
        array = packer.add(np.full((self.rows, 4, 1), 7, np.float32))
        answer = Actions(version=1, actions=array) if isinstance(answer, Actions) else answer
        return Packet(header=Header(kind="", id="m"), message=answer, buffers=tuple(packer.buffers))

    def is_alive(self) -> None:
        self.alive += 1

    def asker(self) -> Asker:
        return Asker(self.request, self.is_alive, "task", 2, "arm")


def error(code: ErrorCode) -> JoyNexusError:
    return JoyNexusError(failure(code, "because", retry_after_ms=1))


ANSWER = Actions(version=1, actions=ArrayPacker().add(np.zeros((2, 4, 1), np.float32)))


def test_rows_travel_whole_and_actions_come_back() -> None:
    master = Master(ANSWER)
    actions = master.asker()(STATES, IMAGES, ["lift", "push"], [8, 9])
    assert actions.tolist() == np.full((2, 4, 1), 7.0).tolist()
    message, buffers = master.asked[0]
    act = msgspec.msgpack.decode(message.act, type=Act)
    assert (message.task, message.attempt, act.instructions) == ("task", 2, ("lift", "push"))
    assert act.seeds == (8, 9)
    assert np.array_equal(rebuild(act.state, buffers), STATES)
    assert np.array_equal(rebuild(act.images[0], buffers), IMAGES[0])


def test_pictures_too_large_for_one_message_go_in_several() -> None:
    pictures = np.zeros((2, 1024, 1024, 3), np.uint8)
    with pytest.raises(
        JoyNexusError, match="1 rows got actions of"
    ):  # this master answers two rows whatever it is asked
        Master(ANSWER).asker()(STATES, [pictures], ["a", "b"], [0, 1])
    master = Master(ANSWER, ANSWER)
    master.rows = 1
    assert master.asker()(STATES, [pictures], ["a", "b"], [0, 1]).shape == (2, 4, 1)
    asked = [msgspec.msgpack.decode(message.act, type=Act) for message, _ in master.asked]
    assert [(act.instructions, act.seeds) for act in asked] == [(("a",), (0,)), (("b",), (1,))]


def test_it_is_asked_again_while_nobody_can_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_PAUSE_S", 0.0)
    master = Master(error(ErrorCode.UNAVAILABLE), error(ErrorCode.DEADLINE), error(ErrorCode.OVERLOADED), ANSWER)
    assert len(master.asker()(STATES, IMAGES, ["a", "b"], [0, 1])) == 2
    assert len({message.act for message, _ in master.asked}) == 1
    assert master.alive == len(master.asked) == 4


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_PATIENCE_S", -1.0)
    with pytest.raises(JoyNexusError, match="because"):
        Master(error(ErrorCode.UNAVAILABLE)).asker()(STATES, IMAGES, ["a", "b"], [0, 1])


@pytest.mark.parametrize("code", [ErrorCode.STALE, ErrorCode.NOT_FOUND, ErrorCode.INVALID])
def test_what_will_not_change_is_raised_at_once(code: ErrorCode) -> None:
    master = Master(error(code))
    with pytest.raises(JoyNexusError, match="because"):
        master.asker()(STATES, IMAGES, ["a", "b"], [0, 1])
    assert len(master.asked) == 1


def test_an_answer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(JoyNexusError, match="with something else"):
        Master(Pong()).asker()(STATES, IMAGES, ["a", "b"], [0, 1])
    with pytest.raises(JoyNexusError, match="3 rows got actions of"):
        Master(ANSWER).asker()(np.zeros((3, 3), np.float32), [], ["a"] * 3, [0] * 3)
