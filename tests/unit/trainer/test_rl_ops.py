"""Promises of the RL ops: features are met again, vetoes are counted, others do not wait."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from joynexus.simulation.trajectories import pack, unpack
from joynexus.specs import GrpoSpec, PpoSpec
from joynexus.vla.busy import BusyClock
from joynexus.vla.shared_forward import SharedForward
from joynexus.wire import ErrorCode
from joynexus.wire.back import TrainDone
from services.trainer.core import TrainerEngine
from services.trainer.rl import epoch, reader
from tests.unit.trainer.rollouts import PPO, RlLoop, begun, made_up, rolled, see, send, state, unchanged
from tests.unit.workers import Arrays, Bench, Group, MemoryStore, opening

METRICS = {
    "loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "dual_clip_fraction", "weight_mean",
    "weight_clip_fraction", "explained_variance", "grad_norm", "lr", "steps", "vetoed", "stopped", "groups",
    "groups_kept", "decisions",
}  # fmt: skip


@pytest.fixture
def loop(tmp_path: Path) -> RlLoop:
    """PPO that has begun and published version 1; the policy sees no pictures."""
    return begun(Bench(tmp_path), PPO)


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


@pytest.mark.parametrize("limit", [0.0, 2.0], ids=["synchronous", "asynchronous"])
def test_a_large_minibatch_goes_through_the_head_in_parts_and_has_the_same_numbers(
    tmp_path: Path, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(name: str, most_rows: int) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], int]:
        monkeypatch.setattr(epoch, "MOST_ROWS", most_rows)
        loop = begun(Bench(tmp_path / name), PpoSpec(minibatch=65_536, epochs=2, value_clip=0.1, entropy_weight=0.01))
        loop.weight_limit = limit
        pages, rows, slot = rolled(loop), list[int](), next(iter(loop.bench.engine._slots.values()))
        evaluate = slot.trained.evaluate
        monkeypatch.setattr(
            slot.trained, "evaluate", lambda seen, *more: (rows.append(len(seen)), evaluate(seen, *more))[1]
        )
        return loop.update(0, pages), state(loop), max(rows)

    (whole, weights, most), (parts, others, fewer) = trained("whole", 65_536), trained("parts", 8)
    assert [metrics["steps"] for metrics in parts] == [1.0, 1.0]
    assert fewer <= 8 < most == whole[0]["decisions"]
    for found, expected in zip(parts, whole, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert all(torch.allclose(tensor, others[name], atol=1e-5) for name, tensor in weights.items())


def test_a_part_that_is_refused_costs_its_whole_minibatch_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch, "MOST_ROWS", 4)
    groot: dict[str, object] = {"head": "groot", "head_config": {"width": 16, "layers": 1, "heads": 2}}
    loop = begun(Bench(tmp_path), PpoSpec(minibatch=1000, epochs=1), **groot)
    page = unpack(loop.bench.blobs.path(rolled(loop)[0]).read_bytes())
    page.sample[3, -1] = 99.0  # a step that the integration does not have
    before, slot = state(loop), next(iter(loop.bench.engine._slots.values()))
    done = send(loop, loop.epoch(0, 0, rolled(loop, sample=page.sample)))
    assert done.result.error is not None
    assert done.result.error.code == ErrorCode.BAD_DATA
    assert unchanged(loop, before)
    assert all(parameter.grad is None for parameter in slot.trained.module.parameters())


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


def half_done(folder: Path) -> tuple[RlLoop, tuple[str, ...]]:
    """An asynchronous update of two epochs, of which one is done."""
    loop = begun(Bench(folder))
    loop.weight_limit = 2.0
    pages = rolled(loop)
    loop.op("rl_epoch", rl=loop.epoch(0, 0, pages))
    assert "proximal" in state(loop)
    return loop, pages


@pytest.mark.parametrize("how", ["it cannot be read", "nothing is finite", "it was set aside"])
def test_a_last_epoch_that_fails_keeps_nothing_of_its_update(tmp_path: Path, how: str) -> None:
    loop, pages = half_done(tmp_path)
    before, skip = state(loop), how == "it was set aside"
    if how == "it cannot be read":
        pages = (loop.bench.blobs.put_bytes(b"no rollout"),)
    if how == "nothing is finite":
        rollout = made_up(2, values=3, contract=loop.spec.contract.digest())
        rollout.rewards[:, 0] = 1e30
        pages = (loop.bench.blobs.put_bytes(pack(rollout)),)
    error = send(loop, loop.epoch(0, 1, pages), skip=skip).result.error
    assert (error is None) is skip
    del before["proximal"]
    assert unchanged(loop, before)


def test_a_step_on_samples_ends_an_update_that_was_given_up(tmp_path: Path) -> None:
    loop, _ = half_done(tmp_path)
    loop.seq += 1
    loop.bench.done(Group().train(loop.name, loop.seq, Arrays(1, cameras=0)))
    assert "proximal" not in state(loop)


def test_a_restarted_trainer_still_knows_the_versions_that_were_published(loop: RlLoop) -> None:
    saved = loop.bench.done(Group().op(loop.name, loop.seq, "checkpoint"))[0].checkpoint
    loop.bench.fresh()
    loop.seq += 1
    again = Group(opening(loop.name, loop.spec, saved, loop.seq - 1))
    loop.bench.done(again.op(loop.name, loop.seq, "rl_epoch", rl=loop.epoch(0, 0, rolled(loop))))
