"""A thousand policies on one trainer with room for 32: what paging costs, and that nobody's curve notices.

In: `oft` policies that differ in seed, samples and learning rate, trained by the trainer's own engine on the `lite`
backbone with a real blob store. Out: page-in and page-out times, bytes a slot, memory at the beginning and the end, and
throughput against all policies in memory, by quantum (ops for each page-in). Never: a row in which a curve or a final
state differs from that of the policy alone; then it ends with an error.

A page is a checkpoint: a policy leaves memory when it is durable, as the master has it done. Its features are stored
before anything is timed.
"""

# ruff: noqa: E402 - how torch computes must be chosen before it is loaded

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from joynexus.vla import numerics

numerics.configure(1)

import numpy as np

from benchmarks import _report
from benchmarks.feature_reuse import CACHE, random_dataset
from common.blobs import BlobStore
from joynexus.contract import Contract, Statistics
from joynexus.specs import OptimizerSpec, PolicySpec
from joynexus.vla.backbones import Backbone, load_backbone
from joynexus.vla.feature_store import FeatureStore
from joynexus.wire.back import OpenSlot, TrainDone, TrainGroup, TrainItem
from joynexus.wire.front import DatasetSamples
from services.trainer.core import TrainerEngine

ROOM = 32
TOGETHER = 8
"""Policies in a group."""
OPS = 16
FEW_OPS = 4
BATCH = 8
STEPS = 64
"""Of the data set."""
QUANTA = {1: FEW_OPS, 4: OPS, 8: OPS}
"""Ops for each page-in (the first is opened fresh), and ops of each policy in that run."""

Curves = dict[int, list[float]]


@dataclass
class Run:
    """What a run of all policies gave; by policy the state at its end and, alone, the one after `FEW_OPS`."""

    seconds: float = 0.0
    page_in: list[float] = field(default_factory=list)
    page_out: list[float] = field(default_factory=list)
    curves: Curves = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    early: dict[int, str] = field(default_factory=dict)
    resident: list[float] = field(default_factory=list)
    slot_bytes: int = 0
    page_bytes: int = 0


class Bench:
    """Policies by number, and the folder in which they are trained."""

    def __init__(self, backbone: Backbone, folder: Path, policies: int) -> None:
        self.backbone, self.folder, self.policies = backbone, folder, policies
        self.blobs = BlobStore(folder / "blobs")
        self.manifest, self.contract, self.statistics = random_dataset(self.blobs, STEPS, 1)
        self.features = FeatureStore(folder / "features", 1024**3)

    def engine(self) -> TrainerEngine:
        """A trainer with nothing in memory."""
        return TrainerEngine(
            self.backbone,
            self.features,
            self.blobs.path,
            lambda path: self.blobs.put_file(path, move=True),
            scratch=self.folder / "scratch",
        )

    def opening(self, number: int, checkpoint: str = "", seq: int = 0) -> OpenSlot:
        """A policy's slot, fresh or from its page."""
        return OpenSlot(
            tenant=f"t{number % 50}",
            policy=f"p{number}",
            spec=_spec(self.contract, self.statistics, number),
            checkpoint=checkpoint,
            applied_seq=seq,
        )

    def item(self, number: int, seq: int) -> TrainItem:
        """A policy's op."""
        indices = np.random.default_rng((number, seq)).integers(0, STEPS, BATCH).tolist()
        return TrainItem(
            tenant=f"t{number % 50}",
            policy=f"p{number}",
            seq=seq,
            kind="train_step",
            dataset=DatasetSamples(dataset=self.manifest, indices=tuple(indices)),
            feature_scope="shared:demos",
        )

    def alone(self) -> Run:
        """Each policy by itself, in a trainer of its own."""
        run = Run()
        for number in range(self.policies):
            engine = self.engine()
            _send(engine, [self.opening(number)], [])
            self._train(engine, {number: range(1, FEW_OPS + 1)}, run)
            run.early |= self._save(engine, {number: FEW_OPS}, run)
            self._train(engine, {number: range(FEW_OPS + 1, OPS + 1)}, run)
            run.states |= self._save(engine, {number: OPS}, run)
        self._forget(run.early, run.states)
        return run

    def all_resident(self) -> Run:
        """All policies in memory from the first op to the last."""
        run, engine = Run(), self.engine()
        run.resident.append(_resident_mb())
        _send(engine, [self.opening(number) for number in range(self.policies)], [])
        began = time.perf_counter()
        for seq in range(1, OPS + 1):
            for numbers in _parts(range(self.policies)):
                self._train(engine, dict.fromkeys(numbers, (seq,)), run)
        run.seconds = time.perf_counter() - began
        run.resident.append(_resident_mb())
        for numbers in _parts(range(self.policies)):
            run.states |= self._save(engine, dict.fromkeys(numbers, OPS), run)
        self._forget(run.states)
        return run

    def paged(self, quantum: int, ops: int) -> Run:
        """Room for some, a quantum of work for each page-in."""
        run, engine = Run(), self.engine()
        held: OrderedDict[int, int] = OrderedDict()  # in memory: policy and last op
        began = time.perf_counter()
        for first in range(1, ops + 1, quantum):
            for numbers in _parts(range(self.policies)):
                leaving = [held.popitem(last=False) for _ in range(max(0, len(held) + len(numbers) - ROOM))]
                _send(engine, [], [], close=[number for number, _ in leaving])
                openings = [self.opening(number, run.states.get(number, ""), first - 1) for number in numbers]
                began_page = time.perf_counter()
                _send(engine, openings, [])
                if first > 1:
                    run.page_in.append((time.perf_counter() - began_page) / len(numbers))
                self._train(engine, dict.fromkeys(numbers, range(first, first + quantum)), run)
                last = first + quantum - 1
                old = {number: run.states[number] for number in numbers if number in run.states}
                began_page = time.perf_counter()
                run.states |= self._save(engine, dict.fromkeys(numbers, last), run)
                run.page_out.append((time.perf_counter() - began_page) / len(numbers))
                self._forget(old)  # the master keeps the newest page alone
                held.update(dict.fromkeys(numbers, last))
            run.resident.append(_resident_mb())
        run.seconds = time.perf_counter() - began
        self._forget(run.states)
        return run

    def _train(self, engine: TrainerEngine, wanted: Mapping[int, Sequence[int]], run: Run) -> None:
        items = [self.item(number, seq) for number, seqs in wanted.items() for seq in seqs]
        for done in _send(engine, [], items):
            run.curves.setdefault(int(done.policy[1:]), []).append(_loss(done))
            run.slot_bytes = done.slot_bytes

    def _save(self, engine: TrainerEngine, covered: dict[int, int], run: Run) -> dict[int, str]:
        items = [
            TrainItem(tenant=f"t{number % 50}", policy=f"p{number}", seq=seq, kind="checkpoint")
            for number, seq in covered.items()
        ]
        answers = _send(engine, [], items)
        run.page_bytes = answers[0].nbytes
        return {int(done.policy[1:]): done.checkpoint for done in answers}

    def _forget(self, *states: dict[int, str]) -> None:
        """Remove pages: a run that found those of the run before would not wait for the disk."""
        for digest in (digest for each in states for digest in each.values()):
            self.blobs.delete(digest)


def main(argv: Sequence[str] | None = None) -> None:
    options = _report.arguments("many_slots", "A thousand policies on one trainer with room for 32.", argv)
    policies = 48 if options.quick else 1000
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(load_backbone("lite@64", cache_dir=CACHE), Path(folder), policies)
        alone = bench.alone()  # stores all features too
        gc.collect()
        paged = {quantum: bench.paged(quantum, ops) for quantum, ops in QUANTA.items()}
        resident = bench.all_resident()
    per_op = resident.seconds / (policies * OPS)
    _require_equal("all in memory", resident, alone, OPS)
    rows: list[_report.Row] = [
        {
            "table": f"{policies} policies, room for {ROOM}, {TOGETHER} in a group, batches of {BATCH}",
            "in memory": "all",
            "curves equal alone": policies,
            "ops/s": round(1 / per_op, 1),
            "of all in memory": 1.0,
            "resident MB": f"{resident.resident[0]:.0f} to {resident.resident[-1]:.0f}",
        }
    ]
    for quantum, run in paged.items():
        ops = QUANTA[quantum]
        _require_equal(f"quantum {quantum}", run, alone, ops)
        rows.append(
            {
                "table": rows[0]["table"],
                "in memory": ROOM,
                "ops a page-in": quantum,
                "curves equal alone": policies,
                "ops/s": round(policies * ops / run.seconds, 1),
                "of all in memory": round(per_op * policies * ops / run.seconds, 3),
                "page-in ms": _report.spread([1000 * seconds for seconds in run.page_in], 2),
                "page-out ms": _report.spread([1000 * seconds for seconds in run.page_out], 2),
                "page-ins": policies * (ops // quantum - 1),
                "slot bytes": run.slot_bytes,
                "page bytes": run.page_bytes,
                "resident MB": f"{run.resident[0]:.0f} to {run.resident[-1]:.0f}",
            }
        )
    _report.write("many_slots", options, rows)


def _spec(contract: Contract, statistics: Statistics, number: int) -> PolicySpec:
    optimizer = OptimizerSpec(lr=1e-3 * (1 + number % 7))
    return PolicySpec(
        backbone="lite@64", contract=contract, statistics=statistics, optimizer=optimizer, seed=number, chunk=8
    )


def _send(
    engine: TrainerEngine, slots: Sequence[OpenSlot], items: Sequence[TrainItem], close: Sequence[int] = ()
) -> list[TrainDone]:
    leaving = tuple((f"t{number % 50}", f"p{number}") for number in close)
    group = TrainGroup(task="t", attempt=1, slots=tuple(slots), items=tuple(items), close=leaving)
    answers = []
    for answer in engine.run(group):
        if not isinstance(answer, TrainDone) or answer.result.error is not None:
            raise SystemExit(f"an op failed: {answer}")
        answers.append(answer)
    return answers


def _parts(numbers: Sequence[int]) -> list[Sequence[int]]:
    return [numbers[start : start + TOGETHER] for start in range(0, len(numbers), TOGETHER)]


def _loss(done: TrainDone) -> float:
    return done.result.metrics["loss"]


def _require_equal(what: str, run: Run, alone: Run, ops: int) -> None:
    """End with an error if a curve, or a final state, is not bit for bit that of the policy alone."""
    for number, curve in alone.curves.items():
        if run.curves[number] != curve[:ops]:
            raise SystemExit(f"{what}: the curve of policy {number} differs from the one alone")
    if run.states != (alone.states if ops == OPS else alone.early):
        raise SystemExit(f"{what}: a final state differs from the one alone")


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
