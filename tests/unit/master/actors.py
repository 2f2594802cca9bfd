"""Fake workers: a trainer whose weights are the hash of everything it applied, an inference worker, an env worker."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from typing import Any

import msgspec
import numpy as np

from joynexus.wire import Array, Failure, failure
from joynexus.wire.back import (
    DatasetPrepared,
    DescribeSimulator,
    IndicesDrawn,
    PredictDone,
    Predicted,
    PredictGroup,
    PrepareDataset,
    RlEpoch,
    Rollout,
    RolloutDone,
    SampleIndices,
    SimulatorDescribed,
    SlotFailed,
    TrainDone,
    TrainGroup,
    TrainItem,
    WeightsApplied,
    WeightsOffer,
)
from joynexus.wire.errors import ErrorCode
from joynexus.wire.front import EpisodeResult, OpResult
from services.master.commands import Send
from tests.unit.master.world import CONTRACT, STATISTICS, FakeWorker, World

BLOBS: dict[str, Weights] = {}
"""All checkpoints and states ever written, by digest."""


PAGES: dict[str, Rollout] = {}
"""All experience ever collected, by digest: what was asked for."""


class Weights(msgspec.Struct, frozen=True):
    """What training has come to: a hash over everything that was applied, in order.

    Attributes:
        trained: epochs since RL began: update, epoch, digests of the pages that it was trained on.
    """

    chain: str = ""
    gradients: str = ""
    step: int = 0
    applied_seq: int = 0
    trained: tuple[tuple[int, int, tuple[str, ...]], ...] = ()

    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


def apply(weights: Weights, item: TrainItem, samples: bytes) -> tuple[Weights, dict[str, float]]:
    """Apply one op the way every trainer does."""

    def mix(*parts: object) -> str:
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    if item.kind in ("forward_backward", "train_step"):
        data = (samples, item.payload, item.dataset.indices if item.dataset else ())
        weights = msgspec.structs.replace(weights, gradients=mix(weights.gradients, weights.chain, data))
    metrics = {"loss": int(weights.gradients[:8] or "0", 16) / 2**32}
    if item.kind in ("optim_step", "train_step"):
        chain = mix(weights.chain, weights.gradients)
        weights = msgspec.structs.replace(weights, chain=chain, gradients="", step=weights.step + 1)
    if item.kind == "rl_begin":
        weights = msgspec.structs.replace(weights, chain=mix("begin", weights.chain, item.rl), gradients="", trained=())
    if isinstance(item.rl, RlEpoch):
        chain = mix("epoch", weights.chain, item.rl)
        trained = (*weights.trained, (item.rl.update, item.rl.epoch, item.rl.rollouts))
        weights = msgspec.structs.replace(weights, chain=chain, step=weights.step + 1, trained=trained)
        metrics = {"policy_loss": int(chain[:8], 16) / 2**32}
    if item.kind == "load_state":
        saved = BLOBS[item.state]
        weights = msgspec.structs.replace(weights, chain=saved.chain, step=saved.step, gradients="")
    if item.kind == "load_weights":
        weights = msgspec.structs.replace(weights, chain=mix("own", item.payload), gradients="")
    return msgspec.structs.replace(weights, applied_seq=item.seq), metrics


class FakeTrainer(FakeWorker):
    """A trainer.

    Attributes:
        slots: weights by policy.
        applied: how often each op was applied here, by policy and seq.
        killed_by: seqs over which it dies.
        refuses: failure with which slots do not open.
        errors: outcome of ops by seq, instead of applying them.
    """

    role = "trainer"

    def __init__(self, world: World, incarnation: str, *, credit: int = 2, **register: Any) -> None:
        self.slots: dict[tuple[str, str], Weights] = {}
        self.results: dict[tuple[str, str, int, bool], TrainDone] = {}
        self._remembered: defaultdict[tuple[str, str], list[tuple[str, str, int, bool]]] = defaultdict(list)
        self.applied: Counter[tuple[str, str, int]] = Counter()
        self.killed_by: set[int] = set()
        self.refuses: Failure | None = None
        self.errors: dict[int, Failure] = {}
        self.checkpoints_fail = False
        self.groups: list[TrainGroup] = []
        super().__init__(world, incarnation, credit={"train": credit}, **register)

    def do(self, send: Send) -> None:
        group = send.message
        assert isinstance(group, TrainGroup)
        self.groups.append(group)
        for key in group.close:
            self.slots.pop(key, None)
        broken = set()
        for opening in group.slots:
            key = (opening.tenant, opening.policy)
            if self.refuses is not None:
                broken.add(key)
                self.slots.pop(key, None)
                continue
            self.slots[key] = BLOBS[opening.checkpoint] if opening.checkpoint else Weights()
            assert self.slots[key].applied_seq == opening.applied_seq
            for remembered in self._remembered.pop(key, ()):
                self.results.pop(remembered, None)
        items = [item for item in group.items if (item.tenant, item.policy) not in broken]
        left = len(items) + len(broken)
        for todo in [*items, *broken]:
            answer = self._item(group, todo, send) if isinstance(todo, TrainItem) else self._slot_failed(group, todo)
            if self.peer not in self.world.actors:
                return  # it died over this one
            left -= 1
            self.world.say(self.peer, msgspec.structs.replace(answer, last=left == 0))

    def _slot_failed(self, group: TrainGroup, key: tuple[str, str]) -> SlotFailed:
        assert self.refuses is not None
        return SlotFailed(task=group.task, attempt=group.attempt, tenant=key[0], policy=key[1], error=self.refuses)

    def _item(self, group: TrainGroup, item: TrainItem, send: Send) -> TrainDone | SlotFailed:
        key = (item.tenant, item.policy)
        weights = self.slots.get(key)
        is_checkpoint = item.kind == "checkpoint"
        if weights is None or (not is_checkpoint and item.seq > weights.applied_seq + 1):
            error = failure(ErrorCode.INTERNAL, "open the slot again")
            return SlotFailed(task=group.task, attempt=group.attempt, tenant=key[0], policy=key[1], error=error)
        done = self.results.get((*key, item.seq, is_checkpoint))
        if done is not None and item.replay:  # as the trainer does: it was charged when it was done
            done = msgspec.structs.replace(done, busy_s=0.0)
        if done is None:
            assert item.seq == weights.applied_seq + (not is_checkpoint), (item.seq, weights)
            done = self.results[(*key, item.seq, is_checkpoint)] = self._apply(weights, item, send)
            self._remembered[key].append((*key, item.seq, is_checkpoint))
        return msgspec.structs.replace(done, task=group.task, attempt=group.attempt)

    def _apply(self, weights: Weights, item: TrainItem, send: Send) -> TrainDone:
        key = (item.tenant, item.policy)
        self.busy_s += 0.01
        result = OpResult(policy=item.policy, seq=item.seq)
        digest, nbytes, metrics = "", 0, {}
        if item.seq in self.killed_by and not item.skip and item.kind != "checkpoint":
            self.die()
        if item.kind == "checkpoint":
            if self.checkpoints_fail:
                result = msgspec.structs.replace(result, error=failure(ErrorCode.UNAVAILABLE, "disk full"))
            else:
                assert not weights.gradients, "checkpoints lie at optimizer boundaries"
                digest, nbytes = weights.digest(), 100
                BLOBS[digest] = weights
        elif item.skip or item.seq in self.errors:
            error = self.errors.get(item.seq)
            self.slots[key] = msgspec.structs.replace(weights, applied_seq=item.seq)
            result = msgspec.structs.replace(result, error=error)
        else:
            buffers = send.buffers[item.first_buffer : item.first_buffer + item.buffers]
            samples = item.samples + b"".join(bytes(buffer) for buffer in buffers)
            weights, metrics = apply(weights, item, samples)
            self.slots[key] = weights
            self.applied[(*key, item.seq)] += 1
            if item.kind in ("publish", "save_state"):
                digest, nbytes = weights.digest(), 100
                BLOBS[digest] = weights
            result = msgspec.structs.replace(
                result, metrics=metrics, digest=digest, version=item.version if item.kind == "publish" else 0
            )
        return TrainDone(
            task="",
            attempt=0,
            tenant=item.tenant,
            policy=item.policy,
            seq=item.seq,
            kind=item.kind,
            result=result,
            checkpoint=digest if item.kind in ("checkpoint", "save_state") else "",
            nbytes=nbytes,
            step=self.slots[key].step,
            busy_s=0.01,
            samples=1,
            backbone_forwards=1,
        )


class FakeInference(FakeWorker):
    """An inference worker; it answers each request with its row count."""

    role = "inference"

    def __init__(self, world: World, incarnation: str, *, credit: int = 1, **register: Any) -> None:
        self.groups: list[PredictGroup] = []
        self.offers: list[WeightsOffer] = []
        self.applies = True
        self.killed_by = b""
        super().__init__(world, incarnation, credit={"predict": credit}, **register)

    def do(self, send: Send) -> None:
        message = send.message
        if isinstance(message, WeightsOffer):
            self.offers.append(message)
            if self.applies:
                self.busy_s += 0.02
                applied = WeightsApplied(
                    tenant=message.tenant, policy=message.policy, version=message.version, busy_s=0.02
                )
                self.world.say(self.peer, applied)
            return
        assert isinstance(message, PredictGroup)
        if self.killed_by and self.killed_by in send.buffers:
            self.die()
            return
        self.groups.append(message)
        buffers = []
        items = []
        for index, item in enumerate(message.items):
            buffers.append(np.zeros((1, 1, 2), np.float32).tobytes())
            actions = Array(dtype="<f4", shape=(1, 1, 2), frame=index)
            self.busy_s += 0.001
            items.append(
                Predicted(
                    request=item.request,
                    version=item.version,
                    actions=actions,
                    rows=1,
                    busy_s=0.001,
                    backbone_forwards=1,
                )
            )
        done = PredictDone(task=message.task, attempt=message.attempt, items=tuple(items))
        self.world.say(self.peer, done, buffers=tuple(buffers))


class FakeEnv(FakeWorker):
    """An env worker: prepares data sets, draws batches, runs episodes that succeed on even seeds."""

    role = "env"

    def __init__(self, world: World, incarnation: str, **register: Any) -> None:
        self.tasks: list[PrepareDataset | SampleIndices | Rollout | DescribeSimulator] = []
        self.killed_by: set[int] = set()  # draws over which it dies
        self.error: Failure | None = None
        self.rollout_error: Failure | None = None  # of rollouts alone
        self.episode_limit = 0  # of its simulators
        self.broken: set[str] = set()  # environments whose every episode is lost here
        fields = {"credit": {"simulator": 1, "data": 1}, "serves": ("metaworld", "datasets", "sampler"), **register}
        super().__init__(world, incarnation, **fields)

    def do(self, send: Send) -> None:
        message = send.message
        self.tasks.append(message)  # type: ignore[arg-type]
        if isinstance(message, Rollout) and self.killed_by & set(message.draws):
            self.die()
            return
        self.world.say(self.peer, self.answer(message))

    def answer(self, message: Any) -> Any:
        place = {"task": message.task, "attempt": message.attempt, "busy_s": 0.5}
        self.busy_s += 0.5
        match message:
            case PrepareDataset():
                return DatasetPrepared(**place, manifest="m" * 64, manifest_nbytes=50, blobs=(("b" * 64, 10),))
            case SampleIndices():
                steps = range(message.first_step, message.first_step + message.steps)
                batches = tuple(
                    tuple((message.seed + step * message.batch_size + i) % 200 for i in range(message.batch_size))
                    for step in steps
                )
                return IndicesDrawn(**place, batches=batches, error=self.error)
            case Rollout():
                error = self.error or self.rollout_error
                if message.env in self.broken:
                    nothing = EpisodeResult(seed=0, success=False, steps=0, reward=0.0, failure="it was lost")
                    lost = tuple(msgspec.structs.replace(nothing, seed=seed) for seed in message.seeds)
                    return RolloutDone(**place, episodes=lost, contract_digest="c", software={"mujoco": "3"})
                episodes = tuple(
                    EpisodeResult(
                        seed=seed, success=seed % 2 == 0, steps=10, reward=1.0, failure="" if seed % 2 == 0 else "limit"
                    )
                    for seed in message.seeds
                )
                videos = tuple((f"{seed:064x}", 7) for seed in message.videos)
                digest = ""
                if message.collect is not None:
                    made = (message.policy, message.version, message.env, message.seeds, message.draws)
                    digest = hashlib.sha256(repr(made).encode()).hexdigest()
                    PAGES[digest] = message
                return RolloutDone(
                    **place,
                    trajectories=digest,
                    trajectories_nbytes=9 if digest else 0,
                    episodes=() if error else episodes,
                    contract_digest="c",
                    software={"mujoco": "3"},
                    videos=videos,
                    error=error,
                )
            case DescribeSimulator():
                if self.error is not None:
                    return SimulatorDescribed(**place, error=self.error)
                limit = message.episode_limit or self.episode_limit
                contract = msgspec.structs.replace(CONTRACT, cameras=message.cameras, episode_limit=limit)
                return SimulatorDescribed(**place, contract=contract, instruction="go", statistics=STATISTICS)
            case _:
                raise AssertionError(message)


_incarnations = itertools.count(1)


def new_incarnation() -> str:
    return f"inc{next(_incarnations)}"
