"""Simulated tenants: what they do, through the service's public verbs alone.

In: a recipe, a seed. Out: a process that ends when the tenant has what it wanted. Never: a wait that a real tenant
would not have, or a time that is not in the table.

Recipes are those of published configurations:

- LIBERO: RLinf `examples/embodiment/config/libero_spatial_grpo_starvla.yaml`: 64 environments, 4 rollout epochs of 240
  steps in chunks of 8, one pass over the samples, batch 256. (Its micro-batch of 2 is for full fine-tuning; with a
  frozen backbone 32 fit.)
- ManiSkill: RLinf `examples/embodiment/config/maniskill_ppo_openvlaoft.yaml`: 128 environments, 160 steps in chunks of
  8, one pass, batch 640 in micro-batches of 40.
- SFT: StarVLA's default of 16 samples a device, on the two devices that train: 32 a step; the `groot` head.
"""

from __future__ import annotations

import random
from collections import deque

import msgspec

from benchmarks._simulated import BACKBONE, CONTRACT, Client, Cluster
from benchmarks._simulation import Future, Process, gather
from benchmarks._times import Simulator
from joynexus.client._jobs import AT_REST
from joynexus.specs import PolicySpec, SftPolicy, SftSpec
from joynexus.wire import Array
from joynexus.wire.front import (
    AcquireLease,
    Act,
    CreatePolicy,
    FileEntry,
    ForwardBackward,
    GetJob,
    JobInfo,
    Lease,
    OpResult,
    OptimStep,
    Publish,
    PushDataset,
    Samples,
    SubmitJob,
)
from services.master.events import BlobStored
from services.master.tickets import Tickets

POLICY = "policy"
_WINDOW = 32
"""Ops in flight: a tenant sends the next ones before the first is answered."""
_JITTER = 0.2
_LEASE_MS = 3_600_000
_POLL_S = 5.0


class Rl(msgspec.Struct, frozen=True, kw_only=True):
    """A reinforcement-learning recipe; one iteration is rollouts, training, a published version.

    Attributes:
        envs: environments, spread over the env devices.
        chunks: chunks of each environment in one iteration.
        chunk: steps in a chunk.
        micro, batch: samples in a `forward_backward`, and between two `optim_step`s.
    """

    simulator: Simulator
    envs: int
    chunks: int
    chunk: int
    micro: int
    batch: int

    @property
    def samples(self) -> int:
        """Samples of one iteration: each chunk is one."""
        return self.envs * self.chunks


LIBERO = Rl(simulator="libero", envs=64, chunks=120, chunk=8, micro=32, batch=256)
MANISKILL = Rl(simulator="maniskill", envs=128, chunks=20, chunk=8, micro=40, batch=640)
SFT_BATCH = 32


def rl(
    cluster: Cluster,
    client: Client,
    recipe: Rl,
    iterations: int,
    *,
    seed: int = 0,
    shards: int = 0,
    max_staleness: int = 0,
) -> Process:
    """A tenant's two loops: rollouts of the newest version, and training on them; tickets hold back the first.

    Args:
        shards: env devices over which its environments are spread; 0 means all.
        max_staleness: versions that may lie between the one that acted and the one that is trained; 0 makes the two
            loops take turns.
    """
    spec = PolicySpec(backbone=BACKBONE, head="oft", chunk=recipe.chunk, contract=CONTRACT, normalization="none")
    yield client.ask(CreatePolicy(policy=POLICY, spec=spec))
    lease: Lease = yield client.ask(AcquireLease(policy=POLICY, holder="loop", ttl_ms=_LEASE_MS))
    loop = Loop(client, lease.lease)
    first: OpResult = yield loop.publish()
    newest = first.version
    tickets = Tickets(batch=1, max_staleness=max_staleness)  # one ticket for the rollouts of an iteration
    finished: deque[int] = deque()  # versions that acted, iteration by iteration
    changed = Future()

    def wake() -> None:
        nonlocal changed
        woken, changed = changed, Future()
        woken.resolve()

    def produce() -> Process:
        count = shards or len(cluster.envs)
        devices = [(seed + shard) % len(cluster.envs) for shard in range(count)]
        for iteration in range(iterations):
            while not tickets.may_begin(iteration, newest - first.version):
                yield changed
            acting = newest
            rollouts = [
                _rollout(cluster, client, recipe, acting, device, recipe.envs // count, seed, iteration)
                for device in devices
            ]
            yield gather([cluster.simulation.spawn(rollout) for rollout in rollouts])
            finished.append(acting)
            wake()

    cluster.simulation.spawn(produce())
    for iteration in range(iterations):
        while not finished:
            yield changed
        acted = finished.popleft()
        yield cluster.simulation.spawn(_train(loop, recipe))
        published: OpResult = yield loop.publish()
        newest = published.version
        assert tickets.update(iteration) - (acted - first.version) <= max_staleness
        wake()
    return cluster.simulation.now


def sft(cluster: Cluster, client: Client, steps: int, *, batch: int = SFT_BATCH) -> Process:
    """A tenant that pushes a data set and submits a job."""
    digest = f"file of {client.tenant}"
    upload = cluster.connect("front_bulk", lambda send: None)
    cluster.handle(BlobStored(peer=upload, tenant=client.tenant, request="u", digest=digest, nbytes=10))
    yield cluster.simulation.sleep(10 * cluster.times.journal_s)
    files = (FileEntry(path="meta/info.json", digest=digest, nbytes=10),)
    yield client.ask(PushDataset(dataset="demos", files=files))
    create = SftPolicy(backbone=BACKBONE, head="groot", chunk=16, normalization="none")
    spec = SftSpec(policy=POLICY, dataset="demos", steps=steps, batch_size=batch, create=create)
    job: JobInfo = yield client.ask(SubmitJob(key="sft", spec=spec))
    while job.state not in AT_REST:
        yield cluster.simulation.sleep(_POLL_S)
        job = yield client.ask(GetJob(job=job.job, since=steps))
    assert job.state == "succeeded", job
    return cluster.simulation.now


class Loop:
    """The ops of a tenant's own loop, in order."""

    def __init__(self, client: Client, lease: str) -> None:
        self.client = client
        self._lease = lease
        self._seq = 0

    def forward_backward(self, rows: int) -> Future:
        """Send a micro-batch of so many samples."""
        return self.client.ask(
            ForwardBackward(policy=POLICY, lease=self._lease, seq=self._next(), samples=_samples(rows))
        )

    def optim_step(self) -> Future:
        """Step the optimizer."""
        return self.client.ask(OptimStep(policy=POLICY, lease=self._lease, seq=self._next()))

    def publish(self) -> Future:
        """Publish a version."""
        return self.client.ask(Publish(policy=POLICY, lease=self._lease, seq=self._next()))

    def _next(self) -> int:
        self._seq += 1
        return self._seq


def _rollout(
    cluster: Cluster, client: Client, recipe: Rl, version: int, device: int, rows: int, seed: int, iteration: int
) -> Process:
    """One env device's share of the environments, in a closed loop: act, step, act."""
    act, body = act_request(rows, version)
    drawn = random.Random(f"{seed}/{iteration}/{device}")
    for _ in range(recipe.chunks):
        yield client.ask(act, body)
        steps = recipe.chunk * drawn.uniform(1 - _JITTER, 1 + _JITTER)
        yield cluster.step(device, client.tenant, recipe.simulator, rows, steps)


def act_request(rows: int, version: int = 0) -> tuple[Act, bytes]:
    """Make a request to act on so many rows, and its encoding; version 0 asks for the newest."""
    act = Act(
        policy=POLICY,
        version=version,
        state=Array(dtype="<f4", shape=(rows, CONTRACT.state_dim), frame=0),
        images=(),
        instructions=("go",) * rows,
    )
    return act, msgspec.msgpack.encode(act)


def _train(loop: Loop, recipe: Rl) -> Process:
    """One pass over an iteration's samples, some ops ahead of their results."""
    sent: deque[Future] = deque()
    left = recipe.samples
    while left > 0:
        for start in range(0, min(left, recipe.batch), recipe.micro):
            sent.append(loop.forward_backward(min(recipe.micro, left - start)))
            if len(sent) > _WINDOW:
                yield sent.popleft()
        sent.append(loop.optim_step())
        left -= recipe.batch
    yield gather(list(sent))


def _samples(rows: int) -> Samples:
    return Samples(
        state=Array(dtype="<f4", shape=(rows, CONTRACT.state_dim), frame=0),
        action=Array(dtype="<f4", shape=(rows, 8, CONTRACT.action_dim), frame=1),
        action_mask=Array(dtype="|b1", shape=(rows, 8), frame=2),
        images=(),
        instructions=(),
    )
