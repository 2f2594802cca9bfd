"""Backbone forwards per sample over several epochs of SFT, with and without the feature store.

In: a data set of random pictures, trained on by the trainer's own engine with the `lite` backbone. Out: forwards per
sample (1.0 means once in its life), and what an epoch costs before and after. Never: a count that the engine did not
report for metering too; both are compared.
"""

# ruff: noqa: E402 - how torch computes must be chosen before it is loaded

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from joynexus.vla import numerics

numerics.configure(1)

import msgspec
import numpy as np
from safetensors.numpy import save

from benchmarks import _report
from common.blobs import BlobStore
from joynexus.contract import Camera, Contract, Statistics, VectorStatistics
from joynexus.datasets import DatasetManifest, EpisodeEntry
from joynexus.specs import PolicySpec
from joynexus.vla.backbones import Backbone, load_backbone
from joynexus.vla.feature_store import FeatureStore
from joynexus.wire.back import OpenSlot, TrainDone, TrainGroup, TrainItem
from joynexus.wire.front import DatasetSamples
from services.trainer.core import TrainerEngine

EPOCHS = 5
BATCH = 64
SIDE = 64
STATE, ACTION, CHUNK = 39, 4, 8
CACHE = Path(".joynexus/cache")


def main(argv: Sequence[str] | None = None) -> None:
    options = _report.arguments("feature_reuse", "Backbone forwards per sample over 5 epochs.", argv)
    steps = 128 if options.quick else 1024
    backbone = load_backbone("lite", cache_dir=CACHE)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            measure(backbone, Path(folder) / f"{cameras}-{stored}", steps, cameras, stored)
            for cameras, stored in ((1, True), (0, True), (1, False))
        ]
    _report.write("feature_reuse", options, rows)


def measure(backbone: Backbone, folder: Path, steps: int, cameras: int, stored: bool) -> _report.Row:
    """Train `EPOCHS` epochs on `steps` samples; return one row."""
    blobs = BlobStore(folder / "blobs")
    manifest, contract, statistics_ = random_dataset(blobs, steps, cameras)
    store = FeatureStore(folder / "features", 4 * 1024**3) if stored else None
    engine = TrainerEngine(
        backbone, store, blobs.path, lambda path: blobs.put_file(path, move=True), scratch=folder / "scratch"
    )
    spec = PolicySpec(backbone="lite", chunk=CHUNK, contract=contract, statistics=statistics_)
    run(engine, TrainGroup(task="open", attempt=1, slots=(OpenSlot(tenant="t", policy="p", spec=spec),)))
    before, reported, seq, seconds = backbone.samples_forwarded, 0, 0, []
    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(steps)
        began = time.perf_counter()
        for start in range(0, steps, BATCH):
            seq += 1
            wanted = DatasetSamples(dataset=manifest, indices=tuple(order[start : start + BATCH].tolist()))
            item = TrainItem(
                tenant="t", policy="p", seq=seq, kind="train_step", dataset=wanted, feature_scope="tenant:t"
            )
            reported += run(engine, TrainGroup(task=str(seq), attempt=1, items=(item,)))
        seconds.append(time.perf_counter() - began)
    forwards = backbone.samples_forwarded - before
    if forwards != reported:
        raise RuntimeError(f"the backbone ran {forwards} samples, but {reported} were reported for metering")
    later = statistics.median(seconds[1:])
    return {
        "backbone": backbone.name,
        "cameras": cameras,
        "feature_store": stored,
        "samples": steps,
        "epochs": EPOCHS,
        "backbone_forwards": forwards,
        "forwards_per_sample": round(forwards / steps, 4),
        "first_epoch_ms_per_sample": round(1000 * seconds[0] / steps, 3),
        "later_epochs_ms_per_sample": round(1000 * later / steps, 3),
        "speedup_of_later_epochs": round(seconds[0] / later, 2),
    }


def run(engine: TrainerEngine, group: TrainGroup) -> int:
    """Do a group in which nothing may fail; return the backbone forwards that it reports."""
    forwards = 0
    for answer in engine.run(group):
        if not isinstance(answer, TrainDone) or answer.result.error is not None:
            raise RuntimeError(f"an op failed: {answer}")
        forwards += answer.backbone_forwards
    return forwards


def random_dataset(blobs: BlobStore, steps: int, cameras: int) -> tuple[str, Contract, Statistics]:
    """Store episodes of 64 steps; return the manifest's digest, contract and statistics."""
    views = tuple(Camera(name=f"view{number}", height=SIDE, width=SIDE) for number in range(cameras))
    contract = Contract(robot="random", cameras=views, state_dim=STATE, action_dim=ACTION)
    made = Statistics(count=steps, state=_unit(STATE), action=_unit(ACTION))
    random, entries = np.random.default_rng(0), []
    for _ in range(0, steps, 64):
        tensors = {
            "state": random.standard_normal((64, STATE)).astype(np.float32),
            "action": random.standard_normal((64, ACTION)).astype(np.float32),
            "timestamp": np.arange(64) / 10,
        } | {f"image.{view.name}": random.integers(0, 256, (64, SIDE, SIDE, 3), dtype=np.uint8) for view in views}
        blob = save(tensors)
        entries.append(
            EpisodeEntry(length=64, instruction="push the button", blob=blobs.put_bytes(blob), nbytes=len(blob))
        )
    manifest = DatasetManifest(
        source_format="lerobot-v3.0",
        source_digest="0" * 32,
        fps=10.0,
        contract=contract,
        statistics=made,
        episodes=tuple(entries),
    )
    return blobs.put_bytes(msgspec.msgpack.encode(manifest)), contract, made


def _unit(size: int) -> VectorStatistics:
    zeros, ones = (0.0,) * size, (1.0,) * size
    return VectorStatistics(mean=zeros, std=ones, min=zeros, max=ones, q01=zeros, q99=ones)


if __name__ == "__main__":
    main()
