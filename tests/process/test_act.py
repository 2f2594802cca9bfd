"""A request to act goes through a real master to a stub inference worker and back, whatever is restarted meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from common.runtime import WorkerRuntime
from common.settings import WorkerSettings
from joynexus.client import Client, connect
from joynexus.contract import Camera, Contract
from joynexus.specs import PolicySpec
from joynexus.wire import ArrayPacker, Packet, rebuild
from joynexus.wire.back import (
    PredictDone,
    Predicted,
    PredictGroup,
    Register,
    Role,
    TrainDone,
    TrainGroup,
    WeightsApplied,
    WeightsOffer,
)
from joynexus.wire.front import Act, OpResult
from tests.process.master_process import MasterProcess

CAMERA = Camera(name="top", height=8, width=8)
SPEC = PolicySpec(
    backbone="stub",
    normalization="none",
    chunk=2,
    contract=Contract(robot="r", cameras=(CAMERA,), state_dim=3, action_dim=2),
)
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "raw_tenant.py"


class Stub:
    """A worker in a thread: a trainer that trains nothing, an inference worker that answers with the state's sum."""

    def __init__(self, master: MasterProcess, role: Role, **credit: int) -> None:
        settings = WorkerSettings(
            cluster_file=master.keyring.cluster_file(role), cache_dir=master.folder / f"{role}-cache"
        )
        self.runtime = WorkerRuntime(settings, signals=False)
        self.groups: list[PredictGroup] = []
        self.hold = threading.Event()
        self.hold.set()
        self._register = Register(
            role=role,
            incarnation=self.runtime.incarnation,
            pid=os.getpid(),
            credit=credit,
            backbone="stub",
            backbone_name="stub",
            batch_key="stub",
        )
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Stub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hold.set()
        self.runtime.leave()
        self._thread.join()

    def _run(self) -> None:
        with self.runtime as runtime:
            runtime.register(self._register)
            runtime.wait_registered(30)
            runtime.serve(self._work)

    def _work(self, packet: Packet) -> None:
        match packet.message:
            case TrainGroup() as group:
                self._train(group)
            case WeightsOffer() as offer:
                self.runtime.send(WeightsApplied(tenant=offer.tenant, policy=offer.policy, version=offer.version))
            case PredictGroup() as group:
                self.groups.append(group)
                assert self.hold.wait(30)
                self._predict(group, packet)

    def _train(self, group: TrainGroup) -> None:
        for index, item in enumerate(group.items):
            digest = self.runtime.blobs.put_bytes(b"weights")
            self.runtime.send(
                TrainDone(
                    task=group.task,
                    attempt=group.attempt,
                    tenant=item.tenant,
                    policy=item.policy,
                    seq=item.seq,
                    kind=item.kind,
                    result=OpResult(policy=item.policy, seq=item.seq, version=item.version, digest=digest),
                    checkpoint=digest if item.kind == "checkpoint" else "",
                    nbytes=7,
                    last=index == len(group.items) - 1,
                )
            )

    def _predict(self, group: PredictGroup, packet: Packet) -> None:
        packer, items = ArrayPacker(), []
        for item in group.items:
            act = msgspec.msgpack.decode(item.act, type=Act)
            state = rebuild(act.state, packet.buffers, offset=item.first_buffer)
            picture = rebuild(act.images[0], packet.buffers, offset=item.first_buffer)
            actions = np.full((len(state), 2, 2), state.sum() + float(picture[0, 0, 0, 0]), np.float32)
            items.append(
                Predicted(request=item.request, version=item.version, actions=packer.add(actions), rows=len(state))
            )
        self.runtime.send(PredictDone(task=group.task, attempt=group.attempt, items=tuple(items)), packer.buffers)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterProcess]:
    with MasterProcess(tmp_path) as master:
        master.keyring.issue("laptop", tenant="acme")
        yield master


@pytest.fixture
def client(master: MasterProcess) -> Iterator[Client]:
    with connect(master.keyring.cluster_file("laptop"), timeout_s=30.0) as client:
        with Stub(master, "trainer", train=1):
            client.create_policy("arm", SPEC).publish().result(30)
        yield client


def ask(client: Client, number: int) -> Callable[[], float]:
    picture = np.full((8, 8, 3), number % 256, np.uint8)
    future = client.policy("arm").act_async([picture], "go", np.array([number, 0, 0], np.float32))
    return lambda: float(future.result(60).actions[0, 0])


def test_everybody_gets_the_answer_to_their_own_question(master: MasterProcess, client: Client) -> None:
    with Stub(master, "inference", predict=1) as inference:
        answers = [ask(client, number) for number in range(100)]
        assert [answer() for answer in answers] == [float(2 * number) for number in range(100)]
        assert max(len(group.items) for group in inference.groups) > 1, "requests that wait together go together"


def test_request_that_came_before_the_first_worker_is_answered(master: MasterProcess, client: Client) -> None:
    answer = ask(client, 7)
    with Stub(master, "inference", predict=1):
        assert answer() == 14.0


def test_request_under_way_survives_a_kill_of_the_master(master: MasterProcess, client: Client) -> None:
    with Stub(master, "inference", predict=1) as inference:
        assert ask(client, 1)() == 2.0
        inference.hold.clear()
        answer = ask(client, 5)
        master.kill()
        master.start()
        inference.hold.set()
        assert answer() == 10.0
        assert ask(client, 6)() == 12.0


def test_raw_tenant_acts(master: MasterProcess, client: Client) -> None:
    with Stub(master, "inference", predict=1):
        command = [sys.executable, str(EXAMPLE), str(master.keyring.cluster_file("laptop")), "arm"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert "version 1 acts" in run.stdout
