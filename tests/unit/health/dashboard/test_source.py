"""What the master answers to the dashboard, as pages understand it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import cast

import pytest

from common.runtime import WorkerRuntime
from joynexus.wire import ErrorCode, JoyNexusError, Packet, failure
from services.health.dashboard.source import MasterSource


class Refusing:
    """A connection whose every question is refused."""

    def __init__(self, code: ErrorCode) -> None:
        self._code = code

    def ask(self, message: object, *, timeout_s: float) -> Future[Packet]:
        answer: Future[Packet] = Future()
        answer.set_exception(JoyNexusError(failure(self._code, "the body cannot be read")))
        return answer


@pytest.mark.parametrize(
    ("answered", "understood"),
    [
        (ErrorCode.INVALID, ErrorCode.NOT_FOUND),
        (ErrorCode.FORBIDDEN, ErrorCode.FORBIDDEN),
        (ErrorCode.UNAVAILABLE, ErrorCode.UNAVAILABLE),
    ],
)
def test_a_name_or_code_that_cannot_be_is_one_that_is_not_there(answered: ErrorCode, understood: ErrorCode) -> None:
    source = MasterSource(cast(WorkerRuntime, Refusing(answered)))
    for question in (source.job("session", "lab", "x" * 3000, 0), source.redeem("x" * 3000)):
        with pytest.raises(JoyNexusError) as caught:
            asyncio.run(question)
        assert caught.value.code is understood
