"""Promises of the RL ops about what is wrong: it is refused in one sentence, with nothing changed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from joynexus.simulation.trajectories import Trajectories, pack, unpack
from joynexus.specs import GrpoSpec
from joynexus.wire import ErrorCode
from joynexus.wire.back import SlotFailed
from services.trainer.rl import reader
from tests.unit.trainer.rollouts import GRPO, PPO, RlLoop, begun, rolled, see, send, state, unchanged
from tests.unit.workers import Arrays, Bench, Group, opening, spec


@pytest.fixture
def loop(tmp_path: Path) -> RlLoop:
    """PPO that has begun and published version 1; the policy sees no pictures."""
    return begun(Bench(tmp_path), PPO)


def wrong_sample(page: Trajectories) -> dict[str, Any]:
    return {"sample": np.zeros((len(page.executed), 5), np.float32)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"contract": "ff" * 16}, "another contract"),
        ({"version": 2}, "version 2, but the policy has published 1"),
        (wrong_sample, "sample"),
        (lambda page: {"state": np.zeros((len(page.executed), 9), np.float32)}, "states of 9 numbers"),
        (lambda page: {"log_prob": np.zeros((len(page.executed), 3, 4), np.float32)}, r"chunks of \[3, 4\]"),
        (
            lambda page: {
                "value": np.zeros((len(page.executed), 1), np.float32),
                "last_value": np.zeros((len(page.lengths), 1), np.float32),
            },
            "1 values for each chunk",
        ),
        (
            lambda page: {"images": (np.zeros((len(page.executed), 8, 8, 3), np.uint8),)},
            "other pictures than",
        ),
    ],
    ids=["contract", "version", "sample of another head", "state", "chunk", "values", "pictures"],
)
def test_a_rollout_of_another_policy_is_refused_and_changes_nothing(loop: RlLoop, changes: Any, says: str) -> None:
    page = unpack(loop.bench.blobs.path(rolled(loop)[0]).read_bytes())
    changed = changes(page) if callable(changes) else changes
    pages, before = rolled(loop, **changed), state(loop)
    # Alone, since pages that differ from each other are refused for that.
    done = send(loop, loop.epoch(0, 0, pages[:1]))
    assert done.result.error is not None
    assert done.result.error.code == ErrorCode.BAD_DATA
    assert re.search(says, done.result.error.message)
    assert unchanged(loop, before)


@pytest.mark.parametrize(
    ("pages", "says"),
    [
        (lambda loop: rolled(loop)[:1] * 2, "an episode is twice"),
        (lambda loop: (loop.bench.blobs.put_bytes(b"no rollout"),), "a rollout cannot be trained on"),
        (lambda loop: (), "there are no trajectories"),
    ],
    ids=["an episode twice", "no rollout", "no pages"],
)
def test_rollouts_that_make_no_update_are_refused_and_change_nothing(loop: RlLoop, pages: Any, says: str) -> None:
    before = state(loop)
    done = send(loop, loop.epoch(0, 0, pages(loop)))
    assert done.result.error is not None
    assert done.result.error.code == ErrorCode.BAD_DATA
    assert says in done.result.error.message
    assert unchanged(loop, before)


def test_more_episodes_than_a_group_has_are_refused(tmp_path: Path) -> None:
    loop = begun(Bench(tmp_path), GrpoSpec(group_size=2))
    pages = loop.roll(loop.acting, 0, pages=1)
    seeds = np.zeros(loop.episodes, np.int64)
    done = send(loop, loop.epoch(0, 0, rolled_as(loop, pages[0], seeds=seeds)))
    assert done.result.error is not None
    assert "8 episodes start from seed 0, but an advantage group has 2" in done.result.error.message


def rolled_as(loop: RlLoop, page: str, **changes: Any) -> tuple[str, ...]:
    changed = dataclasses.replace(unpack(loop.bench.blobs.path(page).read_bytes()), **changes)
    return (loop.bench.blobs.put_bytes(pack(changed)),)


def test_what_rl_adds_to_a_policy_must_fit_beside_it_and_is_counted(tmp_path: Path) -> None:
    loop = begun(Bench(tmp_path), PPO)
    needed, before = loop.answers[0].slot_bytes, state(loop)
    other = RlLoop(loop.bench, loop.spec, PPO, name="other")
    loop.bench.engine._ops._slot_bytes = needed - 1
    refused = loop.bench.one(Group(opening(other.name, other.spec)).op(other.name, 1, "rl_begin", rl=other.begin))
    assert refused.result.error is not None
    assert refused.result.error.code == ErrorCode.INVALID
    assert "choose a narrower critic" in refused.result.error.message
    assert 0 < refused.slot_bytes < needed, "it is as it was"
    loop.bench.engine._ops._slot_bytes = needed
    begun_now = loop.bench.one(Group().op(other.name, 2, "rl_begin", rl=other.begin))
    assert (begun_now.result.error, begun_now.slot_bytes) == (None, needed)
    assert unchanged(loop, before)


@pytest.mark.parametrize(("limit", "value"), [("MAX_DECISIONS", 5), ("MAX_NUMBERS_BYTES", 1000)])
def test_an_update_that_is_too_large_is_refused(
    loop: RlLoop, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    pages = rolled(loop)
    monkeypatch.setattr(reader, limit, value)
    done = send(loop, loop.epoch(0, 0, pages))
    assert done.result.error is not None
    assert done.result.error.code == ErrorCode.INVALID
    assert "take fewer or shorter episodes" in done.result.error.message


def test_an_update_whose_features_do_not_fit_into_memory_is_refused_before_any_forward(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    loop = begun(bench, cameras=1)
    pages, forwarded = rolled(loop), bench.backbone.samples_forwarded
    observation = see(loop.spec, np.zeros(4, np.float32))
    (feature,) = bench.backbone.forward([observation])
    decisions = sum(len(unpack(bench.blobs.path(page).read_bytes()).executed) for page in pages)
    experience, needed = bench.engine._experience, decisions * feature.layers[-1].nbytes
    for update_bytes, fits in ((needed - 1, False), (needed, True)):
        experience._update_bytes = update_bytes
        before = bench.backbone.samples_forwarded
        done = send(loop, loop.epoch(0, 0, pages))
        if fits:
            assert done.result.error is None
            continue
        assert done.result.error is not None
        assert done.result.error.code == ErrorCode.INVALID
        assert "take fewer or shorter episodes" in done.result.error.message
        assert bench.backbone.samples_forwarded == before > forwarded


def test_an_epoch_before_rl_has_begun_or_with_another_level_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    early = bench.one(Group(opening("arm", spec(cameras=0))).op("arm", 1, "rl_epoch"))
    assert early.result.error is not None
    assert early.result.error.code == ErrorCode.INVALID
    loop = begun(Bench(tmp_path / "begun"), GRPO)
    pages = rolled(loop)
    loop.algorithm = PPO
    done = send(loop, loop.epoch(0, 0, pages))
    assert done.result.error is not None
    assert "0 values for each chunk" in done.result.error.message


def test_a_plain_policy_cannot_go_over_experience(tmp_path: Path) -> None:
    loop = begun(Bench(tmp_path), GRPO)
    pages = rolled(loop)
    other = RlLoop(loop.bench, loop.spec, GRPO, name="plain")
    other.op("publish", version=1)
    done = send(other, other.epoch(0, 0, pages))
    assert done.result.error is not None
    assert "send rl_begin first" in done.result.error.message


def test_after_a_step_on_samples_rewards_must_begin_anew(loop: RlLoop) -> None:
    pages = rolled(loop)
    loop.seq += 1
    loop.bench.done(Group().train(loop.name, loop.seq, Arrays(1, cameras=0)))
    done = send(loop, loop.epoch(0, 0, pages))
    assert done.result.error is not None
    assert done.result.error.code == ErrorCode.INVALID
    assert "send rl_begin first" in done.result.error.message


def test_a_rollout_without_a_single_byte_is_refused(loop: RlLoop) -> None:
    done = send(loop, loop.epoch(0, 0, (loop.bench.blobs.put_bytes(b""),)))
    assert done.result.error is not None
    assert done.result.error.code == ErrorCode.BAD_DATA


def test_a_missing_rollout_is_the_services_fault_and_the_slot_is_opened_again(loop: RlLoop) -> None:
    loop.seq += 1
    (answer,) = loop.bench.run(Group().op(loop.name, loop.seq, "rl_epoch", rl=loop.epoch(0, 0, ("ab" * 32,))))
    assert isinstance(answer, SlotFailed)
    assert answer.error.code == ErrorCode.UNAVAILABLE
