"""The decoder meets whatever a stranger sends: it answers `WireError`, quickly, in little memory."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from collections.abc import Sequence

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from joynexus.wire import (
    Array,
    ArrayPacker,
    Header,
    WireError,
    decode,
    decode_header,
    encode,
    join,
    limits,
    rebuild,
    split,
)
from joynexus.wire.messages import KINDS
from tests.wire.samples import sample

# The first draw builds the strategies, which may take seconds on a busy machine.
MANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FEW = settings(MANY, max_examples=100)

KIND_LIST = sorted(KINDS)


def only_wire_errors(frames: Sequence[bytes]) -> None:
    with contextlib.suppress(WireError):  # anything else fails the test
        decode(frames)


def head(kind: str, sizes: Sequence[int] = (), **more: object) -> bytes:
    packed: bytes = msgpack.packb({"kind": kind, "id": "x", "sizes": sizes, **more})
    return packed


@FEW
@given(st.lists(st.binary(max_size=64), max_size=6))
def test_random_frames(frames: list[bytes]) -> None:
    only_wire_errors(frames)


@FEW
@given(st.sampled_from(KIND_LIST), st.binary(max_size=256))
def test_random_body_of_a_known_kind(kind: str, body: bytes) -> None:
    only_wire_errors([limits.MAGIC, head(kind), body])


@FEW
@given(st.binary(max_size=256), st.binary(max_size=16))
def test_random_header(header: bytes, body: bytes) -> None:
    only_wire_errors([limits.MAGIC, header, body])


@MANY
@given(st.sampled_from(KIND_LIST), st.data())
def test_damaged_message(kind: str, data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode(sample(kind), id="x", buffers=(b"abc",))]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        if data.draw(st.booleans()):
            del frame[data.draw(st.integers(0, len(frame))) :]
        elif frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    only_wire_errors([bytes(frame) for frame in frames])


JSONISH = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@MANY
@given(st.sampled_from(KIND_LIST), st.data())
def test_well_formed_map_of_wrong_types(kind: str, data: st.DataObject) -> None:
    fields = list(KINDS[kind].__struct_fields__) or ["x"]
    body = data.draw(st.dictionaries(st.sampled_from(fields), JSONISH))
    only_wire_errors([limits.MAGIC, head(kind), msgpack.packb(body)])


def maps(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + b"\x80" * count


FULL = limits.MAX_BODY_BYTES
BOMBS = {
    "empty maps where a struct belongs": maps(FULL - 5),
    "empty maps in an unknown field": b"\x81\xa1x" + maps(FULL - 8),
    "deep nesting": b"\x81\xa1x" + b"\x91" * (FULL - 4) + b"\xc0",
    "deep maps": b"\x81\xa1x" + b"\x81\xa1x" * 300_000 + b"\xc0",
    "array that claims 4 G items": b"\x81\xa1x\xdd\xff\xff\xff\xff",
    "text that claims 4 GB": b"\x81\xa1x\xdb\xff\xff\xff\xff",
    "map that claims 4 G items": b"\xdf\xff\xff\xff\xff",
    "extension types": b"\x81\xa1x" + b"\xdc\xff\xff" + b"\xd4\x01\x00" * 0xFFFF,
}


@pytest.mark.parametrize("body", BOMBS.values(), ids=BOMBS.keys())
@pytest.mark.parametrize("kind", ["ping", "register", "forward_backward", "submit_job", "job_info"])
def test_bomb_costs_neither_time_nor_memory(kind: str, body: bytes) -> None:
    tracemalloc.start()
    start = time.process_time()  # of this process alone: others may compete for its core
    only_wire_errors([limits.MAGIC, head(kind), body])
    seconds = time.process_time() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 2.0
    assert peak < 4 * 1024**2


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("list_policies", {"x": "y" * 1000}),
        ("push_dataset", {"dataset": "d", "files": [{"path": "", "digest": "", "nbytes": 0}] * 30_000}),
        (
            "forward_backward",
            {"policy": "p", "lease": "l", "seq": 1, "dataset": {"dataset": "d", "indices": [300] * 65_536}},
        ),
        ("beat", {"progress": 1, "phase": "x", "busy_s": 0.0, "detail": {str(i): "x" * 900 for i in range(1024)}}),
    ],
)
def test_largest_honest_body_is_read_in_bounded_memory(kind: str, body: dict[str, object]) -> None:
    packed = msgpack.packb(body)
    assert len(packed) <= limits.MAX_BODY_BYTES
    tracemalloc.start()
    decode([limits.MAGIC, head(kind), packed])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 * limits.MAX_BODY_BYTES


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        ([], "at least 3 frames"),
        ([b"JNX1", b"", b""], "header cannot be read"),
        ([b"HTTP", b"", b""], "not the protocol's magic"),
        ([b"GET / HTTP/1.1\r\n" * 1000, b"", b""], "not the protocol's magic"),
        ([b"JNX1", b"x" * (limits.MAX_HEADER_BYTES + 1), b""], "header frame is too large"),
        ([b"JNX1", head("ping"), b"x" * (limits.MAX_BODY_BYTES + 1)], "body frame is too large"),
        ([b"JNX1", head("ping"), b"\x80", *[b""] * (limits.MAX_BUFFERS + 1)], "at most"),
        ([b"JNX1", head("ping", [1]), b"\x80"], "announces 1 buffers"),
        ([b"JNX1", head("ping", [5]), b"\x80", b"abc"], "buffer of 5 bytes, its frame has 3"),
        ([b"JNX1", head("ping", [-1]), b"\x80", b""], "buffer of -1 bytes"),
        ([b"JNX1", head("ping", id="x" * 65), b"\x80"], "64 characters"),
        ([b"JNX1", head("launch_missiles"), b"\x80"], "'launch_missiles' is unknown"),
        ([b"JNX1", head("welcome"), b"\x80"], "missing required field"),
        ([b"JNX1", head("ping"), b"\x80trailing"], "cannot be read"),
        ([b"JNX1", head("get_policy"), b"\x81\xa6policy\xa1\xff"], "cannot be read"),
    ],
)
def test_refusal_says_what_is_wrong(frames: list[bytes], sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        decode(frames)


def test_header_is_checked_without_looking_at_the_body() -> None:
    assert decode_header([b"JNX1", head("launch"), b"\xff"]) == Header(kind="launch", id="x")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1.5, 2**70, "1", None, True])
def test_integer_is_an_integer(number: object) -> None:
    try:
        body = msgpack.packb({"job": "j", "since": number})
    except OverflowError:
        return  # cannot even be written
    with pytest.raises(WireError):
        decode([b"JNX1", head("get_job"), body])


# Arrays


@pytest.mark.parametrize("dtype", ["<f8", "<f4", "<f2", "<i8", "<i4", "|u1", "|b1"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_array_comes_out_as_it_went_in(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    packer = ArrayPacker()
    described = packer.add(array)
    again = rebuild(described, packer.buffers)
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)
    assert not again.flags.writeable


def test_strided_and_big_endian_arrays_arrive_whole() -> None:
    packer = ArrayPacker()
    arrays = [np.arange(12.0).reshape(3, 4).T, np.arange(5, dtype=">i4"), np.arange(6)[::-2]]
    for array, described in zip(arrays, [packer.add(array) for array in arrays], strict=True):
        np.testing.assert_array_equal(rebuild(described, packer.buffers), array)


@pytest.mark.parametrize("dtype", [object, "U3", "S3", "c8", "M8[s]", "i2", [("a", "<f4")]])
def test_array_that_may_not_travel_is_refused_by_the_sender(dtype: object) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        ArrayPacker().add(np.empty(2, dtype=dtype))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        (Array(dtype="|O", shape=(1,), frame=0), "dtype"),
        (Array(dtype="O", shape=(1,), frame=0), "dtype"),
        (Array(dtype="<f4,<f4", shape=(1,), frame=0), "dtype"),
        (Array(dtype="|V8", shape=(1,), frame=0), "dtype"),
        (Array(dtype="<f4", shape=(-1,), frame=0), "non-negative"),
        (Array(dtype="<f4", shape=(-1, -2), frame=0), "non-negative"),
        (Array(dtype="<f4", shape=(1,) * 9, frame=0), "8"),
        (Array(dtype="<f4", shape=(3,), frame=0), "needs 12 bytes"),
        (Array(dtype="<f4", shape=(2**62, 2**62), frame=0), "needs"),
        (Array(dtype="<f4", shape=(2,), frame=1), "does not exist"),
        (Array(dtype="<f4", shape=(2,), frame=-1), "does not exist"),
    ],
)
def test_dishonest_descriptor_is_refused(array: Array, sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        rebuild(array, [b"12345678"])


def test_empty_array_with_lengths_too_large_for_numpy_is_refused() -> None:
    with pytest.raises(WireError, match="cannot be"):
        rebuild(Array(dtype="<f4", shape=(0, 1 << 31, 1 << 31), frame=0), [b""])


def test_negative_frame_cannot_reach_another_messages_buffers() -> None:
    with pytest.raises(WireError, match="does not exist"):
        rebuild(Array(dtype="|u1", shape=(1,), frame=-1), [b"a", b"b"], offset=1)


@FEW
@given(st.text(max_size=6), st.lists(st.integers(-3, 2**40), max_size=10), st.integers(-5, 5), st.binary(max_size=40))
def test_any_descriptor_gives_an_array_or_a_refusal(dtype: str, shape: list[int], frame: int, data: bytes) -> None:
    for name in (dtype, "<f4"):
        try:
            view = rebuild(Array(dtype=name, shape=tuple(shape), frame=frame), [data])
        except WireError:
            continue
        assert view.nbytes == len(data)


# Joined payloads


@FEW
@given(st.lists(st.binary(max_size=40), max_size=5))
def test_joined_parts_come_apart_again(parts: list[bytes]) -> None:
    assert [bytes(part) for part in split(join(parts))] == parts


@FEW
@given(st.binary(max_size=80), st.integers(0, 80))
def test_damaged_join_is_refused(data: bytes, cut: int) -> None:
    for damaged in (data, join([data, b"more"])[:cut]):
        try:
            split(damaged)
        except WireError:
            continue
