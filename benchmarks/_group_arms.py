"""Three ways to do one training step of several tenants, on the trainer's own engine.

In: a backbone, a head, tenants and a local batch. Out: seconds of a step and of the backbone forwards in it, and what
the step answered. Never: a feature store: every step runs the backbone, as a first epoch does; nor a step whose message
is made while the clock runs.

`grouped` is one group with all tenants in one packed forward, `serial` a group a tenant, `chosen` one group that the
backbone cuts as it has measured. Each way has its own engine with policies of the same seeds, so their answers must be
equal bit for bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from common.blobs import BlobStore
from joynexus.contract import Camera, Contract, Statistics, VectorStatistics
from joynexus.specs import PolicySpec
from joynexus.vla.backbones import Backbone
from joynexus.vla.busy import BusyClock
from joynexus.vla.feature import LAST, Observation, VLAFeature
from joynexus.vla.grouping import Grouping
from joynexus.wire.arrays import ArrayPacker, Buffer
from joynexus.wire.back import OpenSlot, TrainDone, TrainGroup, TrainItem
from joynexus.wire.front import Samples
from services.trainer.core import TrainerEngine

ARMS = ("grouped", "serial", "chosen")
STATE, ACTION, CHUNK = 8, 7, 8
INSTRUCTION = "push the red button"


@dataclass
class Step:
    """What one step took and gave.

    Attributes:
        step_s: busy seconds of the whole step of all tenants.
        forward_s: those of them that the backbone took.
        answers: loss and gradient norm of each tenant.
    """

    step_s: float
    forward_s: float
    answers: list[tuple[float, float]]


class ForwardTimer:
    """Stands before a backbone's `forward` and adds up the time it takes."""

    def __init__(self, backbone: Backbone) -> None:
        self.seconds = 0.0
        self._backbone = backbone
        self._forward = backbone.forward
        self._clock = BusyClock(backbone.device)
        backbone.forward = self  # type: ignore[method-assign]  # only what is timed is put in between

    def __call__(self, observations: Sequence[Observation], layers: Collection[int] = (LAST,)) -> list[VLAFeature]:
        """Run the forward."""
        elapsed = self._clock.start()
        features = self._forward(observations, layers)
        self.seconds += elapsed()
        return features

    def close(self) -> None:
        """Go out of the way."""
        del self._backbone.forward


class Cell:
    """One head, one number of tenants, one local batch.

    Args:
        backbone: shared by all ways; its own measured grouping is what `chosen` uses.
        timer: stands before its forward.
        head: of every tenant.
        head_config: its sizes.
        tenants: how many.
        batch: samples of each.
        side: of the pictures, in pixels.
    """

    def __init__(
        self,
        backbone: Backbone,
        timer: ForwardTimer,
        head: str,
        head_config: Mapping[str, int | float | str | bool],
        *,
        tenants: int,
        batch: int,
        side: int,
    ) -> None:
        self._backbone, self._timer = backbone, timer
        self._measured = backbone.grouping
        self._clock = BusyClock(backbone.device)
        self._folder = tempfile.TemporaryDirectory()
        self._seq = 0
        specs = [_spec(backbone.name, head, head_config, side, seed) for seed in range(tenants)]
        self._packed = [_samples(seed, batch, side) for seed in range(tenants)]
        self._engines = {arm: self._engine(arm, specs, tenants * batch) for arm in ARMS}
        observation = Observation((np.zeros((side, side, 3), np.uint8),), INSTRUCTION)
        self.lengths = [backbone.tokens(observation)] * (tenants * batch)

    @property
    def cut(self) -> list[int]:
        """Samples in each forward, as the backbone chooses."""
        return self._measured.cut(self.lengths) if self._measured else [len(self.lengths)]

    def step(self, arm: str) -> Step:
        """Do the next step in one of the ways; all ways must do the same number of steps."""
        self._backbone.grouping = self._measured if arm == "chosen" else None
        seq = self._seq + 1
        groups = [self._group(seq, range(len(self._packed)))]
        if arm == "serial":
            groups = [self._group(seq, [tenant]) for tenant in range(len(self._packed))]
        before, elapsed = self._timer.seconds, self._clock.start()
        answers = [answer for group, buffers in groups for answer in self._engines[arm].run(group, buffers)]
        step_s = elapsed()
        self._backbone.grouping = self._measured
        return Step(step_s, self._timer.seconds - before, [_numbers(answer) for answer in answers])

    def next(self) -> None:
        """Go on to the next step."""
        self._seq += 1

    def close(self) -> None:
        """Remove what lies on disk."""
        self._folder.cleanup()

    def _engine(self, arm: str, specs: Sequence[PolicySpec], rows: int) -> TrainerEngine:
        folder = Path(self._folder.name) / arm
        blobs = BlobStore(folder / "blobs")
        engine = TrainerEngine(
            self._backbone,
            None,
            blobs.path,
            lambda path: blobs.put_file(path, move=True),
            scratch=folder / "scratch",
            max_rows=rows,
        )
        slots = tuple(OpenSlot(tenant=f"t{n}", policy="p", spec=spec) for n, spec in enumerate(specs))
        for answer in engine.run(TrainGroup(task="open", attempt=1, slots=slots)):
            raise RuntimeError(f"a policy could not be opened: {answer}")
        return engine

    def _group(self, seq: int, tenants: Sequence[int]) -> tuple[TrainGroup, list[Buffer]]:
        items: list[TrainItem] = []
        buffers: list[Buffer] = []
        for tenant in tenants:
            body, mine = self._packed[tenant]
            name = f"t{tenant}"
            items.append(
                TrainItem(
                    tenant=name, policy="p", seq=seq, kind="train_step", samples=body, first_buffer=len(buffers),
                    buffers=len(mine), feature_scope=f"tenant:{name}",
                )
            )  # fmt: skip
            buffers += mine
        return TrainGroup(task=f"{seq}", attempt=1, items=tuple(items)), buffers


def calibrated(backbone: Backbone) -> Grouping | None:
    """Let a backbone measure, as a role does when it starts; return what it found."""
    backbone.calibrate()
    return backbone.grouping


def _numbers(answer: object) -> tuple[float, float]:
    if not isinstance(answer, TrainDone) or answer.result.error is not None:
        raise RuntimeError(f"a step failed: {answer}")
    return answer.result.metrics["loss"], answer.result.metrics["grad_norm"]


def _samples(seed: int, rows: int, side: int) -> tuple[bytes, list[Buffer]]:
    random, packer = np.random.default_rng(seed), ArrayPacker()
    samples = Samples(
        state=packer.add(random.standard_normal((rows, STATE), dtype=np.float32)),
        action=packer.add(random.standard_normal((rows, CHUNK, ACTION), dtype=np.float32)),
        action_mask=packer.add(np.ones((rows, CHUNK), np.bool_)),
        images=(packer.add(random.integers(0, 256, (rows, side, side, 3), dtype=np.uint8)),),
        instructions=(INSTRUCTION,) * rows,
    )
    return msgspec.msgpack.encode(samples), packer.buffers


def _spec(backbone: str, head: str, config: Mapping[str, int | float | str | bool], side: int, seed: int) -> PolicySpec:
    return PolicySpec(
        backbone=backbone,
        head=head,
        head_config=dict(config),
        chunk=CHUNK,
        contract=Contract(
            robot="random",
            cameras=(Camera(name="view", height=side, width=side),),
            state_dim=STATE,
            action_dim=ACTION,
        ),
        statistics=Statistics(count=100, state=_vector(STATE), action=_vector(ACTION)),
        seed=seed,
    )


def _vector(size: int) -> VectorStatistics:
    ones = (1.0,) * size
    low = (-1.0,) * size
    return VectorStatistics(mean=(0.0,) * size, std=ones, min=low, max=ones, q01=low, q99=ones)
