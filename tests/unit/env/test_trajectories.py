"""Promises of trajectories: what was written is what is read, and nothing else is read."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joynexus.simulation import trajectories
from joynexus.simulation.trajectories import Trajectories, concatenate, pack, unpack
from joynexus.wire.frames import join, split


def make(
    lengths: tuple[int, ...] = (3, 1, 2),
    *,
    chunk: int = 4,
    values: int = 1,
    cameras: int = 1,
    seed: int = 0,
    first: int = 0,
) -> Trajectories:
    rng = np.random.default_rng(seed)
    episodes, decisions = len(lengths), sum(lengths)
    executed = rng.integers(1, chunk + 1, decisions)
    terminated = rng.random(episodes) < 0.5

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32)

    return Trajectories(
        version=7,
        contract="c" * 32,
        instruction="reach the goal",
        lengths=np.array(lengths, np.int64),
        seeds=np.full(episodes, 5, np.int64),
        draws=np.arange(first, first + episodes, dtype=np.int64),
        success=rng.random(episodes) < 0.5,
        terminated=terminated,
        last_value=np.where(terminated[:, None], np.float32(0), normal(episodes, values)),
        state=normal(decisions, 3),
        images=tuple(rng.integers(0, 256, (decisions, 5, 4, 3), np.uint8) for _ in range(cameras)),
        sample=normal(decisions, chunk, 2),
        log_prob=normal(decisions, chunk, 2),
        value=normal(decisions, values),
        rewards=np.where(np.arange(chunk) < executed[:, None], normal(decisions, chunk), np.float32(0)),
        executed=executed,
    )


def same(a: Trajectories, b: Trajectories) -> bool:
    def equal(mine: Any, theirs: Any) -> bool:
        if isinstance(mine, tuple):
            return len(mine) == len(theirs) and all(map(equal, mine, theirs))
        if isinstance(mine, np.ndarray):
            return mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
        return bool(mine == theirs)

    return all(equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Trajectories))


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6).map(tuple),
    chunk=st.integers(1, 5),
    per_action=st.sampled_from([0, 1, 2]),
    cameras=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None)
def test_what_was_packed_is_unpacked(
    lengths: tuple[int, ...], chunk: int, per_action: int, cameras: int, seed: int
) -> None:
    values = {0: 0, 1: 1, 2: chunk}[per_action]
    written = make(lengths, chunk=chunk, values=values, cameras=cameras, seed=seed)
    assert same(unpack(pack(written)), written)
    assert pack(unpack(pack(written))) == pack(written)


def test_pictures_are_views_on_the_blob() -> None:
    blob = np.frombuffer(pack(make()), np.uint8)
    read = unpack(blob.data)
    assert np.shares_memory(read.images[0], blob)
    assert not read.images[0].flags.writeable
    assert read.state.flags.aligned


@given(cut=st.integers(0, 10_000), where=st.integers(0, 10_000), value=st.integers(0, 255))
@settings(deadline=None)
def test_a_torn_blob_is_refused_and_a_changed_one_never_breaks_the_reader(cut: int, where: int, value: int) -> None:
    blob = pack(make())
    with pytest.raises(ValueError, match=r"."):
        unpack(blob[: cut % len(blob)])
    with pytest.raises(ValueError, match=r"."):
        unpack(blob + b"x")
    changed = bytearray(blob)
    changed[where % len(blob)] = value
    with suppress(ValueError):  # in a number it may go unnoticed; nothing else than this is raised
        unpack(bytes(changed))


def test_a_shape_that_lies_about_its_frame_is_refused() -> None:
    body, *frames = split(pack(make()))
    content = msgspec.msgpack.decode(body)
    for index in range(len(content["arrays"])):
        for shape in ([2**40, 2**30], [-1, 1], [], [6, 2**62, 2**62]):
            lying = msgspec.msgpack.decode(body)
            lying["arrays"][index]["shape"] = shape
            with pytest.raises(ValueError, match=r"."):
                unpack(join([msgspec.msgpack.encode(lying), *frames]))
    arrays: list[Any] = content["arrays"]
    for others in (arrays[:0], arrays[:-1], arrays * 2):
        with pytest.raises(ValueError, match="holds no trajectories"):
            unpack(join([msgspec.msgpack.encode({**content, "arrays": others}), *frames]))
    for blob in (b"", join([]), join([b"\xc1"]), join([msgspec.msgpack.encode({"version": 1})])):
        with pytest.raises(ValueError, match=r"."):
            unpack(blob)


def test_more_numbers_or_text_than_memory_is_given_to_are_refused_before_they_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blob = pack(make(cameras=2))
    numbers = sum(getattr(make(), name).nbytes for name in trajectories._ARRAYS)
    monkeypatch.setattr(trajectories, "MAX_NUMBERS_BYTES", numbers)
    unpack(blob)  # pictures do not count
    monkeypatch.setattr(trajectories, "MAX_NUMBERS_BYTES", numbers - 1)
    with pytest.raises(ValueError, match=f"have {numbers} bytes of numbers, at most {numbers - 1} may be"):
        unpack(blob)
    monkeypatch.setattr(trajectories, "_MAX_BODY_BYTES", 100)
    with pytest.raises(ValueError, match="at most 100 may be"):
        unpack(blob)


def wrong(**fields: Any) -> Trajectories:
    return dataclasses.replace(make(), **fields)


GOOD = make()
WRONG = {
    "versions count from 1": wrong(version=0),
    "state .* is float64": wrong(state=GOOD.state.astype(np.float64)),
    "state .* holds numbers that are not finite": wrong(state=np.full_like(GOOD.state, np.inf)),
    "log_prob .* holds numbers that are not finite": wrong(log_prob=np.full_like(GOOD.log_prob, np.nan)),
    "lengths .* which it cannot be": wrong(lengths=np.array(3, np.int64)),
    "executed .* which it cannot be": wrong(executed=np.array(3, np.int64)),
    "draws .* has 2 rows for 3 episodes": wrong(draws=GOOD.draws[:2]),
    "value .* has 5 rows for 6 decisions": wrong(value=GOOD.value[:5]),
    "sample .* cannot be": wrong(sample=GOOD.sample[:, 0, 0]),
    "lengths do not add up": wrong(lengths=np.array([3, 1, 3], np.int64)),
    "lengths do not add": wrong(lengths=np.array([6, 0, 0], np.int64)),
    "lengths do": wrong(lengths=np.array([2**62, 2**62, 2**63 - 1], np.int64)),
    "chunks of 3, log_prob for 4": wrong(rewards=GOOD.rewards[:, :3]),
    "2 values a decision": wrong(value=np.zeros((6, 2), np.float32)),
    "0 at the end": wrong(last_value=np.zeros((3, 0), np.float32)),
    "not 1 to 4 executed": wrong(executed=np.array([1, 2, 3, 4, 5, 1], np.int64)),
    "not executed": wrong(executed=np.full(6, 1, np.int64), rewards=np.ones((6, 4), np.float32)),
    "behind the end": wrong(terminated=np.full(3, True), last_value=np.ones((3, 1), np.float32)),
    "pictures .* is needed": wrong(images=(GOOD.images[0][:, :, :, :1],)),
    "is negative": wrong(seeds=np.array([-1, 0, 1], np.int64)),
    "is twice": wrong(draws=np.zeros(3, np.int64)),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_trajectories_that_contradict_themselves_are_neither_written_nor_read(
    sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=sentence):
        pack(WRONG[sentence])
    monkeypatch.setattr("joynexus.simulation.trajectories._check", lambda _: None)
    blob = pack(WRONG[sentence])
    monkeypatch.undo()
    with pytest.raises(ValueError, match=sentence):
        unpack(blob)


def test_pages_together_are_all_their_episodes_in_order() -> None:
    a, b = make((2, 1), seed=1), dataclasses.replace(make((3,), seed=2, first=9), version=5)
    both = concatenate([a, b])
    assert both.version == 5
    assert both.lengths.tolist() == [2, 1, 3]
    assert both.draws.tolist() == [0, 1, 9]
    assert np.array_equal(both.state, np.concatenate([a.state, b.state]))
    assert np.array_equal(both.images[0], np.concatenate([a.images[0], b.images[0]]))
    assert same(unpack(pack(both)), both)
    assert same(concatenate([a]), a)


def test_pages_that_do_not_belong_together_are_refused() -> None:
    a = make()
    for other, sentence in (
        (dataclasses.replace(make(first=9), contract="d" * 32), "another contract or instruction"),
        (make(chunk=3, first=9), "sample has other lengths"),
        (make(values=4, first=9), "last_value has other lengths"),
        (make(cameras=2, first=9), "other pictures"),
        (make(), "is twice"),
    ):
        with pytest.raises(ValueError, match=sentence):
            concatenate([a, other])
    with pytest.raises(ValueError, match="no trajectories"):
        concatenate([])
