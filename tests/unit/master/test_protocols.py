"""Which protocol version both sides speak, also once there is a next one: the newest that both know, or a sentence."""

from __future__ import annotations

import msgspec
import pytest

from joynexus.wire import ErrorCode, Failure, Header, decode_body, limits
from joynexus.wire.back import Register, Registered, TrainGroup
from joynexus.wire.front import CreatePolicy, Hello, ListPolicies, OpResult, OptimStep, PolicyInfo, PolicyList, Welcome
from services.master import protocol
from tests.unit.master.actors import FakeTrainer, new_incarnation
from tests.unit.master.world import SPEC, FakeWorker, World, run

RANGES = pytest.mark.parametrize(
    ("service", "other", "spoken"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 1), (1, 2), 1),
        ((1, 2), (1, 1), 1),
        ((1, 2), (1, 2), 2),
        ((1, 2), (2, 3), 2),
        ((2, 3), (1, 2), 2),
    ],
)
STRANGERS = pytest.mark.parametrize(
    ("service", "other", "what_to_do"),
    [
        (
            (1, 2),
            (3, 3),
            "{0} speaks protocol 3, the service protocols 1 to 2: upgrade the service, or install an older",
        ),
        ((2, 3), (1, 1), "{0} speaks protocol 1, the service protocols 2 to 3: install a newer {0}"),
        (
            (1, 1),
            (5, 4),
            "{0} speaks protocols 5 to 4, the service protocol 1: upgrade the service, or install an older",
        ),
        ((1, 9), (5, 4), "{0} speaks protocols 5 to 4, the service protocols 1 to 9: a range goes from low to high"),
    ],
)


def speak(monkeypatch: pytest.MonkeyPatch, protocols: tuple[int, int]) -> None:
    """Have the service speak these."""
    monkeypatch.setattr(limits, "PROTOCOL_MIN", protocols[0])
    monkeypatch.setattr(limits, "PROTOCOL", protocols[1])


def hello(protocols: tuple[int, int]) -> Hello:
    return Hello(protocol_min=protocols[0], protocol_max=protocols[1], client="t")


def register(world: World, protocols: tuple[int, int]) -> Registered | Failure:
    message = Register(
        role="env", incarnation="i", pid=1, credit={}, protocol_min=protocols[0], protocol_max=protocols[1]
    )
    (answer,) = world.answers(world.say(world.new_peer("back"), message, key="worker-7"))
    assert isinstance(answer, Registered | Failure)
    return answer


@RANGES
def test_client_and_service_speak_the_newest_version_that_both_know(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    service: tuple[int, int],
    other: tuple[int, int],
    spoken: int,
) -> None:
    speak(monkeypatch, service)
    assert world.ask(hello(other), Welcome).protocol == spoken


@RANGES
def test_worker_and_master_speak_the_newest_version_that_both_know(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    service: tuple[int, int],
    other: tuple[int, int],
    spoken: int,
) -> None:
    speak(monkeypatch, service)
    answer = register(world, other)
    assert isinstance(answer, Registered)
    assert answer.protocol == spoken


@STRANGERS
def test_client_of_another_age_is_told_in_one_sentence_which_side_to_change(
    world: World, monkeypatch: pytest.MonkeyPatch, service: tuple[int, int], other: tuple[int, int], what_to_do: str
) -> None:
    speak(monkeypatch, service)
    refused = world.refused(hello(other))
    assert refused.code is ErrorCode.UPGRADE_REQUIRED
    assert what_to_do.format("client") in refused.message
    assert "\n" not in refused.message


def test_what_follows_a_hello_that_was_refused_is_refused_and_not_done(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose master was upgraded meanwhile sends all that was not answered right behind its hello."""
    old, new = world.new_peer("front"), world.new_peer("front")
    assert world.ask(hello((1, 1)), Welcome, peer=old).protocol == 1
    speak(monkeypatch, (2, 2))
    refused = world.refused(hello((1, 1)), peer=old)
    create = CreatePolicy(policy="p", spec=SPEC)
    assert world.refused(create, peer=old) == refused
    assert world.ask(ListPolicies(), PolicyList, peer=new).policies == ()
    world.ask(create, PolicyInfo, peer=new)
    assert world.ask(hello((1, 2)), Welcome, peer=old).protocol == 2
    assert len(world.ask(ListPolicies(), PolicyList, peer=old).policies) == 1


def test_connections_that_were_refused_take_bounded_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_MOST_MISFITS", 3)
    for _ in range(10):
        world.refused(hello((9, 9)), peer=world.new_peer("front"))
    assert len(world.core._greetings._refused) == 3


@STRANGERS
def test_worker_of_another_age_is_refused_in_one_sentence_that_the_log_has_too(
    world: World, monkeypatch: pytest.MonkeyPatch, service: tuple[int, int], other: tuple[int, int], what_to_do: str
) -> None:
    speak(monkeypatch, service)
    refused = register(world, other)
    assert isinstance(refused, Failure)
    assert refused.code is ErrorCode.UPGRADE_REQUIRED
    assert what_to_do.format("worker") in refused.message
    (line,) = [log for log in world.logs if log.event == "worker_refused"]
    assert (line.level, line.fields["key"], line.fields["why"]) == ("warning", "worker-7", refused.message)


def test_refused_worker_is_given_nothing_and_the_others_go_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    speak(monkeypatch, (1, 2))
    old = FakeTrainer(world, new_incarnation())
    new = FakeTrainer(world, new_incarnation(), key="new", protocol_min=3, protocol_max=3)
    world.create()
    step = world.tell(OptimStep(policy="p", lease=world.lease(), seq=1))
    run(old)
    assert [type(answer) for answer in world.answers(step)][-1] is OpResult
    assert [type(message) for message in new.received] == [Failure]
    assert any(isinstance(message, TrainGroup) for message in old.received)


def test_worker_that_says_no_protocol_speaks_the_first(world: World) -> None:
    """As they did before they were asked; and what is left out is not encoded, so their bytes are the same today."""
    body = msgspec.msgpack.encode({"role": "env", "incarnation": "i", "pid": 1, "credit": {}})
    message = decode_body(Header(kind="register", id="x"), body)
    assert isinstance(message, Register)
    assert (message.protocol_min, message.protocol_max) == (1, 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message)) == msgspec.msgpack.decode(body)


class Mute(FakeWorker):
    """A worker that does nothing."""

    role = "env"


def test_worker_comes_back_to_an_upgraded_master_with_its_version(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Mute(world, "i1", credit={}, protocol_max=2)
    assert isinstance(worker.received[-1], Registered)
    assert worker.received[-1].protocol == 1
    speak(monkeypatch, (1, 2))
    worker.connect()
    assert isinstance(worker.received[-1], Registered)
    assert worker.received[-1].protocol == 2
