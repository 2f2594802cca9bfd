"""The shipped master core in a simulated cluster: its messages take simulated time, its decisions CPU time.

In: a table of service times, a configuration, how many devices of each kind. Out: `Cluster`, of which tenants ask what
they would ask a real one; and what it measured: busy time by device, groups, forwards, seconds spent in the core.
Never: a change of the core or a look inside it: it is driven through events alone, as the master's shell drives it.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from benchmarks._devices import EnvWorker, Features, InferenceDevice, TrainerDevice
from benchmarks._simulation import Future, Simulation, Station
from benchmarks._times import Head, Simulator, Times
from common.journal.records import OpRecord
from joynexus.contract import Camera, Contract
from joynexus.datasets import DatasetManifest, EpisodeEntry
from joynexus.wire import Buffer, ErrorCode, Failure, Header, Message, kind_of
from joynexus.wire.back import PredictGroup, TrainGroup
from joynexus.wire.front import Accepted, GetUsage, UsageReport
from services.master.commands import Command, Persist, Send
from services.master.config import CoreConfig
from services.master.core import MasterCore
from services.master.events import BackMessage, Door, Event, FrontMessage, Peer, Persisted, Tick

Reuse = Literal["none", "datasets", "everything"]
"""Which features are kept: none; those of data sets (the default of the services); those of rollouts as well."""

BACKBONE = "vla-4b"
CONTRACT = Contract(robot="arm", cameras=(Camera(name="front", height=224, width=224),), state_dim=8, action_dim=7)
MANIFEST = "m" * 64

FORMS_A_GROUP = "forms a group"
"""Kind of decision: any event upon which a group leaves for a device."""

_FAR_S = 1e9
CONFIG = CoreConfig(
    beat_ms=60_000,
    silent_s=_FAR_S,  # simulated workers do not die, so they do not beat either
    act_deadline_s=3600.0,
    batch_rows=32,
    max_rows=64,
    batch_wait_s=0.05,
    usage_s=60.0,
)
"""What an operator of such GPUs would set; everything else is the default."""


class SimulationError(Exception):
    """The core refused what a simulated tenant asked."""


class Cluster:
    """A master core, devices around it, and tenants' connections.

    Args:
        simulation: the clock.
        times: service times.
        trainers, inference, envs: devices of each kind.
        reuse: which features are kept.
        dataset_steps: steps of the one data set that tenants may push.
    """

    def __init__(
        self,
        simulation: Simulation,
        times: Times,
        *,
        trainers: int = 2,
        inference: int = 2,
        envs: int = 4,
        reuse: Reuse = "datasets",
        dataset_steps: int = 50_000,
        config: CoreConfig = CONFIG,
    ) -> None:
        self.simulation = simulation
        self.times = times
        self.config = config
        self.handled = 0
        self.handle_s = 0.0
        self.decisions: list[tuple[str, float]] = []  # kind of event, CPU seconds
        self._dataset = _manifest(dataset_steps)
        self._payloads: dict[tuple[str, str, int], bytes] = {}
        self._ids = itertools.count(1)
        self._peers = itertools.count(1)
        self._actors: dict[Peer, Callable[[Send], None]] = {}
        self._ticking = _FAR_S
        ids = lambda: f"{next(self._ids):032x}"  # noqa: E731 - it is passed twice
        self.core = MasterCore(config, new_id=ids, new_secret=ids, sources=self, now=0.0)
        features = Features(reuse)
        self.env_worker = EnvWorker(self, MANIFEST, dataset_steps)
        self.trainers = [TrainerDevice(self, features, BACKBONE) for _ in range(trainers)]
        self.inference = [InferenceDevice(self, BACKBONE) for _ in range(inference)]
        self.envs = [Station(simulation) for _ in range(envs)]
        self.env_use: defaultdict[str, float] = defaultdict(float)
        self.heads: dict[tuple[str, str], Head] = {}

    # What the core may read

    def payload(self, tenant: str, policy: str, seq: int) -> bytes:
        """Return the samples of an op that the core did not keep in memory."""
        return self._payloads[tenant, policy, seq]

    def manifest(self, digest: str) -> DatasetManifest:
        """Return the one data set's manifest."""
        assert digest == MANIFEST
        return self._dataset

    # What happens

    def connect(self, door: Door, actor: Callable[[Send], None]) -> Peer:
        """Open a connection; what is sent to it arrives after a hop."""
        peer = Peer(door, f"peer{next(self._peers)}".encode())
        self._actors[peer] = actor
        return peer

    def handle(self, event: Event) -> None:
        """Have the core handle an event now, and run what it commands."""
        started = time.thread_time()  # CPU time: whoever else uses the host does not count
        commands = self.core.handle(event, self.simulation.now)
        due = self.core.next_deadline()
        took = time.thread_time() - started
        self.handled += 1
        self.handle_s += took
        self.decisions.append((_kind(event, commands), took))
        for command in commands:
            match command:
                case Send():
                    self.simulation.after(self.times.hop_s, _call(self._actors[command.peer], command))
                case Persist():
                    self._write(command)
        if due is not None and due < self._ticking:
            self._ticking = due
            self.simulation.after(max(0.0, due - self.simulation.now), lambda: self._tick(due))

    def say(self, peer: Peer, message: Message, *, buffers: tuple[Buffer, ...] = ()) -> None:
        """Have a worker send a message."""
        event = BackMessage(
            peer=peer,
            key_name=f"worker{peer.routing_id.decode()}",
            roles=("trainer", "inference", "env"),
            header=Header(kind=kind_of(message), id=f"w{next(self._ids)}"),
            message=message,
            body=b"",
            buffers=buffers,
        )
        self.simulation.after(self.times.hop_s, lambda: self.handle(event))

    def step(self, device: int, tenant: str, simulator: Simulator, rows: int, steps: float) -> Future:
        """Step environments on an env device; it does one batch at a time, first come first served."""
        seconds = self.times.simulate(simulator, rows, steps)
        self.env_use[tenant] += seconds
        return self.envs[device].work(seconds)

    def _write(self, command: Persist) -> None:
        for record in command.records:
            if isinstance(record, OpRecord) and record.payload:
                self._payloads[record.tenant, record.policy, record.seq] = record.payload
        outcome: Event = Persisted(token=command.token)
        self.simulation.after(self.times.journal_s, lambda: self.handle(outcome))

    def _tick(self, due: float) -> None:
        if due == self._ticking:
            self._ticking = _FAR_S
            self.handle(Tick())


class _Asked(NamedTuple):
    message: Message
    body: bytes
    buffers: tuple[Buffer, ...]
    answer: Future


class Client:
    """One tenant's connection.

    Attributes:
        asked, answered: requests, and those that have their one final answer.
        refused: answers that said to ask again later; it did.
    """

    def __init__(self, cluster: Cluster, tenant: str) -> None:
        self.tenant = tenant
        self.asked = 0
        self.answered = 0
        self.refused = 0
        self._cluster = cluster
        self._pending: dict[str, _Asked] = {}
        self._peer = cluster.connect("front", self._take)

    def ask(self, message: Message, body: bytes | None = None, buffers: tuple[Buffer, ...] = ()) -> Future:
        """Send a request; the future is its final answer (of an op: its result).

        Args:
            message: the request.
            body: its encoding, if it is at hand.
            buffers: its arrays; only devices that really compute look at them.
        """
        self.asked += 1
        body = msgspec.msgpack.encode(message) if body is None else body
        request = _Asked(message, body, buffers, Future())
        self._send(f"r{self.asked}", request)
        return request.answer

    def _send(self, id: str, request: _Asked) -> None:
        self._pending[id] = request
        event = FrontMessage(
            peer=self._peer,
            tenant=self.tenant,
            scope="all",
            operator=False,
            header=Header(kind=kind_of(request.message), id=id),
            message=request.message,
            body=request.body,
            buffers=request.buffers,
        )
        self._cluster.simulation.after(self._cluster.times.hop_s, lambda: self._cluster.handle(event))

    def _take(self, send: Send) -> None:
        if isinstance(send.message, Accepted) or send.re not in self._pending:
            return
        request = self._pending.pop(send.re)
        failed = send.message
        if isinstance(failed, Failure):
            if failed.code != ErrorCode.OVERLOADED:
                raise SimulationError(f"{kind_of(request.message)}: {failed.message}")
            self.refused += 1
            self._cluster.simulation.after(failed.retry_after_ms / 1000, lambda: self._send(send.re, request))
            return
        self.answered += 1
        request.answer.resolve(send.message)


def usage(cluster: Cluster, clients: Mapping[str, Client]) -> dict[str, dict[str, float]]:
    """Return what the service metered, by tenant."""
    asked = {tenant: client.ask(GetUsage()) for tenant, client in clients.items()}
    cluster.simulation.run(lambda: all(future.done for future in asked.values()))
    metered: dict[str, dict[str, float]] = {}
    for tenant, future in asked.items():
        report: UsageReport = future.value
        metered[tenant] = {
            "trainer_s": sum(line.trainer_s for line in report.lines),
            "inference_s": sum(line.inference_s for line in report.lines),
            "env_s": cluster.env_use[tenant],
            "backbone_forwards": sum(line.backbone_forwards for line in report.lines),
        }
    return metered


def _manifest(steps: int, episode: int = 125) -> DatasetManifest:
    lengths = [episode] * (steps // episode) + [steps % episode] * (steps % episode > 0)
    return DatasetManifest(
        source_format="lerobot-v3.0",
        source_digest="s",
        fps=10.0,
        contract=CONTRACT,
        statistics=None,  # type: ignore[arg-type]  # nothing here is normalised
        episodes=tuple(EpisodeEntry(length=n, instruction="go", blob="b" * 64, nbytes=1) for n in lengths),
    )


def _kind(event: Event, commands: Sequence[Command]) -> str:
    for command in commands:
        if isinstance(command, Send) and isinstance(command.message, TrainGroup | PredictGroup):
            return FORMS_A_GROUP
    return event.header.kind if isinstance(event, FrontMessage | BackMessage) else type(event).__name__


def _call(actor: Callable[[Send], None], send: Send) -> Callable[[], None]:
    return lambda: actor(send)
