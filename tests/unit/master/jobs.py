"""Jobs of tests: how one is submitted and looked at, and a cluster of one worker of each kind."""

from __future__ import annotations

import msgspec

from joynexus.specs import EvaluateSpec, SftSpec
from joynexus.wire.front import BlobOffset, FileEntry, GetJob, JobInfo, PushDataset, SubmitJob
from tests.unit.master.actors import FakeEnv, FakeInference, FakeTrainer, new_incarnation
from tests.unit.master.world import World, run

FILE = "f" * 64


def push(world: World, name: str = "demos", *, tenant: str = "a") -> None:
    (stored,) = world.upload(FILE, tenant=tenant)
    assert isinstance(stored, BlobOffset)
    files = (FileEntry(path="meta/info.json", digest=FILE, nbytes=10),)
    world.tell(PushDataset(dataset=name, files=files), tenant=tenant)


def sft(**changes: object) -> SftSpec:
    spec = SftSpec(policy="p", dataset="demos", steps=100, batch_size=4, checkpoint_every=30)
    return msgspec.structs.replace(spec, **changes)


def submit(world: World, spec: object, *, key: str = "k", tenant: str = "a") -> JobInfo:
    return world.ask(SubmitJob(key=key, spec=spec), JobInfo, tenant=tenant)  # type: ignore[arg-type]


def info(world: World, job: str, *, since: int = 0, tenant: str = "a") -> JobInfo:
    return world.ask(GetJob(job=job, since=since), JobInfo, tenant=tenant)


class Cluster:
    """One worker of each kind."""

    def __init__(self, world: World, backbone: str = "lite") -> None:
        self.world = world
        self.trainer = FakeTrainer(world, new_incarnation(), key="trainer", backbone_name=backbone)
        self.inference = FakeInference(world, new_incarnation(), key="inference", backbone_name=backbone)
        self.env = FakeEnv(world, new_incarnation(), key="env")

    def run(self) -> None:
        run(self.trainer, self.inference, self.env)

    def beat(self) -> None:
        for worker in (self.trainer, self.inference, self.env):
            worker.beat()


def evaluated(world: World, cluster: Cluster) -> None:
    push(world)
    submit(world, sft(steps=5), key="train")
    cluster.run()


def evaluation(**changes: object) -> EvaluateSpec:
    return msgspec.structs.replace(EvaluateSpec(policy="p", env="metaworld/reach-v3", episodes=12, videos=2), **changes)
