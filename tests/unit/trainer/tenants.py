"""Eight tenants as different as they come, and ways to run them: alone, or mixed by dice."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from common.blobs import BlobStore
from joynexus.contract import Camera, Contract, Statistics, VectorStatistics
from joynexus.datasets import DatasetManifest
from joynexus.specs import OptimizerSpec, PolicySpec
from joynexus.vla.backbones.base import Backbone
from joynexus.wire.arrays import ArrayPacker, Buffer
from joynexus.wire.back import OpenSlot, TrainDone, TrainGroup, TrainItem
from joynexus.wire.front import DatasetSamples, Samples
from services.trainer.core import TrainerEngine
from tests.unit.workers import MemoryStore

SIDE = 32
SMALL_GROOT = {"layers": 2, "heads": 2, "width": 16, "future_tokens": 1, "repeated_diffusion_steps": 2}
SMALL_OFT = {"width": 16, "hidden": 32}
_MOMENTS = 24  # different observations in a pool of inline samples


@dataclass
class Op:
    """One op of a member, ready to be sent."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""
    buffers: list[Buffer] = field(default_factory=list)


@dataclass
class Member:
    """A tenant with one policy and all that it will ask for."""

    name: str
    spec: PolicySpec
    ops: list[Op]

    @property
    def key(self) -> tuple[str, str]:
        return f"of-{self.name}", self.name

    def item(self, seq: int, first_buffer: int) -> TrainItem:
        op = self.ops[seq - 1]
        return TrainItem(
            tenant=self.key[0],
            policy=self.key[1],
            seq=seq,
            kind=op.kind,  # type: ignore[arg-type]  # one of its literals
            samples=op.body,
            first_buffer=first_buffer,
            buffers=len(op.buffers),
            feature_scope=f"tenant:{self.key[0]}",
            **op.fields,
        )

    def opening(self, checkpoint: str = "", applied_seq: int = 0) -> OpenSlot:
        return OpenSlot(
            tenant=self.key[0], policy=self.key[1], spec=self.spec, checkpoint=checkpoint, applied_seq=applied_seq
        )


def contract(cameras: int, state_dim: int, action_dim: int) -> Contract:
    views = tuple(Camera(name=f"view{number}", height=SIDE, width=SIDE) for number in range(cameras))
    return Contract(robot="arm", cameras=views, state_dim=state_dim, action_dim=action_dim)


def statistics(made_for: Contract) -> Statistics:
    def numbers(size: int) -> VectorStatistics:
        low, high = tuple(-1.0 - i for i in range(size)), tuple(1.0 + i for i in range(size))
        return VectorStatistics(
            mean=tuple(0.1 * i for i in range(size)), std=high, min=low, max=high, q01=low, q99=high
        )

    return Statistics(count=100, state=numbers(made_for.state_dim), action=numbers(made_for.action_dim))


class Inline:
    """A tenant's own arrays, drawn from a pool of moments, so that features are met again."""

    def __init__(self, made_for: Contract, seed: int, chunk: int, texts: Sequence[str]) -> None:
        dice = np.random.default_rng(seed)
        self.dice, self.chunk, self.contract = dice, chunk, made_for
        shape = (_MOMENTS, SIDE, SIDE, 3)
        self.images = [dice.integers(0, 256, shape, dtype=np.uint8) for _ in made_for.cameras]
        self.texts = [texts[number % len(texts)] for number in range(_MOMENTS)]

    def op(self, kind: str, rows: int) -> Op:
        dice, packer = self.dice, ArrayPacker()
        moments = dice.integers(0, _MOMENTS, rows)
        mask = np.ones((rows, self.chunk), np.bool_)
        mask[0, 1 + int(dice.integers(0, self.chunk)) :] = False
        samples = Samples(
            state=packer.add(dice.standard_normal((rows, self.contract.state_dim), dtype=np.float32)),
            action=packer.add(dice.standard_normal((rows, self.chunk, self.contract.action_dim), dtype=np.float32)),
            action_mask=packer.add(mask),
            images=tuple(packer.add(images[moments]) for images in self.images),
            instructions=tuple(self.texts[moment] for moment in moments),
        )
        return Op(kind, body=msgspec.msgpack.encode(samples), buffers=packer.buffers)


class Recorded:
    """Steps of a prepared data set."""

    def __init__(self, manifest: DatasetManifest, blobs: BlobStore, seed: int) -> None:
        self.manifest, self.seed = manifest, seed
        self.digest = blobs.put_bytes(msgspec.msgpack.encode(manifest))
        self.steps = sum(episode.length for episode in manifest.episodes)

    def op(self, kind: str, rows: int) -> Op:
        self.seed += 1
        indices = np.random.default_rng(self.seed).integers(0, self.steps, rows)
        return Op(kind, {"dataset": DatasetSamples(dataset=self.digest, indices=tuple(indices.tolist()))})


Source = Inline | Recorded


def train(source: Source, rows: int, steps: int, *, parts: int = 0) -> list[Op]:
    """Steps of a job, or of a tenant's own loop with so many parts a step."""
    if not parts:
        return [source.op("train_step", rows) for _ in range(steps)]
    return [
        op
        for _ in range(steps)
        for op in (*(source.op("forward_backward", rows) for _ in range(parts)), Op("optim_step"))
    ]


def eight_members(lerobot: DatasetManifest, metaworld: DatasetManifest, blobs: BlobStore, steps: int) -> list[Member]:
    """Heads, adapters, chunks, batches, cameras, instructions, data and optimizers all differ."""

    def recorded(name: str, manifest: DatasetManifest, rows: int, **choices: Any) -> Member:
        spec = PolicySpec(
            backbone="any", contract=manifest.contract, statistics=manifest.statistics, seed=len(name), **choices
        )
        return Member(name, spec, train(Recorded(manifest, blobs, len(name) * 1000), rows, steps))

    def inline(
        name: str, made_for: Contract, texts: Sequence[str], rows: int, parts: int = 0, **choices: Any
    ) -> Member:
        spec = PolicySpec(backbone="any", contract=made_for, statistics=statistics(made_for), seed=7, **choices)
        return Member(name, spec, train(Inline(made_for, len(name), spec.chunk, texts), rows, steps, parts=parts))

    groot, oft = {"head": "groot", "head_config": SMALL_GROOT}, {"head": "oft", "head_config": SMALL_OFT}
    narrow = {"adapter": "bottleneck", "adapter_config": {"width": 4}}
    plain = OptimizerSpec(lr=1e-2, grad_clip=0.0)
    bent = OptimizerSpec(lr=3e-3, warmup_steps=10, decay_steps=75, betas=(0.8, 0.99))
    return [
        recorded("lerobot-oft", lerobot, 4, chunk=8, **oft),
        recorded("lerobot-groot", lerobot, 3, chunk=4, optimizer=bent, **groot),
        recorded("metaworld-oft", metaworld, 8, chunk=5, normalization="quantile", optimizer=bent, **oft, **narrow),
        recorded("metaworld-groot", metaworld, 2, chunk=10, **groot, **narrow),
        inline("two-views", contract(2, 5, 3), ["push", "pull the red lever slowly"], 1, parts=2, chunk=3, **oft),
        inline("no-view", contract(0, 3, 2), ["wave", "bow to the left", "sit"], 16, chunk=2, optimizer=plain, **oft),
        inline("one-row", contract(1, 4, 7), ["open the drawer"], 1, chunk=1, **groot),
        inline("no-state", contract(1, 0, 2), ["lift", "drop"], 5, chunk=6, optimizer=plain, **oft, **narrow),
    ]


@dataclass
class Outcome:
    """What a member's training gave: results by op, and the digest of the final state."""

    results: dict[int, TrainDone]
    state: str

    def numbers(self) -> list[tuple[int, dict[str, float]]]:
        return [(seq, self.results[seq].result.metrics) for seq in sorted(self.results)]


class Room:
    """A trainer engine that members train in."""

    def __init__(self, backbone: Backbone, blobs: BlobStore, scratch: Path, *, keep_features: bool = True) -> None:
        self.backbone = backbone
        store = MemoryStore() if keep_features else None
        put: Callable[[Path], tuple[str, int]] = lambda path: blobs.put_file(path, move=True)  # noqa: E731 - typed
        self.engine = TrainerEngine(backbone, store, blobs.path, put, scratch=scratch)
        self.groups = 0

    def send(self, group: TrainGroup, buffers: Sequence[Buffer] = ()) -> list[TrainDone]:
        answers = list(self.engine.run(group, buffers))
        self.groups += 1
        for answer in answers:
            assert isinstance(answer, TrainDone), answer
            assert answer.result.error is None, answer
        return [answer for answer in answers if isinstance(answer, TrainDone)]

    def alone(self, member: Member) -> Outcome:
        """Train a member by itself, an op a group."""
        results = {}
        for seq in range(1, len(member.ops) + 1):
            slots = (member.opening(),) if seq == 1 else ()
            group = TrainGroup(task="t", attempt=1, slots=slots, items=(member.item(seq, 0),))
            (results[seq],) = self.send(group, member.ops[seq - 1].buffers)
        return Outcome(results, self.save(member, len(member.ops)))

    def together(self, members: Sequence[Member], seed: int, *, page: float = 0.0) -> dict[str, Outcome]:
        """Train members in groups of random composition and order; `page` is how often one leaves memory between."""
        dice = random.Random(seed)
        sent = dict.fromkeys((member.name for member in members), 0)
        results: dict[str, dict[int, TrainDone]] = {member.name: {} for member in members}
        opened: set[str] = set()
        openings = {member.name: member.opening() for member in members}
        while any(sent[member.name] < len(member.ops) for member in members):
            slots, buffers, lanes = [], list[Buffer](), []
            for member in dice.sample(members, dice.randint(1, len(members))):
                count = min(dice.randint(1, 3), len(member.ops) - sent[member.name])
                if count and member.name not in opened:
                    slots.append(openings[member.name])
                    opened.add(member.name)
                lane = []
                for _ in range(count):
                    sent[member.name] += 1
                    lane.append(member.item(sent[member.name], len(buffers)))
                    buffers += member.ops[sent[member.name] - 1].buffers
                lanes.append(lane)
            items = []
            while any(lanes):
                items.append(dice.choice([lane for lane in lanes if lane]).pop(0))
            for done in self.send(TrainGroup(task="t", attempt=1, slots=tuple(slots), items=tuple(items)), buffers):
                results[done.policy][done.seq] = done
            for member in members:
                between = sent[member.name] and member.ops[sent[member.name] - 1].kind != "forward_backward"
                if member.name in opened and between and dice.random() < page:
                    openings[member.name] = self.page_out(member, sent[member.name])
                    opened.remove(member.name)
        closed = [openings[member.name] for member in members if member.name not in opened]
        self.send(TrainGroup(task="t", attempt=1, slots=tuple(closed)))
        return {m.name: Outcome(results[m.name], self.save(m, len(m.ops))) for m in members}

    def page_out(self, member: Member, seq: int) -> OpenSlot:
        """Save a member, take it from memory, and return how to bring it back."""
        digest = self.save(member, seq)
        self.send(TrainGroup(task="t", attempt=1, close=(member.key,)))
        return member.opening(digest, seq)

    def save(self, member: Member, seq: int) -> str:
        item = TrainItem(tenant=member.key[0], policy=member.key[1], seq=seq, kind="checkpoint")
        (done,) = self.send(TrainGroup(task="t", attempt=1, items=(item,)))
        return done.checkpoint
