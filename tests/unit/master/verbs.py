"""A master without sockets that tenants talk to in frames, and a cluster in which one tenant has everything.

`Doors` takes what is said through encoder, gate, and core or blob service, as a real master does. `Scene` is a master
with workers and two tenants: `a`, who has one of everything (or nothing, in a twin of the scene), and `b`.
"""

from __future__ import annotations

import inspect
import itertools
import re
from pathlib import Path
from typing import Any, ClassVar, cast

import blake3
import msgspec
import zmq

from common.blobs import BlobStore
from joynexus.keys import KeyEntry
from joynexus.specs import EvaluateSpec
from joynexus.wire import Buffer, ErrorCode, Message, decode, encode, failure
from joynexus.wire.back import Beat, Rollout
from joynexus.wire.front import (
    AcquireLease,
    BlobBegin,
    BlobChunk,
    BlobOffset,
    DatasetInfo,
    FileEntry,
    GetDataset,
    GetJob,
    GetPolicy,
    GetUsage,
    JobInfo,
    JobList,
    Lease,
    ListDatasets,
    ListJobs,
    ListPolicies,
    OptimStep,
    PolicyInfo,
    PolicyList,
    Publish,
    PushDataset,
    SaveState,
    Status,
    SubmitJob,
)
from joynexus.wire.hosted import EnvironmentOffered, OfferEnvironment, PulledWork, PullWork
from services.master.bulk import BulkService, Question
from services.master.events import BlobServed, BlobStored, Peer
from services.master.gate import BlobMessage, Refused, admit
from tests.unit.master.actors import FakeEnv, FakeInference, FakeTrainer
from tests.unit.master.jobs import sft
from tests.unit.master.world import CONTRACT, World, run

SOURCE = b"what tenant a recorded"
PAYLOAD = b"samples of tenant a, packed"
UNFINISHED = b"half of this was uploaded"
TASK = "metaworld/reach-v3"


def digest_of(data: bytes) -> str:
    return blake3.blake3(data).hexdigest()


class _Socket:
    """Takes frames as a bulk ROUTER does, and gives them to the world as answers."""

    def __init__(self, world: Doors) -> None:
        self._world = world
        self._frames: list[Buffer] = []

    def send(self, frame: Buffer, flags: int = 0, **how: Any) -> None:
        self._frames.append(frame)
        if not flags & zmq.SNDMORE:
            frames, self._frames = self._frames, []
            self._world.told_in_bulk(frames)


def _unheard(made: type[Any]) -> dict[str, Any]:
    """All that a class insists on: callbacks to whoever wants to hear of it, and generous numbers."""
    fields = inspect.signature(made).parameters.values()
    needed = [field for field in fields if field.kind is field.KEYWORD_ONLY and field.default is field.empty]
    return {field.name: 1000 if field.annotation == "int" else lambda *args, **named: None for field in needed}


class Doors(World):
    """A world in which tenants and workers speak in frames, through the gate."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._ids = itertools.count(10_000)  # all of one length: a message's bytes are metered
        self.transcript: list[tuple[str, Message, tuple[Buffer, ...]]] = []  # what the blob service answered
        self.store = BlobStore(folder / "blobs")
        socket = cast(Any, _Socket(self))
        self.bulk = BulkService(
            {"front_bulk": socket, "back_bulk": socket},
            cast(Any, None),
            self.store,
            folder / "blobs" / "uploads",
            **{**_unheard(BulkService), "ask": self._question, "post": self._stored},
        )
        self.bulk._wakeup.close()  # whoever asks does what waits, at once

    def told_in_bulk(self, frames: list[Buffer]) -> None:
        packet = decode(frames[1:])
        self._answers[packet.header.re].append(packet.message)
        self.transcript.append((packet.header.re, packet.message, packet.buffers))

    def _question(self, question: Question) -> None:
        question(self.core)

    def _stored(self, event: BlobStored | BlobServed) -> None:
        self.event(event)

    def speak(
        self, entry: KeyEntry, peer: Peer, message: Message, *, id: str, buffers: tuple[Buffer, ...] = ()
    ) -> list[Message]:
        """Say something with a key; return the answers that came at once. ValueError if no client could send it."""
        frames = encode(message, id=id, buffers=buffers)
        event = admit(peer, frames, entry)
        before = len(self.answers(id))
        if isinstance(event, Refused):
            self._answers[id].append(event.failure)
        elif isinstance(event, BlobMessage):
            self.bulk._step(self.bulk._serve, event)
            while self.bulk._jobs:
                self.bulk._jobs.popleft()()
        else:
            self.event(event)
        return self.answers(id)[before:]

    def say_as(
        self,
        tenant: str,
        message: Message,
        *,
        buffers: tuple[Buffer, ...] = (),
        id: str = "",
        operator: bool = False,
        peer: Peer | None = None,
    ) -> list[Message]:
        """Have a tenant ask something on the socket that it belongs to."""
        door = "front_bulk" if type(message).__name__.startswith("Blob") else "front"
        entry = KeyEntry(name=f"key-of-{tenant}", public="", domain="tenant", tenant=tenant, operator=operator)
        peer = peer or Peer(cast(Any, door), f"{tenant}-{door}".encode())
        return self.speak(entry, peer, message, id=id or f"r{next(self._requests)}", buffers=buffers)


def only(answers: list[Message], expect: type[Any]) -> Any:
    (answer,) = answers
    assert isinstance(answer, expect), answer
    return answer


class Scene:
    """A cluster; with `a_is_here`, tenant `a` has one of everything. Tenant `b` has a policy of its own, `mine`.

    Attributes:
        ids: what `a` has, by kind of thing: what `b` has learnt of somehow.
        env_credit: what its env worker takes at once.
    """

    env_credit: ClassVar[dict[str, int]] = {"simulator": 1, "data": 1}

    def __init__(self, folder: Path, *, a_is_here: bool = True) -> None:
        self.world = world = Doors(folder)
        self.trainer = FakeTrainer(world, "inc-trainer", key="t")
        self.inference = FakeInference(world, "inc-inference", key="i")
        self.env = FakeEnv(world, "inc-env", key="e", credit=self.env_credit)
        self.ids: dict[str, Any] = {}
        self._busy = 7 if a_is_here else 1
        if a_is_here:
            self._furnish()
        self._make_b()

    def work(self) -> None:
        run(self.trainer, self.inference, self.env)

    def beat(self) -> None:
        """All workers beat; they have done more where `a` is."""
        hits = {"features_hits": str(self._busy)}
        for worker in (self.trainer, self.inference, self.env):
            self.world.say(worker.peer, Beat(progress=self._busy, phase="idle", busy_s=self._busy, detail=hits))

    def ask(self, message: Message, expect: type[Any], *, tenant: str = "a", **how: Any) -> Any:
        return only(self.world.say_as(tenant, message, **how), expect)

    def upload(self, data: bytes, *, tenant: str = "a", upto: int | None = None) -> str:
        digest = digest_of(data)
        self.ask(BlobBegin(digest=digest, nbytes=len(data)), BlobOffset, tenant=tenant)
        self.ask(BlobChunk(digest=digest, offset=0), BlobOffset, tenant=tenant, buffers=(data[:upto],))
        return digest

    def _furnish(self) -> None:
        ids = self.ids
        ids["file"], ids["payload"] = self.upload(SOURCE), self.upload(PAYLOAD)
        ids["unfinished"] = self.upload(UNFINISHED, upto=5)
        entry = FileEntry(path="meta/info.json", digest=ids["file"], nbytes=len(SOURCE))
        self.ask(PushDataset(dataset="demos", files=(entry,)), DatasetInfo)
        self.world.create("p")
        ids["lease"] = self.ask(AcquireLease(policy="p", holder="loop"), Lease).lease
        for number, op in enumerate(
            (
                OptimStep(policy="p", lease=ids["lease"], seq=1),
                SaveState(policy="p", lease=ids["lease"], seq=2, state="s"),
                Publish(policy="p", lease=ids["lease"], seq=3),
            )
        ):
            self.world.say_as("a", op, id=f"op{number}")
        self.work()
        info = self.ask(GetPolicy(policy="p"), PolicyInfo)
        ids["version"] = info.versions[0].digest
        ids["state"] = self.world.answers("op1")[-1].digest  # type: ignore[attr-defined]
        self._jobs()
        ids["incarnation"] = "inc-host"
        offer = OfferEnvironment(name="mine", incarnation="inc-host", credit=1, contract=CONTRACT, instruction="go")
        self.ask(offer, EnvironmentOffered)
        spec = EvaluateSpec(policy="p", env="own/mine", episodes=5)
        ids["evaluation"] = self.ask(SubmitJob(key="own", spec=spec), JobInfo).job
        work = self.ask(PullWork(incarnation="inc-host"), PulledWork).rollout
        assert isinstance(work, Rollout)
        ids["task"], ids["attempt"] = work.task, work.attempt

    def _jobs(self) -> None:
        ids = self.ids
        ids["job"] = self.ask(SubmitJob(key="job", spec=sft(policy="j", steps=3)), JobInfo).job
        self.work()
        self.trainer.errors = dict.fromkeys((1, 2, 3), failure(ErrorCode.NON_FINITE, "the loss is nan"))
        ids["parked"] = self.ask(SubmitJob(key="parked", spec=sft(policy="v", steps=30)), JobInfo).job
        self.work()
        self.trainer.errors = {}
        assert self.ask(GetJob(job=ids["parked"]), JobInfo).state == "parked"
        ids["waiting"] = self.ask(SubmitJob(key="waiting", spec=sft(policy="w", steps=30)), JobInfo).job

    def _make_b(self) -> None:
        self.world.create("mine", tenant="b")
        self.mine = self.ask(AcquireLease(policy="mine", holder="loop"), Lease, tenant="b").lease
        self.world.say_as("b", Publish(policy="mine", lease=self.mine, seq=1))
        self.trainer.work()
        self.inference.work()
        self.beat()

    # What there is to see

    def view(self, tenant: str, *, leave_out: tuple[type, ...] = ()) -> list[Any]:
        """All that a tenant can see of itself, and all that the journal has of it."""
        ask = self.ask
        policies = ask(ListPolicies(), PolicyList, tenant=tenant).policies
        jobs = ask(ListJobs(), JobList, tenant=tenant).jobs
        seen: list[Any] = [self.world.say_as(tenant, reads) for reads in (ListDatasets(), GetUsage(), Status())]
        seen += [ask(GetPolicy(policy=policy.policy), PolicyInfo, tenant=tenant) for policy in policies]
        seen += [ask(GetJob(job=job.job), JobInfo, tenant=tenant) for job in jobs]
        seen += [self.world.say_as(tenant, GetDataset(dataset="demos"))]
        seen += [record for record in self.world.journal.load() if getattr(record, "tenant", None) == tenant]
        digests = (self.ids.get(name, "") for name in ("file", "payload", "unfinished", "version", "state"))
        seen += [self.world.core.may_read(tenant, digest) for digest in digests]
        return [
            thing
            for thing in seen
            if not isinstance(thing[0] if isinstance(thing, list) and thing else thing, leave_out)
        ]


_COUNTED = re.compile(r"\bid\d+\b")
_RUNNING = re.compile(r',?\n *"(stored_byte_s|until_s)": [0-9.e+]+')


def plain(things: Any) -> str:
    """Write down messages and records so that two worlds can be compared: without what is counted, ids and time."""
    return _RUNNING.sub("", _COUNTED.sub("<id>", msgspec.json.format(msgspec.json.encode(things)).decode()))
