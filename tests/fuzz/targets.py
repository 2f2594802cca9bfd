"""Everything that reads bytes which somebody outside may have written, each as one function of some byte strings.

In: byte strings (frames of a message, parts of a payload, a file). Out: nothing. Never: an error of another kind than
the reader declares; whoever calls takes that for a finding.

Readers are the real ones, called as the services call them. What they need beside the bytes (a contract, a folder) is
made once, by `prepare`.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import blake3
import msgspec
import numpy as np
from safetensors.numpy import save

from common.blobs import BlobStore
from common.journal import records
from common.journal.journal import Journal
from common.journal.rows import Reader, seal, write
from common.prepared import training_indices
from joynexus.contract import Camera, Contract, struct_digest
from joynexus.datasets import DatasetManifest, EpisodeEntry
from joynexus.keys import ClusterFile, KeyEntry, KeyPair, KeyRegistry, KeyScope
from joynexus.simulation import protocol, trajectories
from joynexus.specs import PolicySpec
from joynexus.tenants import TenantLimitsFile
from joynexus.unreadable import UNREADABLE
from joynexus.vla import version_file
from joynexus.vla.feature import Observation
from joynexus.vla.learner import Learner
from joynexus.vla.policy import Policy
from joynexus.wire import Array, ArrayPacker, WireError, decode, encode, join, kind_of, rebuild, split
from joynexus.wire.back import PredictItem, TrainItem
from joynexus.wire.errors import JoyNexusError
from joynexus.wire.front import Act, DatasetSamples, Samples
from joynexus.wire.messages import KINDS
from services.env.datasets import reader
from services.inference import core as inference
from services.master.events import Peer
from services.master.gate import Refused, admit
from services.master.sources import ShellSources
from services.trainer.blobs import Blobs, Unreachable
from services.trainer.checkpoint import CheckpointMeta, read_checkpoint, write_checkpoint
from services.trainer.samples import SampleReader
from tests.fuzz.core import play
from tests.fuzz.decoder import MEMORY_BYTES
from tests.unit.env import sets, test_trajectories
from tests.unit.vla.samples import DIGEST, HIDDEN, contract, policy_spec, statistics
from tests.wire.samples import golden, make, sample

Parts = Sequence[bytes]

CONTRACT: Contract = contract(cameras=(Camera(name="front", height=4, width=4),))
SPEC: PolicySpec = policy_spec(contract=CONTRACT)


@dataclass(frozen=True)
class Target:
    """A reader.

    Attributes:
        read: gives it the byte strings.
        declared: errors that it may raise.
        seeds: byte strings that it can read, to start from.
    """

    read: Callable[[Parts], object]
    declared: tuple[type[Exception], ...]
    seeds: Callable[[], list[Parts]]


@functools.cache
def prepare(folder: Path) -> None:
    """Name the folder in which readers of files find them, one process's own; made once."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)


def _file(data: bytes, name: str = "file") -> Path:
    path = Path(name)
    path.write_bytes(data)
    return path


# A message, from a socket to the core's door


_SCOPES: tuple[KeyScope, ...] = ("all", "act", "read")
_TENANTS = tuple(KeyEntry(name="k", public="", domain="tenant", tenant="a", scope=scope) for scope in _SCOPES)
_WORKERS = tuple(
    KeyEntry(name="w", public="", domain="worker", roles=(role,)) for role in ("trainer", "inference", "env", "health")
)


def _message(frames: Parts) -> None:
    """What the client reads, and what the gate lets in; arrays in it are rebuilt and the message written again."""
    for door in ("front", "front_bulk", "back", "back_bulk"):
        for entry in (_TENANTS if door.startswith("front") else _WORKERS)[:: 1 if len(frames) < 20 else 3]:
            event = admit(Peer(cast(Any, door), b"p"), frames, entry)
            if isinstance(event, Refused):
                encode(event.failure, id="x", re=event.re)
    packet = decode(frames)
    encode(packet.message, id=packet.header.id, re=packet.header.re, buffers=packet.buffers)
    for array in _arrays(packet.message):
        rebuild(array, packet.buffers)


def _arrays(value: object) -> list[Array]:
    if isinstance(value, Array):
        return [value]
    if isinstance(value, msgspec.Struct):
        return [array for name in value.__struct_fields__ for array in _arrays(getattr(value, name))]
    return [array for item in value for array in _arrays(item)] if isinstance(value, tuple) else []


def _messages() -> list[Parts]:
    return [
        [bytes(frame) for frame in encode(sample(kind), id="i", deadline_ms=1, buffers=(b"abc", b""))] for kind in KINDS
    ] + [[b"JNX1", msgspec.msgpack.encode({"kind": kind, "id": "i"}), path.read_bytes()]
         for kind in KINDS for path in golden(kind)[:-1]]  # fmt: skip


# What ops and requests to act carry


def _blobs(*named: Path) -> Blobs:
    """A blob store in which every digest is there: the first is `0…`, the rest are the last path."""
    return Blobs(lambda digest: named[0] if digest == "0" * 64 else named[-1], lambda path: ("", 0), Path("scratch"))


def _key(scope: str, observation: Observation) -> str:
    return scope + "".join(str(image.shape) for image in observation.images) + observation.instruction


def _samples(parts: Parts) -> str:
    """Inline samples, and a payload blob."""
    body, *buffers = parts or [b""]
    samples = SampleReader(_blobs(_file(join(parts))), _key)
    item = TrainItem(tenant="a", policy="p", seq=1, kind="forward_backward")
    inline = msgspec.structs.replace(item, samples=body, buffers=len(buffers))
    blob = msgspec.structs.replace(item, payload="0" * 64)
    return _refusals((partial(samples.read, asked, buffers, SPEC) for asked in (inline, blob)), JoyNexusError)


def _some_samples() -> list[Parts]:
    rng, packer = np.random.default_rng(0), ArrayPacker()
    samples = Samples(
        state=packer.add(rng.random((2, CONTRACT.state_dim), np.float32)),
        action=packer.add(rng.random((2, SPEC.chunk, CONTRACT.action_dim), np.float32)),
        action_mask=packer.add(np.ones((2, SPEC.chunk), bool)),
        images=(packer.add(np.zeros((2, 4, 4, 3), np.uint8)),),
        instructions=("go", "stop"),
    )
    return [[msgspec.msgpack.encode(samples), *map(bytes, packer.buffers)]]


def _act(parts: Parts) -> None:
    body, *buffers = parts or [b""]
    served = SimpleNamespace(version=1, policy=SimpleNamespace(spec=SPEC, actor_critic=None))
    item = PredictItem(request="r", tenant="a", policy="p", version=1, digest="", act=body, first_buffer=0,
                       buffers=len(buffers), feature_scope="")  # fmt: skip
    inference._read(item, buffers, cast(Any, served))


def _some_acts() -> list[Parts]:
    packer = ArrayPacker()
    act = Act(
        policy="p",
        state=packer.add(np.zeros((1, CONTRACT.state_dim), np.float32)),
        images=(packer.add(np.zeros((1, 4, 4, 3), np.uint8)),),
        instructions=("go",),
        seeds=(1,),
    )
    return [[msgspec.msgpack.encode(act), *map(bytes, packer.buffers)]]


def _joined(parts: Parts) -> None:
    split(b"".join(parts))


def _rollout(parts: Parts) -> None:
    trajectories.concatenate([trajectories.unpack(join(parts))] * 2)


def _some_rollouts() -> list[Parts]:
    made = [test_trajectories.make(), test_trajectories.make((1,), chunk=1, values=0, cameras=0)]
    return [[bytes(part) for part in split(trajectories.pack(each))] for each in made]


# Files of weights


def _version(parts: Parts) -> None:
    version_file.read_version(b"".join(parts))


def _weights(parts: Parts) -> None:
    version_file.read_weights(_file(b"".join(parts)), _policy())


@functools.cache
def _policy() -> Policy:
    return Policy(SPEC, DIGEST, HIDDEN)


def _some_versions() -> list[Parts]:
    version_file.write_version(Path("version"), _policy(), 3, numerics_class="n")
    return [[Path("version").read_bytes()]]


def _checkpoint(parts: Parts) -> None:
    path = _file(b"".join(parts))
    tensors, meta = read_checkpoint(path, blake3.blake3(path.read_bytes()).hexdigest())
    Learner(Policy(SPEC, DIGEST, HIDDEN)).load(tensors, meta.learner)


def _some_checkpoints() -> list[Parts]:
    tensors, learner = Learner(_policy()).state()
    meta = CheckpointMeta(tenant="a", policy="p", spec=struct_digest(SPEC), backbone="b", applied_seq=3, step=0,
                          learner=learner)  # fmt: skip
    write_checkpoint(Path("checkpoint"), tensors, meta)
    return [[Path("checkpoint").read_bytes()]]


# Prepared data sets


def _dataset(parts: Parts) -> None:
    """A manifest, as master and trainer read it, and the blob of an episode."""
    manifest, episode = ([*parts, b"", b""])[:2]
    paths = _file(manifest, "manifest"), _file(episode, "episode")
    samples = SampleReader(_blobs(*paths), _key)
    wanted = DatasetSamples(dataset="0" * 64, indices=(0, 3, 1))
    item = TrainItem(tenant="a", policy="p", seq=1, kind="train_step", dataset=wanted, feature_scope="s")
    store = cast(BlobStore, SimpleNamespace(path=lambda digest: paths[0]))
    with suppress(ValueError):
        found = ShellSources(cast(Journal, None), store).manifest(blake3.blake3(manifest).hexdigest())
        training_indices(found, 1)
    samples.read(item, (), SPEC)


def _some_datasets() -> list[Parts]:
    length, zeros = 4, np.zeros
    blob = save(
        {
            "state": zeros((length, CONTRACT.state_dim), np.float32),
            "action": zeros((length, CONTRACT.action_dim), np.float32),
            "timestamp": zeros(length),
            "image.front": zeros((length, 4, 4, 3), np.uint8),
        }
    )
    manifest = DatasetManifest(
        source_format="lerobot-v3.0",
        source_digest="s",
        fps=10.0,
        contract=CONTRACT,
        statistics=statistics(),
        episodes=(EpisodeEntry(length=length, instruction="go", blob="b" * 64, nbytes=len(blob)),) * 2,
    )
    return [[msgspec.msgpack.encode(manifest), blob]]


# What tenants push


_SET = ("meta/info.json", "meta/episodes.jsonl", "meta/tasks.jsonl")
"""Only what Python reads: a table can crash the library that reads it, which is why a reader has its own process."""


class _Parent:
    """Of a reader: takes its episodes."""

    def alive(self) -> None:
        pass

    @contextmanager
    def new_file(self) -> Iterator[Path]:
        yield Path("episode-of-the-set")

    def put_file(self, path: Path, *, move: bool = False) -> tuple[str, int]:
        return "e" * 64, path.stat().st_size


def _pushed(parts: Parts) -> str:
    folder = _made_set()
    for name, content in zip(_SET, [*parts, b"", b"", b""], strict=False):
        (folder / name).write_bytes(content)
    job = reader.Job(str(folder), "", None, MEMORY_BYTES)
    with redirect_stderr(io.StringIO()):
        told = reader._outcome(folder, job, cast(reader._Parent, _Parent()))
    return "; ".join(fault.what for fault in told.faults) if isinstance(told, reader.Faulty) else type(told).__name__


@functools.cache
def _made_set() -> Path:
    return sets.write_v2(Path("set"), lengths=(3,), video=False)


def _some_pushed() -> list[Parts]:
    folder = _made_set()
    return [[(folder / name).read_bytes() for name in _SET]]


# What simulators' processes say


def _simulator(parts: Parts) -> None:
    for part in parts:
        try:
            reply = protocol.decode_reply(part)
        except UNREADABLE:
            protocol.decode_request(part)
            continue
        for outcome in reply.rows.values() if isinstance(reply, protocol.Outcomes) else ():
            protocol.unpack_result(outcome)


def _some_replies() -> list[Parts]:
    kinds = (protocol.Make, protocol.Made, protocol.MakeFailed)
    numbers, picture = protocol.pack(np.zeros(3, np.float32)), protocol.pack(np.zeros((4, 4, 3), np.uint8))
    outcome = protocol.Outcome(numbers, (picture,), numbers, frames=(picture,))
    told = [
        *(make(kind, "x") for kind in kinds),
        protocol.Reset({0: 1}, True),
        protocol.Step({0: numbers}, True, False, (0,)),
        protocol.Outcomes({0: outcome, 1: outcome}),
        protocol.Outcomes({0: protocol.Outcome(failed="why")}),
    ]
    return [[protocol.encode(each)] for each in told]


# Files of operators and of the master


def _operator(parts: Parts) -> str:
    path = _file(b"".join(parts))
    readers: tuple[Callable[[], object], ...] = (
        lambda: KeyRegistry(path).lookup("x"),
        lambda: ClusterFile.load(path),
        lambda: KeyPair.load(path),
        lambda: TenantLimitsFile(path).load(),
    )
    return _refusals(readers, ValueError)


def _refusals(readers: Iterable[Callable[[], object]], declared: type[Exception]) -> str:
    """Let each read; return the sentences with which they refuse."""
    sentences = []
    for read in readers:
        try:
            read()
        except declared as error:
            sentences.append(str(error))
    return "; ".join(sentences)


def _some_files() -> list[Parts]:
    """Files of a cluster, with keys that nobody has."""
    registry, public = KeyRegistry(Path("registry.json")), "0123456789" * 4
    if not registry.list():
        registry.add(KeyEntry(name="laptop", public=public, domain="tenant", tenant="a"))
        registry.add(KeyEntry(name="env", public=public[::-1], domain="worker", roles=("env",)))
    server = ClusterFile(control="tcp://h:1", bulk="tcp://h:2", server_public=public, key_file="key.toml")
    server.save(Path("client.toml"))
    KeyPair(public=public, secret="x" * 40).save(Path("key.toml"))
    TenantLimitsFile(Path("limits.json")).change("a", {"weight": 2.0, "max_policies": 3})
    return [[Path(name).read_bytes()] for name in ("registry.json", "client.toml", "key.toml", "limits.json")]


_ROWS = tuple(Reader.of(kind) for kind in records.KEYS)


def _journal(parts: Parts) -> str:
    data = b"".join(parts)
    rows = [(reader, row) for reader in _ROWS for row in (seal(data), data)]
    return _refusals((partial(_row, reader, row) for reader, row in rows), ValueError)


def _row(reader: Reader, row: bytes) -> None:
    write(reader.decode(row))


def _some_rows() -> list[Parts]:
    return [[write(make(kind, kind.__name__))[:-4]] for kind in records.KEYS]


TARGETS: dict[str, Target] = {
    "a": Target(_act, (JoyNexusError,), _some_acts),
    "c": Target(_checkpoint, (ValueError,), _some_checkpoints),
    "d": Target(_dataset, (JoyNexusError, Unreachable), _some_datasets),
    "j": Target(_joined, (WireError,), lambda: [[join([b"ab", b"", b"c"])]]),
    "k": Target(_operator, (), _some_files),
    "l": Target(_pushed, (), _some_pushed),
    "m": Target(_message, (WireError,), _messages),
    "o": Target(play, (), lambda: [[seed] for seed in _told()]),
    "r": Target(_journal, (), _some_rows),
    "s": Target(_samples, (), _some_samples),
    "t": Target(_rollout, (ValueError,), _some_rollouts),
    "v": Target(_version, (ValueError,), _some_versions),
    "w": Target(_weights, (ValueError,), _some_versions),
    "x": Target(_simulator, (ValueError, RecursionError), _some_replies),
}
"""By the letter that an input begins with."""


def _told() -> list[bytes]:
    """Every request, as the core is told it: by whom, the kind, the message, buffers."""
    return [
        msgspec.msgpack.encode((index % 6, kind_of(sample(kind)), sample(kind), (b"x" * 8,)))
        for index, kind in enumerate(KINDS)
    ]
