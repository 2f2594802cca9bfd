"""Garbage in any string of any request: one clear refusal, and nothing has changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from joynexus.keys import KeyEntry
from joynexus.wire import Failure, Header, Message, encode, front, hosted, limits
from joynexus.wire.messages import FRONT_REQUESTS
from services.master.events import Peer
from services.master.gate import Refused, admit
from tests.unit.master.test_verbs_repeated import Played
from tests.unit.master.verbs import plain

GARBAGE = {
    "empty": "",
    "path": "../../etc/passwd",
    "root": "/",
    "nul": "p\0",
    "long": "x" * 10**6,
    "wide": "\uff50",  # looks like p
    "hidden": "p\u200b",
    "turned": "\u202ep",
    "composed": "p\u0301" * 40,
    "line": "p\n",
    "colon": "own:a:mine",
    "format": "{0.__class__}%s",
}
"""Strings that no name may be."""

MAX_SENTENCE = 700
"""Characters of a refusal, whatever was asked."""

FREE: dict[type[Message], tuple[str, ...]] = {
    front.Hello: ("client",),
    front.Act: ("instructions[0]", "contract", "state.dtype"),
    front.ForwardBackward: (
        "samples.instructions[0]",
        "samples.state.dtype",
        "samples.action.dtype",
        "samples.action_mask.dtype",
        "payload",
    ),
    front.AcquireLease: ("holder",),
    front.SubmitJob: ("key",),
    front.MovePolicy: ("tenant",),
    front.PushDataset: ("files[0].path",),
    front.CreatePolicy: ("spec.adapter", "spec.backbone", "spec.head", "spec.contract."),
    hosted.OfferEnvironment: ("incarnation", "instruction", "contract."),
    hosted.HostDone: ("rollout.episodes[0].", "rollout.contract_digest", "rollout.trajectories"),
}
"""Fields, or parts of messages, that are no names: texts, or what only the worker that opens it can judge."""

NEVER: dict[type[Message], tuple[str, ...]] = {front.PushDataset: ("path", "root", "nul", "empty")}
"""What is refused in such fields too."""

_EPISODE = "rollout.episodes[0]."
LONG: dict[type[Message], tuple[str, ...]] = {
    front.Hello: ("client",),
    hosted.HostDone: (
        f"{_EPISODE}failure",
        f"{_EPISODE}video",
        f"{_EPISODE}env",
        "rollout.contract_digest",
        "rollout.trajectories",
    ),
}
"""Where a text of any length may stand, because it is not kept, is cut, or fails the episodes."""

LENIENT: dict[type[Message], str] = {
    front.ReleaseLease: "lease",  # a lease that has ended already is fine
    hosted.WithdrawEnvironment: "incarnation",  # a host that is unknown is gone already
    front.CancelJobs: "tenant",  # whom nobody knows has no jobs
    front.BackupEnd: "ticket",  # a backup that has ended already is fine
}
"""Fields with which a request says that something shall not be: what is unknown is not."""


def strings(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the place of each string in a message, and a function that puts another one there."""
    match value:
        case str():
            yield path, lambda other: other
        case msgspec.Struct():
            for name in value.__struct_fields__:
                for place, put in strings(getattr(value, name), f"{path}.{name}".lstrip(".")):
                    yield place, lambda other, name=name, put=put: msgspec.structs.replace(value, **{name: put(other)})
        case tuple():
            for place, put in strings(value[0], f"{path}[0]") if value else ():  # the others are alike
                yield place, lambda other, put=put: (put(other), *value[1:])


def test_there_is_a_string_in_each_request_that_names_something() -> None:
    assert [path for path, _ in strings(front.SaveState(policy="p", lease="l", seq=1, state="s"))] == [
        "policy",
        "lease",
        "state",
    ]


@pytest.mark.parametrize("verb", FRONT_REQUESTS, ids=lambda verb: verb.__name__)
def test_garbage_in_a_name_is_refused_in_one_sentence_and_changes_nothing(verb: type[Message], tmp_path: Path) -> None:
    scenes = (Played(tmp_path / str(number), verb) for number in itertools.count())
    played = next(scenes)
    before = plain(played.scene.view("a"))
    for path, put in list(strings(played.message)):
        free = path.startswith(FREE.get(verb, ("nothing",)))
        for what, garbage in GARBAGE.items():
            message = put(garbage)
            if message == played.message:
                continue  # it is empty anyway
            answers = said(played, message)
            place = f"{path}: {what}"
            must = what in NEVER.get(verb, ()) or (what == "long" and path not in LONG.get(verb, ()))
            if free and not (answers and isinstance(answers[0], Failure)) and not must:
                played = next(scenes)  # it was taken
                continue
            assert len(answers) == 1, place
            (answer,) = answers
            if LENIENT.get(verb) != path:
                assert isinstance(answer, Failure), place
                assert answer.category == "user" or answer.code in ("NOT_REGISTERED", "STALE"), (place, answer)
                assert len(answer.message) <= MAX_SENTENCE, place
            assert plain(played.scene.view("a")) == before, place


def said(played: Played, message: Message) -> list[Message]:
    row = played.row
    return played.scene.world.say_as("a", message, buffers=row.buffers, operator=row.operator)


@pytest.mark.parametrize("field", ["normalization", "surprise"])
def test_the_refusal_of_what_cannot_be_read_fits_into_a_message(field: str) -> None:
    """A refusal that repeats what it refuses is larger than any message may be, and to send it would fail."""
    body = msgspec.msgpack.encode({"policy": "p", "spec": {field: "x"}})
    huge = limits.MAX_BODY_BYTES - len(body) - 8
    value = {"normalization": "x" * huge} if field == "normalization" else {"x" * huge: 1}
    body = msgspec.msgpack.encode({"policy": "p", "spec": value})
    header = msgspec.msgpack.encode(Header(kind="create_policy", id="r"))
    peer = Peer("front", b"someone")
    refused = admit(peer, [limits.MAGIC, header, body], KeyEntry(name="k", public="", domain="tenant", tenant="a"))
    assert isinstance(refused, Refused)
    assert refused.re == "r"
    assert len(refused.failure.message) <= MAX_SENTENCE
    assert "spec" in refused.failure.message
    assert encode(refused.failure, id="x", re="r")
