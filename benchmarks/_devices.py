"""Simulated workers: they take the service's messages, hold a device for as long as the table says, and answer.

In: `TrainGroup`, `PredictGroup`, offers of weights, tasks of the env service. Out: the answers that real workers give,
at the simulated time. Never: a result of an op before the ops before it, or a forward of what is kept already.

A trainer does a group in rounds, as `services/trainer/group.py` does: the next op of every policy that needs features
takes part in one forward over what is not kept; then each has its private part, and its answer leaves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks._simulation import Future, Process, Station
from benchmarks._times import Head
from joynexus.wire import Array, Message
from joynexus.wire.back import (
    DatasetPrepared,
    IndicesDrawn,
    PredictDone,
    Predicted,
    PredictGroup,
    PrepareDataset,
    Register,
    SampleIndices,
    TrainDone,
    TrainGroup,
    TrainItem,
    WeightsApplied,
    WeightsOffer,
)
from joynexus.wire.front import Act, OpResult, Samples
from services.master.commands import Send

if TYPE_CHECKING:
    from benchmarks._simulated import Cluster, Reuse

MAX_FORWARD_ROWS = 64
_FEATURE_KINDS = frozenset({"forward_backward", "train_step"})
_STEP_KINDS = frozenset({"optim_step", "train_step"})

_samples = msgspec.msgpack.Decoder(Samples).decode
_act = msgspec.msgpack.Decoder(Act).decode


class Features:
    """Which features are kept, for all trainers of the host."""

    def __init__(self, reuse: Reuse) -> None:
        self._reuse = reuse
        self._kept: dict[tuple[str, str], set[int]] = {}

    def missing(self, item: TrainItem, rows: int) -> int:
        """Return how many of an op's samples need a forward; they are kept from then on."""
        if item.dataset is None:
            return 0 if self._reuse == "everything" else rows  # a rollout's pictures are trained on once
        if self._reuse == "none":
            return rows
        kept = self._kept.setdefault((item.feature_scope, item.dataset.dataset), set())
        before = len(kept)
        kept.update(item.dataset.indices)
        return len(kept) - before


class _Worker(ABC):
    """What simulated workers have in common: a connection and an inbox."""

    role = ""

    def __init__(self, cluster: Cluster, **register: Any) -> None:
        self.cluster = cluster
        self.inbox: deque[Send] = deque()
        self.groups: list[tuple[float, float]] = []
        self.station = Station(cluster.simulation)
        self._idle: Future | None = None
        self.peer = cluster.connect("back", self._take)
        incarnation = f"{self.role}{self.peer.routing_id.decode()}"
        cluster.say(self.peer, Register(role=self.role, pid=1, incarnation=incarnation, **register))  # type: ignore[arg-type]  # a literal
        cluster.simulation.spawn(self._run())

    @abstractmethod
    def work(self, send: Send) -> Process:
        """Do one piece of work."""

    def _take(self, send: Send) -> None:
        if send.re:
            return  # an answer: a welcome, an acknowledgement
        if isinstance(send.message, WeightsOffer):
            self.cluster.simulation.spawn(self._apply(send.message))
            return
        self.inbox.append(send)
        if self._idle is not None:
            idle, self._idle = self._idle, None
            idle.resolve()

    def _run(self) -> Process:
        while True:
            while not self.inbox:
                self._idle = Future()
                yield self._idle
            began = self.cluster.simulation.now
            yield from self.work(self.inbox.popleft())
            self.groups.append((began, self.cluster.simulation.now - began))

    def _apply(self, offer: WeightsOffer) -> Process:
        yield self.cluster.simulation.sleep(self.cluster.times.apply_s)
        applied = WeightsApplied(tenant=offer.tenant, policy=offer.policy, version=offer.version)
        self.cluster.say(self.peer, applied)


class TrainerDevice(_Worker):
    """A trainer on one device.

    Attributes:
        forwards: rows and number of tenants of each backbone forward.
        groups: when each group began, and how long it took.
        applied: ops applied, by policy.
    """

    role = "trainer"

    def __init__(self, cluster: Cluster, features: Features, backbone: str) -> None:
        self.forwards: list[tuple[int, int]] = []
        self.applied: Counter[tuple[str, str]] = Counter()
        self._features = features
        self._steps: Counter[tuple[str, str]] = Counter()
        super().__init__(
            cluster,
            credit={"train": 2},
            backbone="d" * 64,
            backbone_name=backbone,
            batch_key=backbone,
            heads=("oft", "groot"),
        )

    def work(self, send: Send) -> Process:
        """Do a group in rounds."""
        message, times = send.message, self.cluster.times
        assert isinstance(message, TrainGroup)
        for opening in message.slots:
            head: Head = "groot" if opening.spec.head == "groot" else "oft"
            self.cluster.heads[opening.tenant, opening.policy] = head
            yield self.station.work(times.page_in_s, busy_s=0.0)
        lanes: dict[tuple[str, str], deque[TrainItem]] = {}
        for item in message.items:
            lanes.setdefault((item.tenant, item.policy), deque()).append(item)
        while lanes:
            ready: list[tuple[TrainItem, int, int]] = []
            for key in list(lanes):
                lane = lanes[key]
                while lane and lane[0].kind not in _FEATURE_KINDS:
                    item = lane.popleft()
                    if not lane:
                        del lanes[key]
                    yield from self._private(message, item, 0, 0.0, last=not lanes and not ready)
                if lane:
                    item = lane.popleft()
                    if not lane:
                        del lanes[key]
                    rows = _rows(item)
                    ready.append((item, rows, self._features.missing(item, rows)))
            if not ready:
                continue
            missing = sum(new for _, _, new in ready)
            seconds = sum(times.forward(rows) for rows in _parts(missing))
            self.forwards += [(rows, len({item.tenant for item, _, new in ready if new})) for rows in _parts(missing)]
            if seconds:
                yield self.station.work(seconds)
            first = True  # the count of forwards goes to the first that needed one
            for index, (item, rows, new) in enumerate(ready):
                share = seconds * new / missing if missing else 0.0
                forwards = len(list(_parts(missing))) if new and first else 0
                first = first and not new
                last = not lanes and index == len(ready) - 1
                yield from self._private(message, item, rows, share, kept=rows - new, forwards=forwards, last=last)

    def _private(
        self,
        group: TrainGroup,
        item: TrainItem,
        rows: int,
        share_s: float,
        *,
        kept: int = 0,
        forwards: int = 0,
        last: bool,
    ) -> Process:
        times, key = self.cluster.times, (item.tenant, item.policy)
        busy_s = held_s = 0.0
        if item.kind in _FEATURE_KINDS:
            busy_s += times.train(self.cluster.heads[key], rows) + kept * times.feature_read_row_s
        if item.kind in _STEP_KINDS:
            busy_s += times.optim_step_s
            self._steps[key] += 1
        if item.kind == "publish":
            held_s += times.publish_s
        if item.kind == "checkpoint":
            held_s += times.checkpoint_s
        yield self.station.work(busy_s + held_s, busy_s=busy_s)
        digest = f"{item.tenant}/{item.policy}/{item.kind}/{item.seq}"
        if item.kind != "checkpoint":
            self.applied[key] += 1
        result = OpResult(
            policy=item.policy,
            seq=item.seq,
            metrics={"loss": 0.0} if rows else {},
            version=item.version,
            digest=digest if item.kind == "publish" else "",
        )
        done = TrainDone(
            task=group.task,
            attempt=group.attempt,
            tenant=item.tenant,
            policy=item.policy,
            seq=item.seq,
            kind=item.kind,
            result=result,
            checkpoint=digest if item.kind == "checkpoint" else "",
            nbytes=10,
            step=self._steps[key],
            busy_s=busy_s + share_s,
            samples=rows,
            backbone_forwards=forwards,
            last=last,
        )
        self.cluster.say(self.peer, done)


class InferenceDevice(_Worker):
    """An inference worker on one device.

    Attributes:
        forwards: rows and number of tenants of each backbone forward.
        groups: when each group began, and how long it took.
        requests: requests in each group.
    """

    role = "inference"

    def __init__(self, cluster: Cluster, backbone: str) -> None:
        self.forwards: list[tuple[int, int]] = []
        self.requests: list[int] = []
        super().__init__(cluster, credit={"predict": 1}, backbone="d" * 64, backbone_name=backbone, batch_key=backbone)

    def work(self, send: Send) -> Process:
        """One forward for all rows, then each request's private part; all answers leave together."""
        message, times = send.message, self.cluster.times
        assert isinstance(message, PredictGroup)
        rows = [_act(item.act).state.shape[0] for item in message.items]
        forward_s = sum(times.forward(part) for part in _parts(sum(rows)))
        tenants = len({item.tenant for item in message.items})
        self.forwards += [(part, tenants) for part in _parts(sum(rows))]
        self.requests.append(len(rows))
        private_s = [times.act(self.cluster.heads[item.tenant, item.policy]) for item in message.items]
        yield self.station.work(forward_s + sum(private_s))
        items = tuple(
            Predicted(
                request=item.request,
                version=item.version,
                actions=Array(dtype="<f4", shape=(count, 1, 1), frame=0),
                rows=count,
                busy_s=forward_s * count / sum(rows) + private_s[index],
                backbone_forwards=int(index == 0),
            )
            for index, (item, count) in enumerate(zip(message.items, rows, strict=True))
        )
        done = PredictDone(task=message.task, attempt=message.attempt, items=items)
        self.cluster.say(self.peer, done, buffers=(b"",))


class EnvWorker(_Worker):
    """The env service's data side: it prepares the one data set, and draws batches that pass over it in order."""

    role = "env"

    def __init__(self, cluster: Cluster, manifest: str, steps: int) -> None:
        self._manifest = manifest
        self._steps = steps
        super().__init__(cluster, credit={"simulator": 1, "data": 4}, serves=("datasets", "sampler"))

    def work(self, send: Send) -> Process:
        """Answer a task; it takes no device time."""
        yield self.cluster.simulation.sleep(self.cluster.times.journal_s)
        message = send.message
        assert isinstance(message, PrepareDataset | SampleIndices)
        place: dict[str, Any] = {"task": message.task, "attempt": message.attempt}
        if isinstance(message, PrepareDataset):
            answer: Message = DatasetPrepared(**place, manifest=self._manifest, manifest_nbytes=1)
        else:
            size, steps = message.batch_size, range(message.first_step, message.first_step + message.steps)
            batches = tuple(tuple((step * size + i) % self._steps for i in range(size)) for step in steps)
            answer = IndicesDrawn(**place, batches=batches)
        self.cluster.say(self.peer, answer)


def _rows(item: TrainItem) -> int:
    if item.dataset is not None:
        return len(item.dataset.indices)
    return _samples(item.samples).state.shape[0]


def _parts(rows: int) -> Iterator[int]:
    """Cut rows into forwards of the largest allowed size."""
    while rows > 0:
        yield min(rows, MAX_FORWARD_ROWS)
        rows -= MAX_FORWARD_ROWS
