"""Promises of the env service's shell: an answer that cannot travel is replaced by one that says so."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from joynexus.wire import ErrorCode, Failure, JoyNexusError, Message, encode, failure
from joynexus.wire.back import (
    DatasetPrepared,
    DescribeSimulator,
    IndicesDrawn,
    PrepareDataset,
    SampleIndices,
    SimulatorDescribed,
)
from services.env.service import NoLongerWanted, Task, answer_of, deliver

PREPARE = PrepareDataset(task="t", attempt=2, tenant="a", dataset="arm")
DRAW = SampleIndices(
    task="t", attempt=2, tenant="a", manifest="0" * 64, holdout_episodes=0, seed=0, batch_size=1, first_step=0, steps=1
)
DESCRIBE = DescribeSimulator(task="t", attempt=2, tenant="a", env="metaworld/reach-v3")


class Wire:
    """Sends as the real one does: what exceeds a limit raises."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        encode(message, id="r1")
        self.sent.append(message)


def test_an_answer_that_fits_is_sent_as_it_is() -> None:
    wire, answer = Wire(), IndicesDrawn(task="t", attempt=2, batches=((1, 2),))
    assert deliver(DRAW, answer, wire.send) is answer
    assert wire.sent == [answer]


def test_an_answer_too_large_for_a_message_is_a_failure_not_a_silence() -> None:
    wire = Wire()
    drawn = IndicesDrawn(task="t", attempt=2, batches=(tuple(range(10**6)),))
    prepared = DatasetPrepared(task="t", attempt=2, manifest="0" * 64, blobs=(("0" * 64, 10**9),) * 20_000)
    for message, answer in ((DRAW, drawn), (PREPARE, prepared)):
        sent = deliver(message, answer, wire.send)
        assert wire.sent.pop() is sent
        assert type(sent) is type(answer)
        assert "too large" in msgspec.json.encode(sent).decode()
    assert isinstance(sent, DatasetPrepared)
    assert sent.error is not None
    assert sent.error.category == "user"  # tried again, it would be as large again
    failed = deliver(DRAW, drawn, wire.send)
    assert isinstance(failed, IndicesDrawn)
    assert failed.error is not None
    assert failed.error.code is ErrorCode.TOO_LARGE


def raising(error: Exception) -> Callable[[Task], Message]:
    def do(_: Task) -> Message:
        raise error

    return do


def test_work_that_fails_is_answered_in_its_own_kind() -> None:
    unavailable = JoyNexusError(failure(ErrorCode.UNAVAILABLE, "the disk is full"))
    for message, kind in ((DESCRIBE, SimulatorDescribed), (PREPARE, DatasetPrepared), (DRAW, IndicesDrawn)):
        for error, code in ((unavailable, ErrorCode.UNAVAILABLE), (ZeroDivisionError(), ErrorCode.INTERNAL)):
            answer = answer_of(message, raising(error), lambda: 1.5)
            assert isinstance(answer, kind)
            assert (answer.task, answer.attempt) == ("t", 2)
            assert isinstance(answer.error, Failure)
            assert answer.error.code is code
            assert answer.busy_s == 1.5


def test_of_work_that_nobody_waits_for_it_is_said_what_it_took() -> None:
    stale = JoyNexusError(failure(ErrorCode.STALE, "it was given to another worker"))
    for error in (NoLongerWanted("t"), stale):
        answer = answer_of(DESCRIBE, raising(error), lambda: 1.5)
        assert answer.error is not None
        assert (answer.error.code, answer.busy_s) == (ErrorCode.STALE, 1.5)
