"""The client's core, driven by hand: every loss, refusal and restart has one stated outcome."""

from __future__ import annotations

import pytest

from joynexus.client._core import RETRY_BUDGET_S, RETURN_S, SILENCE_LIMIT_S, ClientCore
from joynexus.client._events import (
    Answer,
    Ask,
    Command,
    Connected,
    Fail,
    Op,
    Received,
    Refused,
    Release,
    Send,
    Tick,
    Unsent,
)
from joynexus.wire import ErrorCode, Header, Message, Packet, failure
from joynexus.wire.errors import TOO_OFTEN
from joynexus.wire.front import (
    Accepted,
    AcquireLease,
    GetPolicy,
    Hello,
    Lease,
    OpResult,
    OptimStep,
    Ping,
    Pong,
    ReleaseLease,
    Welcome,
)

ADDRESS = "tcp://127.0.0.1:7000"


def make_core(jitter: float = 0.0) -> ClientCore:
    return ClientCore(address=ADDRESS, holder="me", jitter=lambda: jitter)


def answer(message: Message, re: str) -> Received:
    return Received(packet=Packet(header=Header(kind="any", id="x", re=re), message=message))


def sends(commands: list[Command]) -> list[Send]:
    return [command for command in commands if isinstance(command, Send)]


def welcome(window: int = 8) -> Welcome:
    return Welcome(protocol=1, server="s", tenant="t", scope="all", inline_bytes=1, max_inflight_ops=window)


def op(name: str, policy: str = "p") -> Op:
    return Op(id=name, policy=policy, message=OptimStep(policy=policy, lease="", seq=0))


def lease_core(window: int = 8) -> ClientCore:
    """A core that has a lease on policy `p`, with next_seq 1 and one finished op."""
    core = make_core()
    core.handle(Ask(id="hello", message=Hello(protocol_min=1, protocol_max=1, client="c")), 0.0)
    core.handle(answer(welcome(window), "hello"), 0.0)
    (ask,) = sends(core.handle(op("first"), 0.0))
    assert isinstance(ask.message, AcquireLease)
    (sent,) = sends(core.handle(answer(Lease(policy="p", lease="L", next_seq=1), ask.id), 0.0))
    core.handle(answer(OpResult(policy="p", seq=1), sent.id), 0.0)
    return core


def seq(send: Send) -> int:
    assert isinstance(send.message, OptimStep)
    return send.message.seq


def test_no_cluster_gives_one_sentence_at_the_deadline() -> None:
    core = make_core()
    core.handle(Ask(id="h", message=Hello(protocol_min=1, protocol_max=1, client="c"), patience_s=5.0), 0.0)
    commands = core.handle(Tick(), 5.0)
    (fail,) = commands
    assert isinstance(fail, Fail)
    assert str(fail.error) == (
        "no answer from tcp://127.0.0.1:7000 within 5 s: is the cluster running? start it with `joynexus up`"
    )
    assert core.waiting == 0


def test_cluster_that_answers_others_is_not_called_absent_at_the_deadline() -> None:
    core = lease_core()
    core.handle(Ask(id="a", message=Ping(), patience_s=0.5), 1.0)
    core.handle(Ask(id="b", message=Ping(), patience_s=9.0), 1.0)
    core.handle(answer(Pong(), "b"), 1.2)
    (fail,) = core.handle(Tick(), 1.5)
    assert isinstance(fail, Fail)
    assert fail.error.code is ErrorCode.DEADLINE
    assert str(fail.error) == (
        "no answer to this within 0.5 s, but the cluster is there: wait longer; `joynexus status` shows what else it "
        "has to do"
    )


def test_refused_key_fails_hello_at_once() -> None:
    core = make_core()
    core.handle(Ask(id="h", message=Hello(protocol_min=1, protocol_max=1, client="c")), 0.0)
    (fail,) = core.handle(Refused(channel="control", why="this key is not accepted"), 0.1)
    assert isinstance(fail, Fail)
    assert fail.error.code is ErrorCode.FORBIDDEN
    assert str(fail.error) == "this key is not accepted"


def test_key_refused_later_is_said_when_patience_ends_unless_it_came_back() -> None:
    for back, code in ((False, ErrorCode.FORBIDDEN), (True, ErrorCode.DEADLINE)):
        core = lease_core()
        core.handle(Ask(id="a", message=Ping(), patience_s=10.0), 1.0)
        core.handle(Refused(channel="control", why="this key is not accepted"), 2.0)
        if back:
            core.handle(Connected(channel="control"), 3.0)
        (fail,) = [command for command in core.handle(Tick(), 11.0) if isinstance(command, Fail)]
        assert fail.error.code is code


def test_silence_sends_again_with_the_same_id_until_patience_ends() -> None:
    core = make_core()
    core.handle(Ask(id="a", message=Ping(), patience_s=10.0, resend_s=3.0), 0.0)
    assert sends(core.handle(Tick(), 2.9)) == []
    (again,) = sends(core.handle(Tick(), 3.0))
    assert again.id == "a"
    assert again.deadline_ms == 7000
    (fail,) = core.handle(Tick(), 10.0)
    assert isinstance(fail, Fail)
    assert fail.error.code is ErrorCode.DEADLINE


def test_answer_to_a_question_asked_twice_counts_once() -> None:
    core = make_core()
    core.handle(Ask(id="a", message=Ping()), 0.0)
    core.handle(Connected(channel="control"), 0.1)
    assert [type(c) for c in core.handle(answer(Pong(), "a"), 0.2)] == [Answer]
    assert core.handle(answer(Pong(), "a"), 0.3) == []


def test_refusal_that_may_be_retried_is_retried_after_the_hint() -> None:
    core = make_core()
    core.handle(Ask(id="a", message=Ping(), patience_s=60.0), 0.0)
    overloaded = failure(ErrorCode.OVERLOADED, "later", retry_after_ms=500)
    assert core.handle(answer(overloaded, "a"), 1.0) == []
    assert core.handle(Tick(), 1.4) == []
    (again,) = sends(core.handle(Tick(), 1.5))
    assert again.id == "a"


def test_asking_too_often_fails_no_op_however_long_it_is_refused() -> None:
    core = lease_core()
    (sent,) = sends(core.handle(op("a"), 5.0))
    too_often = failure(ErrorCode.OVERLOADED, "later", retry_after_ms=1000, details={TOO_OFTEN: 10.0})
    now = 5.0
    while now < 5 * RETRY_BUDGET_S:
        assert core.handle(answer(too_often, sent.id), now) == []
        assert core.handle(Tick(), now + 0.9) == []
        now += 1.0
        assert [again.id for again in sends(core.handle(Tick(), now))] == [sent.id]
    core.handle(answer(Accepted(policy="p", seq=2), sent.id), now)
    assert core.handle(answer(too_often, sent.id), now) == []
    assert sends(core.handle(Tick(), now + 4.9)) == []  # what was accepted need not be asked for soon


def test_asking_too_often_fails_a_question_when_its_patience_ends() -> None:
    core = make_core()
    core.handle(Ask(id="a", message=Ping(), patience_s=10.0), 0.0)
    too_often = failure(ErrorCode.OVERLOADED, "later", retry_after_ms=4000, details={TOO_OFTEN: 10.0})
    assert core.handle(answer(too_often, "a"), 1.0) == []
    assert [again.id for again in sends(core.handle(Tick(), 5.0))] == ["a"]
    (fail,) = core.handle(answer(too_often, "a"), 7.0)
    assert isinstance(fail, Fail)
    assert fail.error.code is ErrorCode.OVERLOADED


def test_refusals_are_raised_when_the_retry_budget_is_used_up() -> None:
    core = make_core()
    core.handle(Ask(id="a", message=Ping(), patience_s=1000.0), 0.0)
    now, failed = 0.0, None
    while failed is None:
        now += 5.0
        core.handle(Tick(), now)
        for command in core.handle(answer(failure(ErrorCode.UNAVAILABLE, "busy"), "a"), now):
            failed = command
    assert isinstance(failed, Fail)
    assert failed.error.code is ErrorCode.UNAVAILABLE
    assert RETRY_BUDGET_S <= now <= RETRY_BUDGET_S + 10.0


def test_refusal_that_may_not_be_retried_is_raised_with_its_request_id() -> None:
    core = make_core()
    core.handle(Ask(id="a", message=GetPolicy(policy="p")), 0.0)
    (fail,) = core.handle(answer(failure(ErrorCode.NOT_FOUND, "no such policy"), "a"), 0.1)
    assert isinstance(fail, Fail)
    assert fail.error.request_id == "a"
    assert str(fail.error) == "no such policy"


def test_full_socket_is_tried_again_soon() -> None:
    core = make_core()
    core.handle(Ask(id="a", message=Ping()), 0.0)
    core.handle(Unsent(id="a"), 0.0)
    deadline = core.next_deadline()
    assert deadline is not None
    assert deadline < 0.1
    assert [s.id for s in sends(core.handle(Tick(), deadline))] == ["a"]


def test_ops_wait_for_the_lease_then_go_in_order_with_their_numbers() -> None:
    core = make_core()
    (ask,) = sends(core.handle(op("a"), 0.0))
    assert isinstance(ask.message, AcquireLease)
    assert core.handle(op("b"), 0.0) == []
    sent = sends(core.handle(answer(Lease(policy="p", lease="L", next_seq=7), ask.id), 0.1))
    assert [seq(s) for s in sent] == [7, 8]
    assert all(isinstance(s.message, OptimStep) and s.message.lease == "L" for s in sent)


def test_denied_lease_fails_the_ops_that_waited_for_it() -> None:
    core = make_core()
    (ask,) = sends(core.handle(op("a"), 0.0))
    core.handle(op("b"), 0.0)
    commands = core.handle(answer(failure(ErrorCode.CONFLICT, "job:1 drives this policy"), ask.id), 0.1)
    assert [(type(c), c.id) for c in commands if isinstance(c, Fail)] == [(Fail, "a"), (Fail, "b")]
    assert core.waiting == 0


def test_result_comes_after_accepted_and_under_the_callers_id() -> None:
    core = lease_core()
    (sent,) = sends(core.handle(op("a"), 1.0))
    assert core.handle(answer(Accepted(policy="p", seq=2), sent.id), 1.1) == []
    (done,) = core.handle(answer(OpResult(policy="p", seq=2, metrics={"loss": 1.0}), sent.id), 9.0)
    assert isinstance(done, Answer)
    assert done.id == "a"


def test_accepted_op_attaches_again_after_reconnection_with_the_same_number() -> None:
    core = lease_core()
    (sent,) = sends(core.handle(op("a"), 1.0))
    core.handle(answer(Accepted(policy="p", seq=2), sent.id), 1.1)
    hello, again = sends(core.handle(Connected(channel="control"), 20.0))
    assert isinstance(hello.message, Hello)
    assert (again.id, again.message) == (sent.id, sent.message)


def test_what_waits_is_sent_again_in_order_at_a_random_moment_after_a_connection_was_lost() -> None:
    core = lease_core()
    core.handle(Connected(channel="control"), 0.5)
    waiting = [sends(core.handle(op(name), 1.0))[0].id for name in ("a", "b", "c")]
    core.jitter = lambda: 0.5
    assert sends(core.handle(Connected(channel="control"), 2.0)) == []
    assert sends(core.handle(Tick(), 2.2)) == []
    again = sends(core.handle(Tick(), 2.0 + RETURN_S / 2))
    assert [send.id for send in again] == ["hello", *waiting]


def test_greeting_that_was_lost_with_its_connection_is_said_again_until_answered() -> None:
    core = lease_core()
    for now in (1.0, 2.0):
        core.handle(Connected(channel="control"), now)
    (first,) = sends(core.handle(Tick(), 2.0))
    (second,) = sends(core.handle(Tick(), 10.0))
    assert first.id == second.id == "hello"
    core.handle(answer(welcome(4), "hello"), 10.1)
    assert core.waiting == 0


def test_vetoed_op_raises_and_the_sequence_goes_on() -> None:
    core = lease_core()
    (sent,) = sends(core.handle(op("a"), 1.0))
    error = failure(ErrorCode.NON_FINITE, "the loss is not finite")
    (fail,) = core.handle(answer(OpResult(policy="p", seq=2, error=error), sent.id), 1.1)
    assert isinstance(fail, Fail)
    assert fail.id == "a"
    (following,) = sends(core.handle(op("b"), 1.2))
    assert seq(following) == 3


def test_gap_behind_a_lost_op_is_filled_not_raised() -> None:
    core = lease_core()
    sends(core.handle(op("lost"), 1.0))
    (second,) = sends(core.handle(op("b"), 1.0))
    assert core.handle(answer(failure(ErrorCode.GAP, "expected 2"), second.id), 1.1) == []
    sent = sends(core.handle(Tick(), 10.0))
    assert [seq(s) for s in sorted(sent, key=seq)] == [2, 3]


def test_gap_without_a_lost_op_is_raised() -> None:
    core = lease_core()
    (sent,) = sends(core.handle(op("a"), 1.0))
    commands = core.handle(answer(failure(ErrorCode.GAP, "expected 9"), sent.id), 1.1)
    assert [type(c) for c in commands] == [Fail]


def test_refused_op_frees_its_number_for_the_ops_behind_it() -> None:
    core = lease_core()
    (bad,) = sends(core.handle(op("bad"), 1.0))
    (good,) = sends(core.handle(op("good"), 1.0))
    fail, ask = core.handle(answer(failure(ErrorCode.INVALID, "no"), bad.id), 1.1)
    assert isinstance(fail, Fail)
    assert fail.id == "bad"
    assert isinstance(ask, Send)
    assert core.handle(answer(failure(ErrorCode.GAP, "expected 2"), good.id), 1.2) == []  # answer to the old number
    (again,) = sends(core.handle(answer(Lease(policy="p", lease="L", next_seq=2), ask.id), 1.3))
    assert seq(again) == 2
    assert again.id != good.id
    (done,) = core.handle(answer(OpResult(policy="p", seq=2), again.id), 1.4)
    assert isinstance(done, Answer)
    assert done.id == "good"


def test_no_more_ops_are_under_way_than_the_service_allows() -> None:
    core = lease_core(window=2)
    sent = [s for name in "abcd" for s in sends(core.handle(op(name), 1.0))]
    assert [seq(s) for s in sent] == [2, 3]
    (third,) = sends(core.handle(answer(OpResult(policy="p", seq=2), sent[0].id), 2.0))
    assert seq(third) == 4


def test_lease_that_may_have_run_out_is_asked_for_again() -> None:
    core = lease_core()
    (ask,) = sends(core.handle(op("late"), 45.0))
    assert isinstance(ask.message, AcquireLease)
    (sent,) = sends(core.handle(answer(Lease(policy="p", lease="L2", next_seq=5), ask.id), 45.1))
    assert seq(sent) == 5


def test_release_gives_the_lease_back_once() -> None:
    core = lease_core()
    (sent,) = sends(core.handle(Release(id="r", policy="p"), 1.0))
    assert sent.message == ReleaseLease(policy="p", lease="L")
    assert core.handle(Release(id="r2", policy="p"), 1.0) == [Answer(id="r2", packet=None)]


def test_release_with_ops_under_way_is_refused() -> None:
    core = lease_core()
    core.handle(op("a"), 1.0)
    (fail,) = core.handle(Release(id="r", policy="p"), 1.0)
    assert isinstance(fail, Fail)
    assert fail.error.code is ErrorCode.CONFLICT


def test_ops_are_given_up_when_the_whole_service_stays_silent() -> None:
    core = lease_core()
    core.handle(op("a"), 1.0)
    now, failed = 1.0, []
    while not failed:
        deadline = core.next_deadline()
        assert deadline is not None
        now = deadline
        failed = [c for c in core.handle(Tick(), now) if isinstance(c, Fail)]
    assert failed[0].id == "a"
    assert SILENCE_LIMIT_S <= now <= SILENCE_LIMIT_S + 20.0


def test_slow_ops_are_not_given_up_while_the_service_answers() -> None:
    core = lease_core()
    (sent,) = sends(core.handle(op("a"), 1.0))
    now = 1.0
    for _ in range(200):
        now += 5.0
        commands = core.handle(Tick(), now)
        assert not [c for c in commands if isinstance(c, Fail)]
        core.handle(answer(Accepted(policy="p", seq=2), sent.id), now)
    assert core.waiting == 1


@pytest.mark.parametrize("jitter", [0.0, 0.5, 0.99])
def test_backoff_never_leaves_a_question_without_a_timer(jitter: float) -> None:
    core = make_core(jitter)
    core.handle(Ask(id="a", message=Ping(), patience_s=100.0), 0.0)
    now, tries = 0.0, 0
    while (deadline := core.next_deadline()) is not None:
        now = deadline
        tries += len(sends(core.handle(Tick(), now)))
    assert now == 100.0
    assert tries >= 6
