from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from joynexus.wire import ErrorCode, Header, Message, failure, kind_of
from joynexus.wire.front import Accepted, CreatePolicy, Done, OpResult, OptimStep, Ping, Pong
from services.master.events import FrontMessage, Peer
from services.master.oplog import OpLog
from tests.wire.samples import sample

PEER = Peer("front", b"p")
STEP = OptimStep(policy="arm", lease="l", seq=1)


def lines(request: Message, *answers: Message) -> list[dict[str, object]]:
    oplog = OpLog()
    with capture_logs() as logs:
        header = Header(kind=kind_of(request), id="m1")
        event = FrontMessage(
            peer=PEER, tenant="acme", scope="all", operator=False, header=header, message=request, body=b""
        )
        oplog.came(event, 10.0)
        for answer in answers:
            oplog.goes(PEER, "m1", answer, 10.25)
    return [dict(line) for line in logs]


def test_failed_request_has_one_line_under_the_id_that_its_error_names() -> None:
    (line,) = lines(STEP, failure(ErrorCode.GAP, "expected 3"))
    assert line == {
        "event": "op",
        "log_level": "info",
        "op": "optim_step",
        "outcome": "GAP",
        "ms": 250.0,
        "tenant": "acme",
        "policy": "arm",
        "request_id": "m1",
        "why": "expected 3",
    }


def test_fault_of_the_service_is_a_warning() -> None:
    (line,) = lines(Ping(), failure(ErrorCode.INTERNAL, "oops"))
    assert line["log_level"] == "warning"


def test_op_has_its_line_when_its_result_is_there() -> None:
    assert lines(STEP, Accepted(policy="arm", seq=1)) == []
    vetoed = OpResult(policy="arm", seq=1, error=failure(ErrorCode.NON_FINITE, "NaN"))
    (line,) = lines(STEP, Accepted(policy="arm", seq=1), vetoed)
    assert line["outcome"] == "NON_FINITE"


def test_notable_request_has_a_line_also_when_it_goes_well() -> None:
    create = sample("create_policy")
    assert isinstance(create, CreatePolicy)
    (line,) = lines(create, Done())
    assert (line["op"], line["outcome"], line["why"]) == ("create_policy", "ok", "")


@pytest.mark.parametrize("answers", [(Pong(),), (Pong(), Pong()), ()])
def test_thousands_that_go_well_fill_no_log(answers: tuple[Message, ...]) -> None:
    assert lines(Ping(), *answers) == []
