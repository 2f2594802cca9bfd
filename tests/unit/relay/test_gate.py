"""What comes in through which door, with which key."""

from __future__ import annotations

import msgpack
import msgspec
import pytest

from joynexus.keys import KeyEntry
from joynexus.wire import ErrorCode, Message, encode, limits
from joynexus.wire.back import Beat, Gone, Register, WeightsOffer
from joynexus.wire.front import Act, BlobRead, CreatePolicy, Ping, Status, Welcome
from joynexus.wire.messages import BACK_REQUESTS, FRONT_REQUESTS, KINDS
from services.master.events import BackMessage, Door, FrontMessage, Peer
from services.master.gate import MAX_MESSAGE_BYTES, BlobMessage, Refused, admit
from tests.wire.samples import sample

TENANT = KeyEntry(name="laptop", public="p", domain="tenant", tenant="acme")
ROBOT = KeyEntry(name="robot", public="p", domain="tenant", tenant="acme", scope="act")
VIEWER = KeyEntry(name="viewer", public="p", domain="tenant", tenant="acme", scope="read")
ENV = KeyEntry(name="env", public="p", domain="worker", roles=("env",))


def send(door: Door, message: Message, entry: KeyEntry | None) -> FrontMessage | BackMessage | BlobMessage | Refused:
    return admit(Peer(door, b"peer"), encode(message, id="m1", buffers=(b"abc",)), entry)


def refused(door: Door, message: Message, entry: KeyEntry | None) -> Refused:
    answer = send(door, message, entry)
    assert isinstance(answer, Refused)
    assert answer.re == "m1"
    return answer


def test_tenant_is_the_keys_never_the_messages() -> None:
    event = send("front", Ping(), TENANT)
    assert isinstance(event, FrontMessage)
    assert (event.tenant, event.scope, event.operator) == ("acme", "all", False)
    assert event.body == b"\x80"
    assert [bytes(buffer) for buffer in event.buffers] == [b"abc"]


def test_worker_is_known_by_one_name_before_and_after_its_key_is_replaced() -> None:
    old = msgspec.structs.replace(ENV, name="env_old1", successor="env", until_s=1e12)
    said = [send("back", Gone(), entry) for entry in (ENV, old)]
    assert [each.key_name for each in said if isinstance(each, BackMessage)] == ["env", "env"]


def test_forged_tenant_field_changes_nothing() -> None:
    frames = encode(Ping(), id="m1")
    frames[2] = msgpack.packb({"tenant": "victim", "scope": "all", "operator": True})
    event = admit(Peer("front", b"peer"), frames, VIEWER)
    assert isinstance(event, FrontMessage)
    assert (event.tenant, event.scope, event.operator) == ("acme", "read", False)


@pytest.mark.parametrize("type_", FRONT_REQUESTS, ids=lambda type_: type_.__name__)
def test_scope_is_enforced_for_every_request(type_: type[Message]) -> None:
    kind = next(kind for kind, known in KINDS.items() if known is type_)
    door: Door = "front_bulk" if type_.__name__.startswith("Blob") else "front"
    needed = FRONT_REQUESTS[type_]
    for entry in (VIEWER, ROBOT, TENANT):
        allowed = ("read", "act", "all").index(entry.scope) >= ("read", "act", "all").index(needed)
        answer = send(door, sample(kind), entry)
        assert isinstance(answer, FrontMessage | BlobMessage) is allowed
        if isinstance(answer, Refused):
            assert answer.failure.code is ErrorCode.FORBIDDEN
            assert f"scope '{needed}'" in answer.failure.message


@pytest.mark.parametrize("type_", BACK_REQUESTS, ids=lambda type_: type_.__name__)
def test_role_is_enforced_for_every_message_of_a_worker(type_: type[Message]) -> None:
    kind = next(kind for kind, known in KINDS.items() if known is type_)
    door: Door = "back_bulk" if type_.__name__.startswith("Blob") else "back"
    for role in ("trainer", "inference", "env", "health"):
        entry = KeyEntry(name=role, public="p", domain="worker", roles=(role,))
        answer = send(door, sample(kind), entry)
        assert isinstance(answer, BackMessage | BlobMessage) is (role in BACK_REQUESTS[type_])


@pytest.mark.parametrize(
    ("door", "message", "entry", "code"),
    [
        ("front", Ping(), None, ErrorCode.FORBIDDEN),
        ("front", Ping(), ENV, ErrorCode.FORBIDDEN),
        ("back", Beat(progress=0, phase="", busy_s=0), TENANT, ErrorCode.FORBIDDEN),
        ("front", sample("weights_applied"), TENANT, ErrorCode.FORBIDDEN),
        ("front", sample("welcome"), TENANT, ErrorCode.FORBIDDEN),
        ("back", sample("weights_offer"), ENV, ErrorCode.FORBIDDEN),
        ("back", sample("create_policy"), ENV, ErrorCode.FORBIDDEN),
        ("front", BlobRead(digest="d", offset=0, length=1), TENANT, ErrorCode.INVALID),
        ("front_bulk", Ping(), TENANT, ErrorCode.INVALID),
        ("back_bulk", Register(role="env", incarnation="i", pid=1, credit={}), ENV, ErrorCode.INVALID),
    ],
)
def test_wrong_key_or_wrong_door_is_refused(
    door: Door, message: Message, entry: KeyEntry | None, code: ErrorCode
) -> None:
    assert refused(door, message, entry).failure.code is code


def test_body_of_a_forbidden_message_is_not_decoded() -> None:
    frames = encode(CreatePolicy(policy="p", spec=sample("create_policy").spec), id="m1")  # type: ignore[attr-defined]
    frames[2] = b"not even MessagePack \xc1"
    answer = admit(Peer("front", b"peer"), frames, VIEWER)
    assert isinstance(answer, Refused)
    assert answer.reason == "scope"


def test_unreadable_body_is_refused_under_its_request() -> None:
    frames = encode(Status(), id="m1")
    frames[2] = b"\xc1"
    answer = admit(Peer("front", b"peer"), frames, TENANT)
    assert isinstance(answer, Refused)
    assert (answer.re, answer.reason, answer.failure.code) == ("m1", "malformed", ErrorCode.INVALID)


def test_unknown_kind_is_refused_under_its_request() -> None:
    frames = [limits.MAGIC, msgpack.packb({"kind": "launch", "id": "m1"}), b"\x80"]
    answer = admit(Peer("front", b"peer"), frames, TENANT)
    assert isinstance(answer, Refused)
    assert (answer.re, answer.failure.code) == ("m1", ErrorCode.INVALID)


@pytest.mark.parametrize("frames", [[], [b""], [b"", b"", b""], [b"x"] * 10_000, [b"GET / HTTP/1.1\r\n\r\n"]])
def test_garbage_is_refused_and_counted_as_malformed(frames: list[bytes]) -> None:
    answer = admit(Peer("front", b"peer"), frames, TENANT)
    assert isinstance(answer, Refused)
    assert (answer.re, answer.reason, answer.failure.code) == ("", "malformed", ErrorCode.INVALID)


def test_message_that_is_too_large_in_all_is_refused() -> None:
    piece = bytes(4 * 1024**2)
    frames = encode(sample("act"), id="m1", buffers=[piece] * (MAX_MESSAGE_BYTES // len(piece) + 1))
    answer = admit(Peer("front", b"peer"), frames, TENANT)
    assert isinstance(answer, Refused)
    assert "as blobs" in answer.failure.message


def test_types_used_here_are_messages() -> None:
    assert Act in FRONT_REQUESTS
    assert {Welcome, WeightsOffer}.isdisjoint({*FRONT_REQUESTS, *BACK_REQUESTS})
