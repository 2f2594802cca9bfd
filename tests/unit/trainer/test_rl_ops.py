"""Promises of the RL ops: features are met again, what is wrong is refused with nothing changed, vetoes are counted."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from joynexus.simulation.trajectories import Trajectories, pack, unpack
from joynexus.specs import GrpoSpec, PpoSpec
from joynexus.vla.busy import BusyClock
from joynexus.vla.shared_forward import SharedForward
from joynexus.wire import ErrorCode
from joynexus.wire.back import RlEpoch, SlotFailed, TrainDone
from services.trainer.core import TrainerEngine
from services.trainer.rl import reader
from tests.unit.trainer.rollouts import RlLoop, made_up, see
from tests.unit.workers import Arrays, Bench, Group, MemoryStore, opening, spec

PPO = PpoSpec(minibatch=10, epochs=2)
GRPO = GrpoSpec(group_size=4, minibatch=10, epochs=2, filter_low=-99, filter_high=99)
METRICS = {
    "loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "dual_clip_fraction", "weight_mean",
    "weight_clip_fraction", "explained_variance", "grad_norm", "lr", "steps", "vetoed", "stopped", "groups",
    "groups_kept", "decisions",
}  # fmt: skip


@pytest.fixture
def loop(tmp_path: Path) -> RlLoop:
    """PPO that has begun and published version 1; the policy sees no pictures."""
    return begun(Bench(tmp_path), PPO)


def begun(bench: Bench, algorithm: PpoSpec | GrpoSpec = PPO, cameras: int = 0, **changes: Any) -> RlLoop:
    made_of = msgspec.structs.replace(spec(cameras=cameras), **changes)
    loop = RlLoop(bench, made_of, algorithm)
    loop.start()
    return loop


def rolled(loop: RlLoop, **changes: Any) -> tuple[str, ...]:
    """Pages of the first update; the first one with changes."""
    pages = loop.roll(loop.acting, 0)
    if changes:
        page = dataclasses.replace(unpack(loop.bench.blobs.path(pages[0]).read_bytes()), **changes)
        pages = (loop.bench.blobs.put_bytes(pack(page)), *pages[1:])
    return pages


def send(loop: RlLoop, epoch: RlEpoch | None, **fields: Any) -> TrainDone:
    """Do an epoch that may be refused."""
    loop.seq += 1
    return loop.bench.one(Group().op(loop.name, loop.seq, "rl_epoch", rl=epoch, **fields))


def state(loop: RlLoop) -> dict[str, torch.Tensor]:
    slot = next(iter(loop.bench.engine._slots.values()))
    tensors, _ = slot._learner.state()
    return tensors | ({} if slot._proximal is None else {"proximal": slot._proximal[1].clone()})


def unchanged(loop: RlLoop, before: dict[str, torch.Tensor]) -> bool:
    after = state(loop)
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_an_epoch_reports_all_its_metrics_as_finite_numbers(loop: RlLoop) -> None:
    first, second = loop.update(0, rolled(loop))
    assert set(first) == set(second) == METRICS
    assert all(np.isfinite(list(first.values())))
    decisions = sum(len(unpack(loop.bench.blobs.path(page).read_bytes()).executed) for page in rolled(loop))
    assert first["decisions"] == decisions == loop.answers[-1].samples
    assert first["steps"] == -(-decisions // PPO.minibatch)
    assert (first["weight_mean"], first["weight_clip_fraction"], first["groups"]) == (1.0, 0.0, 0.0)
    assert loop.answers[-1].step == first["steps"] + second["steps"]


def test_before_its_first_step_the_policy_is_the_one_that_acted(tmp_path: Path) -> None:
    loop = begun(Bench(tmp_path), PpoSpec(minibatch=1000, epochs=1))
    (metrics,) = loop.update(0, rolled(loop))
    assert (metrics["steps"], metrics["clip_fraction"]) == (1.0, 0.0)
    assert metrics["approx_kl"] < 1e-10
    assert metrics["policy_loss"] == pytest.approx(0.0, abs=1e-5)  # normalised advantages have no mean


# Features


def as_inference(bench: Bench, loop: RlLoop, page: str) -> None:
    """Leave the features of a page in the host's store, as those who act do."""
    rollout = unpack(bench.blobs.path(page).read_bytes())
    acting = SharedForward(bench.backbone, bench.features, BusyClock(torch.device("cpu")))
    seen = [see(loop.spec, state) for state in rollout.state]
    keys = [acting.key(f"tenant:of-{loop.name}", observation) for observation in seen]
    acting.complete([acting.look_up(keys, seen.__getitem__)])


def test_epochs_need_no_forward_when_the_rollouts_features_are_in_the_store(tmp_path: Path) -> None:
    met = begun(Bench(tmp_path / "met"), cameras=1)
    pages = rolled(met)
    for page in pages:
        as_inference(met.bench, met, page)
    before = met.bench.backbone.samples_forwarded
    metrics = met.update(0, pages)
    assert met.bench.backbone.samples_forwarded == before
    assert [answer.backbone_forwards for answer in met.answers[-2:]] == [0, 0]

    new = begun(Bench(tmp_path / "new"), cameras=1)
    assert new.update(0, rolled(new)) == metrics
    assert [answer.backbone_forwards for answer in new.answers[-2:]] == [metrics[0]["decisions"], 0]

    forgetful = begun(Bench(tmp_path / "forgetful", keep_features=False), cameras=1)
    assert forgetful.update(0, rolled(forgetful)) == metrics
    assert [answer.backbone_forwards for answer in forgetful.answers[-2:]] == [metrics[0]["decisions"]] * 2


def test_without_pictures_an_update_has_one_forward(loop: RlLoop) -> None:
    loop.update(0, rolled(loop))
    assert [answer.backbone_forwards for answer in loop.answers[-2:]] == [1, 0]


def test_a_feature_key_that_a_rollout_names_is_not_believed(tmp_path: Path) -> None:
    honest, forged = begun(Bench(tmp_path / "honest"), cameras=1), begun(Bench(tmp_path / "forged"), cameras=1)
    pages = rolled(forged)
    other = "0" * 80
    forged.bench.features.put(other, forged.bench.backbone.forward([see(forged.spec, np.ones(4, np.float32))])[0])
    count = len(unpack(forged.bench.blobs.path(pages[0]).read_bytes()).keys)
    assert forged.update(0, rolled(forged, keys=(other,) * count)) == honest.update(0, rolled(honest))


def test_groups_that_are_left_out_cost_no_forward(tmp_path: Path) -> None:
    loop = begun(Bench(tmp_path), GrpoSpec(group_size=4, epochs=1, filter_low=1e6, filter_high=1e7), cameras=1)
    before = state(loop)
    (metrics,) = loop.update(0, rolled(loop))
    assert (metrics["groups"], metrics["groups_kept"], metrics["steps"], metrics["decisions"]) == (2, 0, 0, 0)
    assert (loop.answers[-1].backbone_forwards, loop.answers[-1].result.error) == (0, None)
    assert unchanged(loop, before)


def test_an_update_is_read_once_for_all_its_epochs_and_again_if_it_was_forgotten(
    loop: RlLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = list[str]()
    loop.bench.open_blob = lambda digest: (opened.append(digest), loop.bench.blobs.path(digest))[1]
    pages = rolled(loop)
    as_inference(loop.bench, loop, pages[0])
    opened.clear()
    remembered = loop.update(0, pages)
    assert sorted(opened) == sorted(pages)
    assert not loop.bench.engine._experience._remembered, "nothing is kept behind the last epoch"
    monkeypatch.setattr(reader, "_REMEMBERED_BYTES", 0)
    other = begun(Bench(loop.bench.folder / "other"))
    assert other.update(0, rolled(other)) == remembered
    assert not other.bench.engine._experience._remembered


# What is wrong


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


# Vetoes and stops


def test_minibatches_that_are_not_finite_are_skipped_and_counted(tmp_path: Path) -> None:
    loop = begun(Bench(tmp_path), PpoSpec(minibatch=4, epochs=1))
    rollout = made_up(2, lengths=(1, 7, 8), values=3, contract=loop.spec.contract.digest())
    rollout.rewards[0, 0] = 1e30  # its square overflows, in the one decision of its episode
    metrics = loop.op("rl_epoch", rl=loop.epoch(0, 0, (loop.bench.blobs.put_bytes(pack(rollout)),))).result.metrics
    assert (metrics["vetoed"], metrics["steps"]) == (1.0, 3.0)
    assert all(np.isfinite(list(metrics.values())))
    assert all(torch.isfinite(tensor).all() for tensor in state(loop).values())


def test_a_sample_that_the_head_refuses_costs_its_minibatch_and_no_other(tmp_path: Path) -> None:
    loop = begun(
        Bench(tmp_path),
        PpoSpec(minibatch=4, epochs=1),
        head="groot",
        head_config={"width": 16, "layers": 1, "heads": 2},
    )
    page = unpack(loop.bench.blobs.path(rolled(loop)[0]).read_bytes())
    page.sample[3, -1] = 99.0  # a step that the integration does not have
    metrics = loop.op("rl_epoch", rl=loop.epoch(0, 0, rolled(loop, sample=page.sample))).result.metrics
    assert metrics["vetoed"] == 1.0
    assert metrics["steps"] == -(-metrics["decisions"] // 4) - 1


@pytest.mark.parametrize("limit", [0.0, 2.0], ids=["synchronous", "asynchronous"])
def test_an_epoch_of_which_nothing_is_finite_fails_and_changes_nothing(tmp_path: Path, limit: float) -> None:
    loop = begun(Bench(tmp_path))
    loop.weight_limit = limit
    rollout = made_up(2, values=3, contract=loop.spec.contract.digest())
    rollout.rewards[:, 0] = 1e30
    before = state(loop)
    done = send(loop, loop.epoch(0, 0, (loop.bench.blobs.put_bytes(pack(rollout)),)))
    assert done.result.error is not None
    assert done.result.error.code == ErrorCode.NON_FINITE
    assert unchanged(loop, before)


def test_an_epoch_stops_when_the_policy_has_moved_too_far(tmp_path: Path) -> None:
    loop = begun(Bench(tmp_path), PpoSpec(minibatch=4, epochs=2, target_kl=1e-3))
    loop.optimizer = msgspec.structs.replace(loop.optimizer, lr=0.05)
    loop.start()
    first, second = loop.update(0, rolled(loop))
    assert first["stopped"] == second["stopped"] == 1.0
    assert 1 <= first["steps"] < first["decisions"] // 4
    assert second["steps"] == 0


# Living with others


def test_a_step_beside_an_epoch_is_answered_first(loop: RlLoop) -> None:
    loop.bench.done(Group(opening("sft")).train("sft", 1, Arrays(1)))
    loop.seq += 1
    group = Group().op(loop.name, loop.seq, "rl_epoch", rl=loop.epoch(0, 0, rolled(loop))).train("sft", 2, Arrays(2))
    assert [answer.policy for answer in loop.bench.done(group)] == ["sft", loop.name]


def test_the_features_of_one_update_at_a_time_are_in_memory(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    one = begun(bench, cameras=1)
    two = RlLoop(bench, one.spec, PPO, name="other")
    two.start()
    group = Group(opening("sft"))
    for each in (one, two):
        each.seq += 1
        group.op(each.name, each.seq, "rl_epoch", rl=each.epoch(0, 0, rolled(each)))
    group.train("sft", 1, Arrays(1))
    forwarded = bench.backbone.samples_forwarded
    answers = bench.engine.run(group.message(), group.buffers)
    step, first = next(answers), next(answers)
    assert (step.policy, first.policy) == ("sft", one.name)
    assert isinstance(first, TrainDone)
    assert bench.backbone.samples_forwarded == forwarded + 4 + first.samples
    (second,) = answers
    assert isinstance(second, TrainDone)
    assert (second.policy, second.result.error, second.last) == (two.name, None, True)
    assert second.backbone_forwards == second.samples


def test_a_long_epoch_says_that_it_lives_after_each_minibatch(tmp_path: Path) -> None:
    bench, beats = Bench(tmp_path), list[int]()
    put = bench.put_blob
    bench.engine = TrainerEngine(
        bench.backbone,
        MemoryStore(),
        bench.blobs.path,
        put,
        scratch=tmp_path / "scratch",
        advance=lambda: beats.append(1),
    )
    loop = begun(bench)
    loop.weight_limit = 2.0
    pages = rolled(loop)
    beats.clear()
    steps = loop.op("rl_epoch", rl=loop.epoch(0, 0, pages)).result.metrics["steps"]
    # Both pages, the forward; what the policy said at first, and the steps.
    assert len(beats) == len(pages) + 1 + 2 * steps


def test_what_an_asynchronous_update_began_with_is_forgotten_after_its_last_epoch(tmp_path: Path) -> None:
    loop = begun(Bench(tmp_path))
    loop.weight_limit = 2.0
    pages = rolled(loop)
    loop.op("rl_epoch", rl=loop.epoch(0, 0, pages))
    assert "proximal" in state(loop)
    loop.op("rl_epoch", rl=loop.epoch(0, 1, pages))
    assert "proximal" not in state(loop)


def test_a_restarted_trainer_still_knows_the_versions_that_were_published(loop: RlLoop) -> None:
    saved = loop.bench.done(Group().op(loop.name, loop.seq, "checkpoint"))[0].checkpoint
    loop.bench.fresh()
    loop.seq += 1
    again = Group(opening(loop.name, loop.spec, saved, loop.seq - 1))
    loop.bench.done(again.op(loop.name, loop.seq, "rl_epoch", rl=loop.epoch(0, 0, rolled(loop))))
