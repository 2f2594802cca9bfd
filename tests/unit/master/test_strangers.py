"""Whatever well-formed messages tenants and workers send, in whatever order: the core answers and goes on.

The wire's types let many senseless values through (negative numbers, unknown names, other people's tasks). None of them
may raise in the core, where it would take everybody down.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from joynexus.wire.front import BlobBegin, BlobChunk, BlobRead, SubmitJob
from joynexus.wire.messages import BACK_REQUESTS, FRONT_REQUESTS, Message
from services.master.commands import Send
from tests.unit.master.actors import FakeEnv, FakeInference, FakeTrainer, new_incarnation
from tests.unit.master.jobs import sft
from tests.unit.master.test_datasets import FILE, ONE
from tests.unit.master.world import FakeWorker, World

_BLOBS = (BlobBegin, BlobChunk, BlobRead)
_NAMES = [
    "p",
    "q",
    "demos",
    "s",
    "a",
    "b",
    "lite",
    "loop",
    "metaworld/reach-v3",
    "",
    "../x",
    "m" * 64,
    FILE,
    "\0",
    "ü" * 70,
]


class Stranger:
    """Makes messages out of their types, with values from a small pool so that some of them mean something."""

    def __init__(self, chance: random.Random, world: World) -> None:
        self.chance = chance
        self.world = world

    def message(self, kind: type[Message]) -> Message:
        value = self.value(msgspec.inspect.type_info(kind), 0)
        assert isinstance(value, kind)
        return value

    def value(self, type_: Any, depth: int) -> Any:
        chance = self.chance
        match type_:
            case msgspec.inspect.StructType():
                fields = {
                    field.name: self.value(field.type, depth + 1)
                    for field in type_.fields
                    if field.required or chance.random() < 0.6
                }
                return type_.cls(**fields)
            case msgspec.inspect.UnionType():
                return self.value(chance.choice(type_.types), depth)
            case msgspec.inspect.StrType():
                return chance.choice(_NAMES + self._known())
            case msgspec.inspect.IntType():
                return chance.choice([-(2**63), -1, 0, 1, 2, 3, 5, 64, 2**40, 2**63 - 1])
            case msgspec.inspect.FloatType():
                return chance.choice([0.0, -1.0, 0.5, 1e300, float("nan"), float("inf")])
            case msgspec.inspect.BoolType():
                return chance.random() < 0.5
            case msgspec.inspect.BytesType():
                return chance.choice([b"", b"\x80", b"\xc1", bytes(20)])
            case msgspec.inspect.NoneType():
                return None
            case msgspec.inspect.VarTupleType():
                return tuple(self.value(type_.item_type, depth + 1) for _ in range(chance.choice([0, 0, 1, 2, 3])))
            case msgspec.inspect.TupleType():
                return tuple(self.value(item, depth + 1) for item in type_.item_types)
            case msgspec.inspect.DictType():
                return {
                    self.value(type_.key_type, 9): self.value(type_.value_type, 9) for _ in range(chance.choice([0, 1]))
                }
            case msgspec.inspect.LiteralType():
                return chance.choice(type_.values)
            case msgspec.inspect.EnumType():
                return chance.choice(list(type_.cls))
            case _:
                raise AssertionError(type_)

    def _known(self) -> list[str]:
        """Ids that the core has used lately: tasks, leases, jobs."""
        recent = [send for sends in self.world.sent.values() for send in sends[-3:] if isinstance(send, Send)]
        fields = ("task", "lease", "job", "digest", "incarnation")
        return [
            str(getattr(send.message, field)) for send in recent for field in fields if hasattr(send.message, field)
        ]


@pytest.mark.parametrize("seed", range(60))
def test_no_message_of_a_stranger_stops_the_core(seed: int) -> None:
    chance = random.Random(seed)
    world = World()
    world.upload(FILE)
    world.create()
    world.lease()
    world.tell(ONE)
    workers: list[FakeWorker] = [
        FakeTrainer(world, new_incarnation(), key="t"),
        FakeInference(world, new_incarnation(), key="i"),
        FakeEnv(world, new_incarnation(), key="e"),
    ]
    workers[2].work()
    world.tell(SubmitJob(key="job", spec=sft(steps=3)))
    stranger = Stranger(chance, world)
    front = [kind for kind in FRONT_REQUESTS if kind not in _BLOBS]
    back = [kind for kind in BACK_REQUESTS if kind not in _BLOBS]
    for _ in range(150):
        buffers = (b"x" * 8,) * chance.randint(0, 2)
        if chance.random() < 0.6:
            tenant = chance.choice(["a", "a", "b"])
            id = world.tell(stranger.message(chance.choice(front)), tenant=tenant, buffers=buffers)
            if world.auto_persist:
                assert len(world.answers(id)) <= 2
        else:
            peer = chance.choice(workers).peer
            world.say(peer, stranger.message(chance.choice(back)), buffers=buffers)
        if chance.random() < 0.1:
            world.wait(chance.choice([0.1, 2.0]))
    world.crash()
