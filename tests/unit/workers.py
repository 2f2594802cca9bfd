"""What the tests of trainer and inference share: a backbone of noise, a small data set, messages made by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import blake3
import msgspec
import numpy as np
import torch
from safetensors.numpy import save

from common.blobs import BlobStore
from joynexus.contract import Camera, Contract, Statistics, VectorStatistics
from joynexus.datasets import DatasetManifest, EpisodeEntry
from joynexus.specs import OptimizerSpec, PolicySpec
from joynexus.vla import numerics
from joynexus.vla.backbones.base import Backbone
from joynexus.vla.feature import IMAGE, LAST, TEXT, Observation, VLAFeature
from joynexus.wire.arrays import ArrayPacker, Buffer
from joynexus.wire.back import OpenSlot, SlotFailed, TrainDone, TrainGroup, TrainItem
from joynexus.wire.front import DatasetSamples, Samples
from services.trainer.core import TrainerEngine
from services.trainer.group import Answer

numerics.configure(1)

SIDE = 8
CHUNK = 3
WRECK = "wreck"
"""An instruction at which `NoiseBackbone` fails."""


class NoiseBackbone(Backbone):
    """Features are noise seeded by the observation: four tokens a picture, one a word; each hidden state differs.

    Attributes:
        groups: samples in each forward.
        unions: hidden states asked for in each forward.
        faults: exceptions that the next forwards raise, whatever they are given.
    """

    kernel = "noise"

    def __init__(self) -> None:
        super().__init__(
            name="noise", digest="ab" * 16, hidden_size=16, device=torch.device("cpu"), dtype=torch.float32
        )
        self.groups: list[int] = []
        self.unions: list[tuple[int, ...]] = []
        self.faults: list[Exception] = []

    def check_layers(self, layers: Collection[int]) -> None:
        if not set(layers) <= {LAST, 0, 1, 2}:
            raise ValueError(f"the noise backbone has hidden states -1 to 2, not {sorted(layers)}")

    def tokens(self, observation: Observation) -> int:
        return 4 * len(observation.images) + 1 + len(observation.instruction.split())

    def _forward(self, observations: Sequence[Observation], layers: tuple[int, ...]) -> list[VLAFeature]:
        self.groups.append(len(observations))
        self.unions.append(layers)
        if self.faults:
            raise self.faults.pop(0)
        if any(WRECK in observation.instruction for observation in observations):
            raise RuntimeError("the noise backbone was wrecked")
        return [self._one(observation, layers) for observation in observations]

    def _one(self, observation: Observation, layers: tuple[int, ...]) -> VLAFeature:
        content = b"".join(image.tobytes() for image in observation.images) + observation.instruction.encode()
        seed = int.from_bytes(blake3.blake3(content).digest()[:8], "little")
        kinds = [IMAGE] * 4 * len(observation.images) + [TEXT] * (1 + len(observation.instruction.split()))
        tokens = np.random.default_rng(seed).standard_normal((len(kinds), self.hidden_size), dtype=np.float32)
        return VLAFeature(
            layers={layer: torch.from_numpy(tokens) * (1 if layer == LAST else 2 + layer) for layer in layers},
            token_type=torch.tensor(kinds, dtype=torch.uint8),
            backbone=self.digest,
        )


class MemoryStore:
    """A feature store without a disk."""

    def __init__(self) -> None:
        self.held: dict[str, VLAFeature] = {}

    def get(self, key: str, layers: Sequence[int]) -> VLAFeature | None:
        feature = self.held.get(key)
        return feature if feature is not None and feature.layers.keys() >= set(layers) else None

    def put(self, key: str, feature: VLAFeature) -> None:
        self.held[key] = feature


def vector(size: int) -> VectorStatistics:
    zeros, ones = (0.0,) * size, (1.0,) * size
    return VectorStatistics(mean=zeros, std=ones, min=zeros, max=ones, q01=zeros, q99=ones)


def contract(cameras: int = 1) -> Contract:
    return Contract(
        robot="arm",
        cameras=tuple(Camera(name=f"view{number}", height=SIDE, width=SIDE) for number in range(cameras)),
        state_dim=4,
        action_dim=2,
        state_names=("x", "y", "z", "grip"),
        action_names=("dx", "dy"),
    )


def spec(*, seed: int = 0, cameras: int = 1, lr: float = 1e-2) -> PolicySpec:
    return PolicySpec(
        backbone="noise",
        head_config={"width": 16, "hidden": 32},
        chunk=CHUNK,
        contract=contract(cameras),
        statistics=Statistics(count=10, state=vector(4), action=vector(2)),
        optimizer=OptimizerSpec(lr=lr, warmup_steps=2),
        seed=seed,
    )


class Arrays:
    """Samples as a tenant makes them; change what you like before they are packed."""

    def __init__(self, seed: int, rows: int = 4, cameras: int = 1) -> None:
        random = np.random.default_rng(seed)
        self.state = random.standard_normal((rows, 4)).astype(np.float32)
        self.action = random.standard_normal((rows, CHUNK, 2)).astype(np.float32)
        self.mask = np.ones((rows, CHUNK), np.bool_)
        self.mask[0, -1] = False
        self.images = [random.integers(0, 256, (rows, SIDE, SIDE, 3), dtype=np.uint8) for _ in range(cameras)]
        self.instructions = [f"do task {seed}" for _ in range(rows)]

    def pack(self) -> tuple[bytes, list[Buffer]]:
        packer = ArrayPacker()
        samples = Samples(
            state=packer.add(self.state),
            action=packer.add(self.action),
            action_mask=packer.add(self.mask),
            images=tuple(packer.add(image) for image in self.images),
            instructions=tuple(self.instructions),
        )
        return msgspec.msgpack.encode(samples), packer.buffers

    def observations(self) -> list[Observation]:
        return [
            Observation(tuple(image[row] for image in self.images), self.instructions[row])
            for row in range(len(self.state))
        ]


class Group:
    """Builds one `TrainGroup` with its buffers."""

    def __init__(self, *openings: OpenSlot) -> None:
        self.openings = list(openings)
        self.items: list[TrainItem] = []
        self.buffers: list[Buffer] = []

    def op(self, policy: str, seq: int, kind: str, *, tenant: str = "", **fields: object) -> Group:
        name = tenant or f"of-{policy}"
        fields.setdefault("feature_scope", f"tenant:{name}")
        item = TrainItem(tenant=name, policy=policy, seq=seq, kind=kind, **fields)  # type: ignore[arg-type]
        self.items.append(item)
        return self

    def train(self, policy: str, seq: int, arrays: Arrays, kind: str = "train_step", **fields: object) -> Group:
        body, buffers = arrays.pack()
        first = len(self.buffers)
        self.buffers += buffers
        return self.op(policy, seq, kind, samples=body, first_buffer=first, buffers=len(buffers), **fields)

    def steps(self, policy: str, seq: int, indices: Iterable[int], manifest: str, **fields: object) -> Group:
        return self.op(
            policy, seq, "train_step", dataset=DatasetSamples(dataset=manifest, indices=tuple(indices)), **fields
        )

    def message(self, task: str = "t1") -> TrainGroup:
        return TrainGroup(task=task, attempt=1, slots=tuple(self.openings), items=tuple(self.items))


def opening(
    policy: str, made_of: PolicySpec | None = None, checkpoint: str = "", applied_seq: int = 0, life: str = ""
) -> OpenSlot:
    return OpenSlot(
        tenant=f"of-{policy}",
        policy=policy,
        spec=made_of or spec(),
        checkpoint=checkpoint,
        applied_seq=applied_seq,
        life=life,
    )


class Bench:
    """A trainer engine on a folder; `fresh()` is the same after a kill."""

    def __init__(self, folder: Path, *, keep_features: bool = True) -> None:
        self.folder = folder
        self.blobs = BlobStore(folder / "blobs")
        self.open_blob: Callable[[str], Path] = self.blobs.path
        self.put_blob: Callable[[Path], tuple[str, int]] = lambda path: self.blobs.put_file(path, move=True)
        self.features = MemoryStore() if keep_features else None
        self.fresh()

    def fresh(self) -> None:
        self.backbone = NoiseBackbone()
        self.engine = TrainerEngine(
            self.backbone,
            self.features,
            lambda digest: self.open_blob(digest),
            lambda path: self.put_blob(path),
            scratch=self.folder / "scratch",
        )

    def run(self, group: Group) -> list[Answer]:
        return list(self.engine.run(group.message(), group.buffers))

    def done(self, group: Group) -> list[TrainDone]:
        """Run a group in which every op must succeed."""
        answers = self.run(group)
        for answer in answers:
            assert not isinstance(answer, SlotFailed), answer
            assert answer.result.error is None, answer
        return [answer for answer in answers if isinstance(answer, TrainDone)]

    def one(self, group: Group) -> TrainDone:
        """Run a group of one op, which may be answered with an error."""
        (answer,) = self.run(group)
        assert isinstance(answer, TrainDone), answer
        return answer


def small_dataset(blobs: BlobStore, *, lengths: Sequence[int] = (9, 7), cameras: int = 1) -> str:
    """Store a prepared data set of random numbers; return the digest of its manifest."""
    random = np.random.default_rng(7)
    entries = []
    for number, length in enumerate(lengths):
        tensors = {
            "state": random.standard_normal((length, 4)).astype(np.float32),
            "action": random.standard_normal((length, 2)).astype(np.float32),
            "timestamp": np.arange(length) / 10,
        }
        for camera in contract(cameras).cameras:
            tensors[f"image.{camera.name}"] = random.integers(0, 256, (length, SIDE, SIDE, 3), dtype=np.uint8)
        blob = save(tensors)
        digest = blobs.put_bytes(blob)
        entries.append(EpisodeEntry(length=length, instruction=f"task {number}", blob=digest, nbytes=len(blob)))
    manifest = DatasetManifest(
        source_format="lerobot-v3.0",
        source_digest="0" * 32,
        fps=10.0,
        contract=contract(cameras),
        statistics=Statistics(count=sum(lengths), state=vector(4), action=vector(2)),
        episodes=tuple(entries),
    )
    return blobs.put_bytes(msgspec.msgpack.encode(manifest))
