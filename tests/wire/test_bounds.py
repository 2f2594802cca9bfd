"""Nothing that a peer sends, and that may be kept, is as long as it likes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from msgspec import inspect

from joynexus.bounds import MAX_TEXT
from joynexus.wire import ErrorCode, WireError, decode, encode, failure
from joynexus.wire.back import Beat, Register
from joynexus.wire.messages import BACK_REQUESTS, FRONT_REQUESTS

REQUESTS = [*FRONT_REQUESTS, *BACK_REQUESTS]
_SIZED = (inspect.StrType, inspect.BytesType, inspect.DictType, inspect.ListType, inspect.SetType, inspect.VarTupleType)


def unbounded(type_: inspect.Type, where: str, known: set[type]) -> Iterator[str]:
    """Yield where something of any length may stand."""
    if isinstance(type_, _SIZED) and type_.max_length is None:
        yield where
    if isinstance(type_, inspect.AnyType | inspect.RawType | inspect.CustomType):
        yield where
    match type_:
        case inspect.DictType():
            parts = [("key", type_.key_type), ("value", type_.value_type)]
        case inspect.ListType() | inspect.SetType() | inspect.VarTupleType():
            parts = [("item", type_.item_type)]
        case inspect.TupleType():
            parts = [("item", item) for item in type_.item_types]
        case inspect.UnionType():
            parts = [("", item) for item in type_.types]
        case inspect.StructType() if type_.cls not in known:
            known.add(type_.cls)
            parts = [(field.name, field.type) for field in type_.fields]
        case _:
            parts = []
    for name, part in parts:
        yield from unbounded(part, f"{where}.{name}", known)


@pytest.mark.parametrize("type_", REQUESTS, ids=lambda type_: type_.__name__)
def test_every_text_list_and_table_of_a_request_has_a_bound(type_: type[msgspec.Struct]) -> None:
    assert not list(unbounded(inspect.type_info(type_), type_.__name__, set()))


class Part(msgspec.Struct):
    inner: dict[str, int]


class Whole(msgspec.Struct):
    parts: tuple[Part, ...]


def test_the_look_finds_what_has_no_bound() -> None:
    assert list(unbounded(inspect.type_info(Whole), "", set())) == [
        ".parts", ".parts.item.inner", ".parts.item.inner.key",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        Beat(progress=0, phase="x" * 257, busy_s=0.0),
        Beat(progress=0, phase="idle", busy_s=0.0, detail={"device": "x" * 5000}),
        Beat(progress=0, phase="idle", busy_s=0.0, detail={f"n{number}": "" for number in range(2000)}),
        Register(role="env", incarnation="i", pid=1, credit={}, serves=("s",) * 2000),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_a_worker_says_of_itself_is_bounded(message: msgspec.Struct) -> None:
    with pytest.raises(WireError, match="length"):
        decode(encode(message, id="m"))


def test_a_sentence_without_end_is_cut_so_that_it_can_be_told() -> None:
    told = failure(ErrorCode.BAD_DATA, "é" * 100_000)
    assert decode(encode(told, id="m")).message == told
    assert len(told.message) == MAX_TEXT
