"""Many workers and many tenants of one master, in this process: real connections, and trainers that only count.

In: a master's keyring, how many of each. Out: ops ordered and their results, whose number says how many ops of the
policy were applied up to there; who is registered. Never: an op applied twice or out of order without being noticed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import joynexus
from common.descriptors import raise_limit
from common.runtime import WorkerRuntime
from common.settings import WorkerSettings
from joynexus import Client
from joynexus.contract import Contract
from joynexus.keyring import Keyring
from joynexus.specs import PolicySpec
from joynexus.wire.back import Register, TrainDone, TrainGroup, TrainItem
from joynexus.wire.front import OpResult

TRAINERS = 4
TRAIN_CREDIT = 2
BACKBONE = "stub"
SPEC = PolicySpec(
    backbone=BACKBONE,
    normalization="none",
    chunk=2,
    contract=Contract(robot="stub", cameras=(), state_dim=3, action_dim=2),
)
CONNECT_S = 60.0

Place = tuple[str, str]
"""Tenant and policy."""


class Herd:
    """Workers (a few of them trainers) and clients, each of a tenant of its own with one policy.

    Args:
        keyring: of the master.
        folder: for what workers put aside.
        workers, clients: how many.

    Attributes:
        misfits: what a trainer was given out of order; stays empty.
        gate: trainers answer while it is set.
    """

    def __init__(self, keyring: Keyring, folder: Path, *, workers: int, clients: int) -> None:
        raise_limit()  # each connection has its own context
        self.workers = workers
        self.misfits: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self._stack = contextlib.ExitStack()
        self._ending = False
        self._checkpoints: dict[str, int] = {}  # blob -> ops that it covers
        watcher = keyring.issue("watcher", tenant="watcher", operator=True)
        tenants = [keyring.issue(f"client-{number}", tenant=f"tenant-{number}") for number in range(clients)]
        roles = ["trainer"] * min(TRAINERS, workers) + ["env"] * max(0, workers - TRAINERS)
        staff = [
            (role, keyring.issue_worker(f"{role}-{number}", roles=(role,)))  # type: ignore[arg-type]  # one of its literals
            for number, role in enumerate(roles, 1000)
        ]
        for number, (role, file) in enumerate(staff):
            self._work(role, WorkerSettings(cluster_file=file, cache_dir=folder / f"worker-{number}"))
        self._watcher = self._stack.enter_context(joynexus.connect(watcher, timeout_s=CONNECT_S))
        with ThreadPoolExecutor(16) as pool:
            self.clients: list[Client] = list(
                pool.map(lambda file: joynexus.connect(file, timeout_s=CONNECT_S), tenants)
            )
            for client in self.clients:
                self._stack.callback(client.close)
            self.policies = list(pool.map(lambda client: client.create_policy("p", SPEC), self.clients))
        self._ordered = [0] * clients
        self._results: list[list[Future[OpResult]]] = [[] for _ in range(clients)]

    def __enter__(self) -> Herd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending = True
        self.gate.set()
        self._stack.close()

    def order(self, ops: int) -> None:
        """Have each client order so many ops."""
        for results, policy in zip(self._results, self.policies, strict=True):
            results += [policy.optim_step() for _ in range(ops)]

    @property
    def under_way(self) -> int:
        """Ops without a result."""
        return sum(not result.done() for results in self._results for result in results)

    def waiting(self) -> int:
        """Ops that the master has and that no trainer has answered."""
        return sum(lane.waiting + lane.running for lane in self._watcher.status().lanes if lane.queue == "training")

    def wrong(self) -> list[str]:
        """Say which results are not those of ops applied once and in order."""
        wrong = list(self.misfits)
        for number, results in enumerate(self._results):
            counts = [result.result(0).metrics["applied"] for result in results if result.done()]
            if counts != [float(count) for count in range(1, len(counts) + 1)]:
                wrong.append(f"tenant-{number} was told {counts}")
        return wrong

    def registered(self) -> int:
        """Workers that the master knows and has not lost."""
        return sum(role.phase != "lost" for role in self._watcher.status().roles)

    # Workers

    def _work(self, role: str, settings: WorkerSettings) -> None:
        runtime = self._stack.enter_context(WorkerRuntime(settings, signals=False, exit=lambda code: None))
        runtime.register(
            Register(
                role=role,  # type: ignore[arg-type]  # one of its literals
                incarnation=runtime.incarnation,
                pid=os.getpid(),
                credit={"train": TRAIN_CREDIT} if role == "trainer" else {"data": 1},
                backbone=BACKBONE,
                backbone_name=BACKBONE,
                batch_key=BACKBONE,
            )
        )
        if role == "trainer":
            thread = threading.Thread(target=self._train, args=(runtime,), name="trainer", daemon=True)
            thread.start()
            self._stack.callback(thread.join)  # before its connection is closed

    def _train(self, runtime: WorkerRuntime) -> None:
        applied: dict[Place, int] = {}
        told: defaultdict[Place, dict[int, OpResult]] = defaultdict(dict)
        while not self._ending:
            packet = runtime.next_work(0.1)
            if packet is None or not isinstance(packet.message, TrainGroup):
                continue
            self.gate.wait()
            group = packet.message
            for slot in group.slots:
                place = slot.tenant, slot.policy
                applied[place] = self._checkpoints[slot.checkpoint] if slot.checkpoint else 0
                told[place].clear()
                if applied[place] != slot.applied_seq:
                    self.misfits.append(f"{place} opened at {applied[place]} instead of {slot.applied_seq}")
            for index, item in enumerate(group.items):
                place = item.tenant, item.policy
                checkpoint = self._checkpoint(runtime, item) if item.kind == "checkpoint" else ""
                if item.kind != "checkpoint" and item.seq not in told[place]:
                    if item.seq != applied[place] + 1:
                        self.misfits.append(f"{place} was given op {item.seq} after op {applied[place]}")
                    applied[place] += 1
                    metrics = {"applied": float(applied[place])}
                    told[place][item.seq] = OpResult(policy=item.policy, seq=item.seq, metrics=metrics)
                runtime.send(
                    TrainDone(
                        task=group.task,
                        attempt=group.attempt,
                        tenant=item.tenant,
                        policy=item.policy,
                        seq=item.seq,
                        kind=item.kind,
                        result=told[place].get(item.seq) or OpResult(policy=item.policy, seq=item.seq),
                        checkpoint=checkpoint,
                        nbytes=10,
                        step=applied[place],
                        last=index == len(group.items) - 1,
                    )
                )

    def _checkpoint(self, runtime: WorkerRuntime, item: TrainItem) -> str:
        digest = runtime.blobs.put_bytes(f"{item.tenant}/{item.policy}/{item.seq}".encode())
        self._checkpoints[digest] = item.seq
        return digest
