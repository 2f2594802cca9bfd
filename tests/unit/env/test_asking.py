"""Promises of asking for actions: patience while nobody can answer, no patience for a task that was given away."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from joynexus.simulation import asking
from joynexus.simulation.asking import Asker
from joynexus.wire import ErrorCode, Header, JoyNexusError, Message, Packet, failure, rebuild
from joynexus.wire.arrays import ArrayPacker, Buffer
from joynexus.wire.front import Act, Actions, Exploration, Pong

STATES = np.arange(6, dtype=np.float32).reshape(2, 3)
IMAGES = [np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)]


class Master:
    """Answers what a test says, in order."""

    def __init__(self, *answers: Message | JoyNexusError) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[Act, list[Buffer]]] = []
        self.alive = 0
        self.rows, self.chunk = 2, 4

    def request(self, act: bytes, buffers: Sequence[Buffer], *, timeout_s: float) -> Packet:
        self.asked.append((msgspec.msgpack.decode(act, type=Act), list(buffers)))
        answer = self.answers.pop(0)
        if isinstance(answer, JoyNexusError):
            raise answer
        packer = ArrayPacker()
        if isinstance(answer, Actions):
            actions = packer.add(np.full((self.rows, 4, 1), 7, np.float32))
            told = answer.exploration and Exploration(
                sample=packer.add(np.full((self.rows, 5), 1, np.float32)),
                log_prob=packer.add(np.full((self.rows, self.chunk, 1), 2, np.float32)),
                value=packer.add(np.full((self.rows, 1), 3, np.float32)),
            )
            answer = Actions(version=answer.version, actions=actions, exploration=told)
        return Packet(header=Header(kind="", id="m"), message=answer, buffers=tuple(packer.buffers))

    def is_alive(self) -> None:
        self.alive += 1

    def asker(self, *, explore: bool = False) -> Asker:
        return Asker(self.request, self.is_alive, "arm", explore=explore)


def error(code: ErrorCode) -> JoyNexusError:
    return JoyNexusError(failure(code, "because", retry_after_ms=1))


_ARRAY = ArrayPacker().add(np.zeros((2, 4, 1), np.float32))
ANSWER = Actions(version=1, actions=_ARRAY)
EXPLORED = Actions(version=1, actions=_ARRAY, exploration=Exploration(sample=_ARRAY, log_prob=_ARRAY, value=_ARRAY))


def test_rows_travel_whole_and_actions_come_back() -> None:
    master = Master(ANSWER)
    answer = master.asker()(STATES, IMAGES, ["lift", "push"], [8, 9])
    assert answer.actions.tolist() == np.full((2, 4, 1), 7.0).tolist()
    assert (answer.version, answer.explored) == (1, None)
    act, buffers = master.asked[0]
    assert (act.policy, act.instructions, act.seeds, act.explore) == ("arm", ("lift", "push"), (8, 9), False)
    assert np.array_equal(rebuild(act.state, buffers), STATES)
    assert np.array_equal(rebuild(act.images[0], buffers), IMAGES[0])


def test_pictures_too_large_for_one_message_go_in_several() -> None:
    pictures = np.zeros((2, 1024, 1024, 3), np.uint8)
    with pytest.raises(
        JoyNexusError, match="1 rows got numbers of"
    ):  # this master answers two rows whatever it is asked
        Master(ANSWER).asker()(STATES, [pictures], ["a", "b"], [0, 1])
    master = Master(ANSWER, ANSWER)
    master.rows = 1
    assert master.asker()(STATES, [pictures], ["a", "b"], [0, 1]).actions.shape == (2, 4, 1)
    assert [(act.instructions, act.seeds) for act, _ in master.asked] == [(("a",), (0,)), (("b",), (1,))]


def test_it_is_asked_again_while_nobody_can_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_PAUSE_S", 0.0)
    master = Master(error(ErrorCode.UNAVAILABLE), error(ErrorCode.DEADLINE), error(ErrorCode.OVERLOADED), ANSWER)
    assert len(master.asker()(STATES, IMAGES, ["a", "b"], [0, 1]).actions) == 2
    assert all(act == master.asked[0][0] for act, _ in master.asked)
    assert master.alive == len(master.asked) == 4


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_PATIENCE_S", -1.0)
    with pytest.raises(JoyNexusError, match="because") as caught:
        Master(error(ErrorCode.UNAVAILABLE)).asker()(STATES, IMAGES, ["a", "b"], [0, 1])
    assert caught.value.failure.retry_after_ms == 0, "the master would have it tried for ever"


@pytest.mark.parametrize("code", [ErrorCode.STALE, ErrorCode.NOT_FOUND, ErrorCode.INVALID])
def test_what_will_not_change_is_raised_at_once(code: ErrorCode) -> None:
    master = Master(error(code))
    with pytest.raises(JoyNexusError, match="because"):
        master.asker()(STATES, IMAGES, ["a", "b"], [0, 1])
    assert len(master.asked) == 1


def test_an_answer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(JoyNexusError, match="with something else"):
        Master(Pong()).asker()(STATES, IMAGES, ["a", "b"], [0, 1])
    with pytest.raises(JoyNexusError, match="3 rows got numbers of"):
        Master(ANSWER).asker()(np.zeros((3, 3), np.float32), [], ["a"] * 3, [0] * 3)


def test_who_explores_is_told_how_the_actions_were_drawn() -> None:
    master = Master(EXPLORED, EXPLORED)
    master.rows = 1
    pictures = np.zeros((2, 1024, 1024, 3), np.uint8)  # two messages
    answer = master.asker(explore=True)(STATES, [pictures], ["a", "b"], [0, 1])
    assert all(act.explore for act, _ in master.asked)
    assert answer.explored is not None
    assert answer.explored.sample.tolist() == np.full((2, 5), 1.0).tolist()
    assert answer.explored.log_prob.tolist() == np.full((2, 4, 1), 2.0).tolist()
    assert answer.explored.value.tolist() == [[3.0], [3.0]]


def test_rows_of_two_versions_are_never_one_answer() -> None:
    master = Master(ANSWER, msgspec.structs.replace(ANSWER, version=2))
    master.rows = 1
    with pytest.raises(JoyNexusError, match="version changed") as caught:
        master.asker()(STATES, [np.zeros((2, 1024, 1024, 3), np.uint8)], ["a", "b"], [0, 1])
    assert caught.value.code is ErrorCode.UNAVAILABLE


def test_an_answer_that_does_not_tell_what_training_needs_is_refused() -> None:
    with pytest.raises(JoyNexusError, match="without telling how actions were drawn"):
        Master(ANSWER).asker(explore=True)(STATES, IMAGES, ["a", "b"], [0, 1])
    master = Master(EXPLORED)
    master.chunk = 3
    with pytest.raises(JoyNexusError, match="got log-probabilities of"):
        master.asker(explore=True)(STATES, IMAGES, ["a", "b"], [0, 1])
