"""Records how today's code speaks this version of the protocol: `python -m tests.wire.record`.

In: a master of this code, in a folder of its own. Out: `recorded/<protocol>/`, with a body of each kind and a whole
conversation, as far as they are not there. Never: a recording changed: it is what released clients and workers say and
understand. (Before the first release of a version, delete its folder and record it anew.)
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import blake3
import msgspec
import numpy as np

from joynexus.specs import EvaluateSpec, PolicySpec
from joynexus.wire import ArrayPacker, Message, limits
from joynexus.wire.back import (
    Beat,
    CloseSession,
    DatasetPrepared,
    Decision,
    Gone,
    IndicesDrawn,
    InstanceRow,
    Leaving,
    PredictDone,
    Predicted,
    PredictGroup,
    PrepareDataset,
    RedeemCode,
    Register,
    Rollout,
    RolloutDone,
    SampleIndices,
    Supervised,
    TrainDone,
    TrainGroup,
    TrainItem,
    ViewCluster,
    ViewJob,
    WeightsApplied,
    WeightsOffer,
)
from joynexus.wire.front import (
    AcquireLease,
    Act,
    BlobBegin,
    BlobChunk,
    BlobOffset,
    BlobRead,
    CancelJob,
    CreatePolicy,
    EpisodeResult,
    FileEntry,
    ForwardBackward,
    GetDataset,
    GetJob,
    GetPolicy,
    GetUsage,
    GetVersion,
    Hello,
    ListDatasets,
    ListJobs,
    ListPolicies,
    LoadState,
    OpenDashboard,
    OpResult,
    OptimStep,
    Ping,
    Publish,
    PushDataset,
    ReleaseLease,
    Samples,
    SaveState,
    Status,
    SubmitJob,
)
from joynexus.wire.hosted import OfferEnvironment, WithdrawEnvironment
from joynexus.wire.messages import KINDS
from tests.process.master_process import MasterProcess, Peer
from tests.unit.master.jobs import sft
from tests.unit.master.world import CONTRACT, MANIFEST, STATISTICS
from tests.wire.conversation import RECORDED, Speaker, Step, kinds
from tests.wire.samples import sample

SPEC = PolicySpec(backbone="lite", contract=CONTRACT, statistics=STATISTICS, chunk=2)
WORKERS: dict[str, dict[str, Any]] = {
    "trainer": {"credit": {"train": 1}, "backbone": "b" * 32, "backbone_name": "lite", "batch_key": "k"},
    "inference": {"credit": {"predict": 1}, "backbone": "b" * 32, "backbone_name": "lite", "batch_key": "k"},
    "env": {"credit": {"simulator": 1, "data": 1}, "serves": ("metaworld", "datasets", "sampler")},
    "health": {"credit": {}},
    "dashboard": {"credit": {}, "detail": {"url": "http://127.0.0.1:5714"}},
}
STATE, SOURCE, EPISODE = b"a state, and a version, to be sure", b"a file of a data set", b"an episode"


def digest_of(data: bytes) -> str:
    """Name of a blob."""
    return blake3.blake3(data).hexdigest()


@contextmanager
def peers() -> Iterator[dict[str, Peer]]:
    """A master that takes nobody for dead, and who speaks with it."""
    with tempfile.TemporaryDirectory(prefix="jnx") as folder, ExitStack() as stack:
        master = stack.enter_context(MasterProcess(Path(folder), silent_s=600))
        speakers = {role: stack.enter_context(master.worker(role)) for role in WORKERS}
        yield {"client": stack.enter_context(master.tenant()), **speakers}


class Conversation:
    """A client and its workers, one after another, so that it goes the same way each time."""

    def __init__(self, speakers: dict[str, Peer], steps: list[Step]) -> None:
        self._all = {who: Speaker(who, peer, steps) for who, peer in speakers.items()}
        self.client, self.trainer = self._all["client"], self._all["trainer"]
        self.inference, self.env = self._all["inference"], self._all["env"]
        self._seq = 0

    def hold(self) -> None:
        """All of it."""
        for role, fields in WORKERS.items():
            self._all[role].ask(Register(role=cast(Any, role), incarnation=f"life-of-{role}", pid=7, **fields))
            self._all[role].ask(Beat(progress=1, phase="idle", busy_s=0.5, detail={"device": "cpu"}))
        client = self.client
        self._watch()
        client.ask(Hello(protocol_min=1, protocol_max=limits.PROTOCOL, client="recorded"))
        client.ask(Ping())
        client.ask(CreatePolicy(policy="p", spec=SPEC))
        lease = client.ask(AcquireLease(policy="p", holder="me")).lease
        self._loop(lease)
        self._act()
        client.ask(ReleaseLease(policy="p", lease=lease))
        self._dataset()
        self._sft()
        self._evaluation()
        self._look()
        offer = {"name": "mine", "incarnation": "life-of-host", "credit": 1, "contract": CONTRACT, "instruction": "go"}
        client.ask(OfferEnvironment(**offer))
        client.ask(WithdrawEnvironment(incarnation="life-of-host"))
        for question in (Status(), GetUsage(), ListPolicies(), ListJobs(), ListDatasets(), GetPolicy(policy="none")):
            client.ask(question)
        self._leave()

    def _watch(self) -> None:
        """Health looks at the whole, and tells what it knows."""
        health = self._all["health"]
        health.ask(Status())
        env = InstanceRow(name="env", instance="host/env", role="env", state="running", restarts=1, reason="it ended")
        decision = Decision(at=1.0, group="env", before=1, after=2, reason="much waits")
        health.ask(Supervised(instances=(env,), decisions=(decision,), desired={"env": 2}))
        health.ask(ViewCluster())

    def _look(self) -> None:
        """Somebody comes to the dashboard, looks, and goes."""
        dashboard, client = self._all["dashboard"], self.client
        session = dashboard.ask(RedeemCode(code=client.ask(OpenDashboard()).code)).session
        dashboard.ask(ViewCluster(session=session))
        dashboard.ask(ViewJob(session=session, tenant="acme", job="sft-1"))
        dashboard.ask(CloseSession(session=session))
        dashboard.ask(ViewCluster(session=session))

    def _loop(self, lease: str) -> None:
        packer = ArrayPacker()
        samples = Samples(
            state=packer.add(np.zeros((1, 2), np.float32)),
            action=packer.add(np.zeros((1, 2, 2), np.float32)),
            action_mask=packer.add(np.ones((1, 2), np.bool_)),
            images=(packer.add(np.zeros((1, 4, 4, 3), np.uint8)),),
            instructions=("go",),
        )
        ops: list[tuple[Message, Sequence[Any]]] = [
            (ForwardBackward(policy="p", lease=lease, seq=1, samples=samples), packer.buffers),
            (OptimStep(policy="p", lease=lease, seq=2), ()),
            (SaveState(policy="p", lease=lease, seq=3, state="s"), ()),
            (LoadState(policy="p", lease=lease, seq=4, state="s"), ()),
            (Publish(policy="p", lease=lease, seq=5), ()),
        ]
        for op, buffers in ops:
            self.client.ask(op, buffers)
            self._train()
            self.client.hear()
        self._serve()
        self.client.ask(OptimStep(policy="p", lease=lease, seq=9))  # a gap
        self.client.ask(GetPolicy(policy="p"))
        digest = self.client.ask(GetVersion(policy="p")).digest
        self.client.ask(BlobRead(digest=digest, offset=0, length=4096), bulk=True)

    def _leave(self) -> None:
        self.trainer.say(Leaving())
        group = self.trainer.hear().message  # what it has is to be checkpointed
        self.trainer.hear()
        self._do(group)
        for speaker in (self.inference, self.env):
            speaker.ask(Leaving())
        self.trainer.ask(Beat(progress=2, phase="idle", busy_s=0.5))
        for speaker in (self.trainer, self.inference, self.env):
            speaker.ask(Gone())

    def _train(self) -> None:
        """Have the trainer do its next group."""
        self._do(self.trainer.hear().message)

    def _do(self, group: Message) -> None:
        assert isinstance(group, TrainGroup)
        for item in group.items:
            self.trainer.say(self._done(group, item))

    def _done(self, group: TrainGroup, item: TrainItem) -> TrainDone:
        digest = ""
        if item.kind in ("publish", "save_state", "checkpoint"):
            digest = self._upload(self.trainer, STATE)
        kept = "" if item.kind == "checkpoint" else digest
        metrics = {"loss": 0.25} if item.kind in ("forward_backward", "train_step") else {}
        result = OpResult(policy=item.policy, seq=item.seq, metrics=metrics, version=item.version, digest=kept)
        return TrainDone(
            task=group.task, attempt=group.attempt, tenant=item.tenant, policy=item.policy, seq=item.seq,
            kind=item.kind, result=result, checkpoint=digest if item.kind != "publish" else "",
            nbytes=len(STATE) if digest else 0, step=1, busy_s=0.125, samples=1, last=item is group.items[-1],
        )  # fmt: skip

    def _serve(self) -> None:
        """Have inference load the version that was just published."""
        offer = self.inference.hear().message
        assert isinstance(offer, WeightsOffer)
        self.inference.ask(BlobRead(digest=offer.digest, offset=0, length=offer.nbytes), bulk=True)
        self.inference.say(WeightsApplied(tenant=offer.tenant, policy=offer.policy, version=offer.version))
        self.inference.ask(Beat(progress=2, phase="idle", busy_s=0.5))  # once that is answered, it was heard

    def _act(self) -> None:
        packer = ArrayPacker()
        state, picture = packer.add(np.zeros((1, 2), np.float32)), packer.add(np.zeros((1, 4, 4, 3), np.uint8))
        self.client.say(Act(policy="p", state=state, images=(picture,), instructions=("go",)), packer.buffers)
        group = self.inference.hear().message
        assert isinstance(group, PredictGroup)
        packer = ArrayPacker()
        actions, (item,) = packer.add(np.zeros((1, 2, 2), np.float32)), group.items
        answer = Predicted(request=item.request, version=item.version, actions=actions, rows=1, busy_s=0.125)
        self.inference.say(PredictDone(task=group.task, attempt=group.attempt, items=(answer,)), packer.buffers)
        self.client.hear()

    def _dataset(self) -> None:
        self._upload(self.client, SOURCE)
        entry = FileEntry(path="meta/info.json", digest=digest_of(SOURCE), nbytes=len(SOURCE))
        self.client.ask(PushDataset(dataset="demos", files=(entry,)))
        task = self.env.hear().message
        assert isinstance(task, PrepareDataset)
        blob = self._upload(self.env, EPISODE)
        episodes = tuple(msgspec.structs.replace(one, blob=blob, nbytes=len(EPISODE)) for one in MANIFEST.episodes)
        manifest = msgspec.msgpack.encode(msgspec.structs.replace(MANIFEST, episodes=episodes))
        digest = self._upload(self.env, manifest)
        self.env.say(
            DatasetPrepared(
                task=task.task,
                attempt=task.attempt,
                manifest=digest,
                manifest_nbytes=len(manifest),
                blobs=((blob, len(EPISODE)),),
                busy_s=0.125,
            )
        )
        self.client.ask_until(GetDataset(dataset="demos"), lambda info: info.state == "ready")

    def _sft(self) -> None:
        job = self.client.ask(SubmitJob(key="k", spec=sft(policy="j", steps=1))).job
        task = self.env.hear().message
        assert isinstance(task, SampleIndices)
        self.env.say(IndicesDrawn(task=task.task, attempt=task.attempt, batches=((0, 1, 2, 3),), busy_s=0.125))
        for _ in ("step", "publish"):
            self._train()
        self._serve()
        self.client.ask_until(GetJob(job=job), lambda info: info.state == "succeeded")

    def _evaluation(self) -> None:
        job = self.client.ask(
            SubmitJob(key="e", spec=EvaluateSpec(policy="p", env="metaworld/reach-v3", episodes=2))
        ).job
        task = self.env.hear().message
        assert isinstance(task, Rollout)
        episodes = tuple(EpisodeResult(seed=seed, success=True, steps=3, reward=1.0) for seed in task.seeds)
        contract = CONTRACT.digest()
        self.env.say(
            RolloutDone(
                task=task.task,
                attempt=task.attempt,
                episodes=episodes,
                contract_digest=contract,
                busy_s=0.125,
                software={"mujoco": "3"},
            )
        )
        self.client.ask_until(GetJob(job=job), lambda info: info.state == "succeeded")
        self.client.ask(CancelJob(job=job))

    def _upload(self, speaker: Speaker, data: bytes) -> str:
        offset = speaker.ask(BlobBegin(digest=digest_of(data), nbytes=len(data)), bulk=True)
        assert isinstance(offset, BlobOffset)
        if not offset.complete:
            speaker.ask(BlobChunk(digest=digest_of(data), offset=0), (data,), bulk=True)
        return digest_of(data)


def main() -> None:
    """Write what is missing of this version of the protocol."""
    folder = RECORDED / str(limits.PROTOCOL)
    folder.mkdir(parents=True, exist_ok=True)
    if not (conversation := folder / "conversation.bin").exists():
        steps: list[Step] = []
        with peers() as speakers:
            Conversation(speakers, steps).hold()
        conversation.write_bytes(msgspec.msgpack.encode(steps))
        print(f"recorded a conversation of {len(steps)} messages")
    recorded = kinds(limits.PROTOCOL)
    new = {kind: msgspec.msgpack.encode(sample(kind)) for kind in sorted(KINDS.keys() - recorded.keys())}
    if new:
        (folder / "kinds.bin").write_bytes(msgspec.msgpack.encode(recorded | new))
        print("recorded", *new)


if __name__ == "__main__":
    main()
