"""What was released once is understood for ever."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType
from typing import Any

import msgpack
import msgspec
import pytest

from joynexus.wire import back, decode, decode_body, encode, front, kind_of, limits
from joynexus.wire.frames import Header
from joynexus.wire.messages import BACK_REQUESTS, FRONT_REQUESTS, KINDS
from tests.wire.samples import GOLDEN, golden, header, sample

HEADER = bytes.fromhex(
    "85a46b696e64a4706f6e67a26964a469642d31a27265a472652d31ab646561646c696e655f6d73cd05dca573697a65739203 00".replace(
        " ", ""
    )
)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_message_are_the_golden_ones(kind: str) -> None:
    files = golden(kind)
    assert files, f"no golden bytes for '{kind}': run `python -m tests.wire.samples` and commit the file"
    assert msgspec.msgpack.encode(sample(kind)) == files[-1].read_bytes(), (
        f"the bytes of '{kind}' have changed: if a field with a default was added, run `python -m tests.wire.samples` "
        "and commit the further file; anything else breaks released clients"
    )


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.bin")), ids=lambda path: path.stem)
def test_golden_bytes_are_read_without_losing_anything(path: Any) -> None:
    kind = path.name.split(".")[0]
    message = decode_body(Header(kind=kind, id="x"), path.read_bytes())
    again = msgspec.msgpack.encode(message)
    assert _within(msgpack.unpackb(path.read_bytes()), msgpack.unpackb(again))


def test_no_golden_bytes_are_left_of_a_kind_that_is_gone() -> None:
    assert {path.name.split(".")[0] for path in GOLDEN.glob("*.bin")} == set(KINDS)


def test_bytes_of_a_header_are_the_golden_ones() -> None:
    assert msgspec.msgpack.encode(header("pong")) == HEADER
    assert limits.MAGIC == b"JNX1"


@pytest.mark.parametrize("kind", KINDS)
def test_message_comes_out_as_it_went_in(kind: str) -> None:
    message, buffers = sample(kind), (b"abc", memoryview(b""))
    assert kind_of(message) == kind
    packet = decode(encode(message, id="id-1", re="re-1", deadline_ms=1500, buffers=buffers))
    assert packet.message == message
    assert packet.header == header(kind)
    assert [bytes(buffer) for buffer in packet.buffers] == [b"abc", b""]


@pytest.mark.parametrize("kind", KINDS)
def test_msgpack_alone_speaks_every_message(kind: str) -> None:
    """Other languages have a MessagePack library and nothing else: plain maps, arrays, numbers, text, bytes."""
    _, head, body = encode(sample(kind), id="id-1")
    head_map, body_map = msgpack.unpackb(head), msgpack.unpackb(body)
    assert _plain(body_map)
    packet = decode([limits.MAGIC, msgpack.packb(head_map), msgpack.packb(body_map)])
    assert packet.message == sample(kind)


@pytest.mark.parametrize("package", [front, back], ids=lambda package: package.__name__.rsplit(".", 1)[-1])
def test_no_message_is_forgotten_where_its_kind_is_registered(package: ModuleType) -> None:
    modules = [import_module(f"{package.__name__}.{each.name}") for each in pkgutil.iter_modules(package.__path__)]
    defined = {
        name
        for module in modules
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    }
    assert defined <= set(package.__all__)


def test_unknown_fields_of_a_newer_side_are_skipped() -> None:
    body = msgpack.packb({"policy": "p", "colour": {"deep": [1, 2]}})
    assert decode_body(Header(kind="get_policy", id="x"), body) == decode_body(
        Header(kind="get_policy", id="x"), msgpack.packb({"policy": "p"})
    )


def test_every_request_is_a_kind() -> None:
    for type_ in {**FRONT_REQUESTS, **BACK_REQUESTS}:
        assert type_ in KINDS.values()


def _within(old: object, new: object) -> bool:
    if isinstance(old, dict):
        return isinstance(new, dict) and all(key in new and _within(old[key], new[key]) for key in old)
    if isinstance(old, list):
        return isinstance(new, list) and len(old) == len(new) and all(map(_within, old, new))
    return type(old) is type(new) and old == new


def _plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes)
