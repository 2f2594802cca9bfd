"""The worker's conversation with the master, without sockets or clocks."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from common.session import (
    ASK_AGAIN_S,
    RESEND_S,
    RETURN_S,
    Answer,
    Drop,
    Event,
    Misfit,
    Said,
    Work,
    WorkerSession,
)
from joynexus.wire import ErrorCode, Message, Packet, decode, encode, failure, limits
from joynexus.wire.back import (
    Beat,
    BeatAck,
    IndicesDrawn,
    Leaving,
    Register,
    Registered,
    SampleIndices,
)
from joynexus.wire.front import BlobData, BlobRead, ClusterStatus, Status

REGISTER = Register(role="env", incarnation="i1", pid=1, credit={"data": 1})
STATUS = ClusterStatus(server="s", uptime_s=0, roles=(), lanes=(), policies=0, jobs_running=0, versions_in_service=0)


class Master:
    """Talks to a session, remembering what it said."""

    def __init__(self) -> None:
        self.jitter = 0.0
        self.session = WorkerSession(
            beat=lambda: Beat(progress=1, phase="idle", busy_s=0.0), jitter=lambda: self.jitter
        )
        self.said: list[Packet] = []
        self.ids = itertools.count(1)

    def pull(self, now: float, *, bulk: bool = False, limit: int = 1000) -> list[Packet]:
        """Take what the session has to send, as if it arrived."""
        arrived = []
        while len(arrived) < limit and (send := self.session.next_send(now, bulk=bulk)) is not None:
            self.session.sent(send, now)
            arrived.append(decode(send.frames))
        self.said += arrived
        return arrived

    def tell(self, message: Message, now: float, *, re: str = "") -> list[Event]:
        return self.session.received(decode(encode(message, id=f"m{next(self.ids)}", re=re)), now)

    def welcome(self, now: float, *, lost: tuple[str, ...] = ()) -> list[Event]:
        (register,) = [p for p in self.pull(now) if isinstance(p.message, Register)]
        return self.tell(Registered(worker="env-1", beat_ms=1000, lost=lost), now, re=register.header.id)

    def beat(self, now: float) -> Packet:
        """Pull until the session beats, and return that beat."""
        return [p for p in self.pull(now) if isinstance(p.message, Beat)][-1]


def result(task: str) -> IndicesDrawn:
    return IndicesDrawn(task=task, attempt=1)


def registered(now: float = 0.0) -> Master:
    master = Master()
    master.session.register(REGISTER)
    master.welcome(now)
    return master


def say(master: Master, task: str) -> None:
    master.session.say(encode(result(task), id=task))


def results(packets: list[Packet]) -> list[str]:
    return [p.message.task for p in packets if isinstance(p.message, IndicesDrawn)]


def test_nothing_is_said_before_the_role_registers() -> None:
    assert Master().pull(0.0) == []


def test_registration_is_repeated_until_answered() -> None:
    master = Master()
    master.session.register(REGISTER)
    assert len(master.pull(0.0)) == 1
    assert master.pull(1.0) == []
    assert [type(p.message) for p in master.pull(2.5)] == [Register]


def test_registration_says_which_protocols_the_worker_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PROTOCOL_MIN", 2)
    monkeypatch.setattr(limits, "PROTOCOL", 3)
    master = Master()
    master.session.register(REGISTER)
    (said,) = master.pull(0.0)
    assert said.message == msgspec.structs.replace(REGISTER, protocol_min=2, protocol_max=3)


def test_master_of_another_age_ends_the_worker_with_its_sentence() -> None:
    master = Master()
    master.session.register(REGISTER)
    (said,) = master.pull(0.0)
    refused = failure(ErrorCode.UPGRADE_REQUIRED, "install a newer worker")
    assert master.tell(refused, 0.1, re=said.header.id) == [Misfit("install a newer worker")]


def test_welcome_to_an_earlier_registration_is_ignored() -> None:
    master = Master()
    master.session.register(REGISTER)
    (first,) = master.pull(0.0)
    master.pull(2.5)
    master.tell(Registered(worker="env-1", beat_ms=1000), 2.6, re=first.header.id)
    assert not master.session.registered


def test_results_wait_for_registration_and_keep_their_order() -> None:
    master = Master()
    say(master, "t1")
    say(master, "t2")
    master.session.register(REGISTER)
    master.welcome(0.0)
    assert results(master.pull(0.0)) == ["t1", "t2"]


def test_result_is_said_again_after_the_master_forgot_the_worker() -> None:
    master = registered()
    say(master, "t1")
    assert results(master.pull(0.0)) == ["t1"]
    master.tell(failure(ErrorCode.NOT_REGISTERED, "who?"), 0.1)
    assert not master.session.registered
    master.welcome(0.2)
    assert results(master.pull(0.2)) == ["t1"]


def test_result_before_an_answered_beat_is_not_said_again() -> None:
    master = registered()
    say(master, "t1")
    master.pull(0.0)
    beat = master.beat(1.0)
    say(master, "t2")
    master.pull(1.0)
    master.tell(BeatAck(), 1.1, re=beat.header.id)
    assert master.session.undelivered == 1
    master.session.came_up(bulk=False, now=1.2)
    master.welcome(1.2)
    assert results(master.pull(1.2)) == ["t2"]


def test_answer_to_a_beat_of_an_earlier_registration_confirms_nothing() -> None:
    master = registered()
    say(master, "t1")
    master.pull(0.0)
    beat = master.beat(1.0)
    master.session.came_up(bulk=False, now=1.05)
    master.welcome(1.1)
    master.tell(BeatAck(), 1.2, re=beat.header.id)
    assert master.session.undelivered == 1


def test_silent_master_is_registered_with_again() -> None:
    master = registered()
    master.beat(0.0)
    assert master.session.expire(4.9) == []
    (said,) = master.session.expire(5.1)
    assert isinstance(said, Said)
    assert [type(p.message) for p in master.pull(5.1)] == [Register]


def test_first_connection_registers_at_once_and_a_later_one_at_a_random_moment() -> None:
    master = Master()
    master.jitter = 0.5
    master.session.register(REGISTER)
    master.session.came_up(bulk=False, now=0.0)
    master.welcome(0.0)
    master.session.came_up(bulk=False, now=10.0)
    assert master.pull(10.0) == []
    assert master.session.next_at(10.0) == 10.0 + RETURN_S / 2
    assert [type(p.message) for p in master.pull(10.0 + RETURN_S / 2)] == [Register]


def test_workers_that_were_not_answered_together_do_not_ask_again_together() -> None:
    again = []
    for jitter in (0.0, 0.9):
        master = Master()
        master.jitter = jitter
        master.session.register(REGISTER)
        master.pull(0.0)
        again.append(master.session.next_at(100.0))
    assert again[0] == RESEND_S
    assert RESEND_S < again[1] < 1.5 * RESEND_S


def test_blob_requests_are_asked_again_at_a_random_moment_after_a_connection_was_lost() -> None:
    master = registered()
    master.jitter = 0.5
    master.session.ask("q1", BlobRead(digest="a" * 64, offset=0, length=10), (), deadline=60.0, now=0.0)
    assert len(master.pull(0.0, bulk=True)) == 1
    master.session.came_up(bulk=True, now=1.0)
    assert master.pull(1.0, bulk=True) == []
    assert [p.header.id for p in master.pull(1.0 + RETURN_S / 2, bulk=True)] == ["q1"]


def test_work_and_drops_are_handed_on() -> None:
    master = registered()
    task = SampleIndices(
        task="t", attempt=1, tenant="a", manifest="", holdout_episodes=0, seed=0, batch_size=1, first_step=0, steps=1
    )
    (work,) = master.tell(task, 0.1)
    assert isinstance(work, Work)
    assert work.packet.message == task
    beat = master.beat(1.0)
    assert master.tell(BeatAck(cancelled=("t",)), 1.1, re=beat.header.id) == [Drop(("t",))]


def test_tasks_given_to_others_are_dropped_on_registration() -> None:
    master = Master()
    master.session.register(REGISTER)
    assert Drop(("t",)) in master.welcome(0.0, lost=("t",))


def test_request_gets_its_answer_once() -> None:
    master = registered()
    master.session.ask("q1", Status(), (), deadline=10.0, now=0.0)
    master.pull(0.0)
    (answer,) = master.tell(STATUS, 0.1, re="q1")
    assert isinstance(answer, Answer)
    assert answer.packet is not None
    assert master.tell(STATUS, 0.2, re="q1") == []


def test_request_is_asked_again_after_a_new_registration_with_the_same_id() -> None:
    master = registered()
    master.session.ask("q1", Status(), (), deadline=60.0, now=0.0)
    master.pull(0.0)
    master.session.came_up(bulk=False, now=1.0)
    master.welcome(1.0)
    asked = [p for p in master.pull(1.0) if isinstance(p.message, Status)]
    assert [p.header.id for p in asked] == ["q1"]
    assert asked[0].header.deadline_ms == 59_000


def test_request_that_is_not_answered_is_asked_again_later() -> None:
    master = registered()
    master.session.ask("q1", Status(), (), deadline=60.0, now=0.0)
    master.pull(0.0)
    assert not any(isinstance(p.message, Status) for p in master.pull(ASK_AGAIN_S - 1))
    assert any(isinstance(p.message, Status) for p in master.pull(ASK_AGAIN_S + 1))


def test_overloaded_master_is_asked_again_after_its_hint() -> None:
    master = registered()
    master.session.ask("q1", Status(), (), deadline=60.0, now=0.0)
    master.pull(0.0)
    assert master.tell(failure(ErrorCode.OVERLOADED, "later", retry_after_ms=2000), 0.1, re="q1") == []
    assert not any(isinstance(p.message, Status) for p in master.pull(1.9))
    assert any(isinstance(p.message, Status) for p in master.pull(3.2))


def test_refusal_ends_a_request() -> None:
    master = registered()
    master.session.ask("q1", Status(), (), deadline=60.0, now=0.0)
    master.pull(0.0)
    (answer,) = master.tell(failure(ErrorCode.FORBIDDEN, "no"), 0.1, re="q1")
    assert isinstance(answer, Answer)
    assert answer.failure is not None
    assert answer.failure.code is ErrorCode.FORBIDDEN


def test_request_ends_at_its_deadline() -> None:
    master = registered()
    master.session.ask("q1", Status(), (), deadline=3.0, now=0.0)
    (answer,) = [e for e in master.session.expire(3.0) if isinstance(e, Answer)]
    assert answer.failure is not None
    assert answer.failure.code is ErrorCode.DEADLINE
    assert master.pull(3.0, bulk=True) == []


def test_blobs_are_asked_for_on_the_bulk_socket_without_registration() -> None:
    master = Master()
    master.session.ask("q1", BlobRead(digest="d", offset=0, length=1), (), deadline=60.0, now=0.0)
    assert master.pull(0.0) == []
    assert [p.header.id for p in master.pull(0.0, bulk=True)] == ["q1"]
    master.session.came_up(bulk=True, now=1.0)
    assert [p.header.id for p in master.pull(1.0, bulk=True)] == ["q1"]
    (answer,) = master.tell(BlobData(digest="d", offset=0, nbytes=1), 1.1, re="q1")
    assert isinstance(answer, Answer)


def test_what_could_not_be_sent_is_offered_again() -> None:
    master = registered()
    say(master, "t1")
    master.beat(0.0)
    say(master, "t2")
    first = master.session.next_send(0.1, bulk=False)
    assert first is not None
    again = master.session.next_send(0.1, bulk=False)
    assert again is not None
    assert first.frames == again.frames


def test_leaving_is_announced_again_after_a_new_registration() -> None:
    master = registered()
    master.session.leave()
    (leaving,) = [p for p in master.pull(0.0) if isinstance(p.message, Leaving)]
    master.session.came_up(bulk=False, now=0.1)
    (register,) = [p.message for p in master.pull(0.15) if isinstance(p.message, Register)]
    assert register.credit == {"data": 0}, "else a master that was started anew would give it work first"
    master.session.came_up(bulk=False, now=0.18)
    master.welcome(0.2)
    (again,) = [p for p in master.pull(0.2) if isinstance(p.message, Leaving)]
    master.tell(BeatAck(), 0.3, re=leaving.header.id)
    assert not master.session.left
    master.tell(BeatAck(), 0.4, re=again.header.id)
    assert master.session.left
