from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from common.metrics import Figures
from joynexus.wire import ErrorCode, Header, Message, failure, kind_of
from joynexus.wire.front import Accepted, CreatePolicy, Done, JobInfo, OpResult, OptimStep, Ping, Pong
from services.master.events import FrontMessage, Peer
from services.master.oplog import OpLog
from tests.wire.samples import sample

PEER = Peer("front", b"p")
STEP = OptimStep(policy="arm", lease="l", seq=1)


def lines(request: Message, *answers: Message, figures: Figures | None = None) -> list[dict[str, object]]:
    oplog = OpLog(figures or Figures())
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
        "trace": "m1",
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
    assert [line["log_level"] for line in lines(Ping(), *answers)] == ["debug"] * min(1, len(answers))


def test_line_of_what_began_a_job_names_the_job_under_which_its_work_is_logged() -> None:
    submit, begun = sample("submit_job"), sample("job_info")
    assert isinstance(begun, JobInfo)
    (line,) = lines(submit, begun)
    assert (line["trace"], line["job"]) == ("m1", begun.job)


def test_requests_are_counted_by_outcome_and_timed_from_the_first_word_to_the_last() -> None:
    figures = Figures()
    lines(STEP, Accepted(policy="arm", seq=1), OpResult(policy="arm", seq=1), figures=figures)
    lines(STEP, failure(ErrorCode.GAP, "expected 3"), figures=figures)
    assert figures.values("joynexus_ops_total") == {("optim_step", "ok"): 1, ("optim_step", "GAP"): 1}
    assert figures.distributions("joynexus_op_seconds")["optim_step",].sum == 0.5
