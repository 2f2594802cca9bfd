"""Tenants together on one cluster of real processes: two trainers, two inference replicas, four tenants.

Each tenant's numbers are compared with those of the same tenant alone, bit for bit where the start-up probe says that
this host holds it.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

import joynexus
from joynexus import Client, JoyNexusError, SftPolicy, launch
from joynexus.contract import Camera, Contract
from joynexus.keyring import Keyring
from joynexus.local import LocalCluster
from joynexus.specs import OptimizerSpec
from joynexus.wire.front import LaneStatus
from services.env.datasets.writer import LeRobotWriter
from tests.process.clusters import running
from tests.waiting import until

BACKBONE = "tiny-qwen3vl"
TENANTS = ("ada", "ben", "cho", "dee")
STEPS = 40
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # on a busy host a cluster starts in minutes


class Task(msgspec.Struct, frozen=True):
    """What a tenant trains: its robot, its data, its head."""

    state: int
    action: int
    side: int
    create: SftPolicy
    batch: int


TASKS = {
    "ada": Task(4, 2, 32, SftPolicy(backbone=BACKBONE, chunk=4, seed=1), 8),
    "ben": Task(7, 7, 64, SftPolicy(backbone=BACKBONE, head="groot", chunk=8, seed=2), 4),
    "cho": Task(3, 3, 32, SftPolicy(backbone=BACKBONE, chunk=1, seed=3, adapter="bottleneck"), 16),
    "dee": Task(
        6, 4, 48, SftPolicy(backbone=BACKBONE, chunk=6, seed=4, optimizer=OptimizerSpec(lr=3e-4, warmup_steps=5)), 5
    ),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("many")
    options = launch.Options(backbone=BACKBONE, trainers=2, inference=2, simulator_processes=1, timeout_s=300)
    with running(folder, options) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def operator(cluster: LocalCluster) -> Iterator[Client]:
    with joynexus.connect(cluster.client_file) as client:
        yield client


@pytest.fixture(scope="module")
def clients(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Client]]:
    """A connection and a data set for each tenant."""
    made: dict[str, Client] = {}
    try:
        for tenant in TENANTS:
            made[tenant] = joynexus.connect(Keyring(cluster.keys).issue(tenant, tenant=tenant), timeout_s=30)
            push(made[tenant], TASKS[tenant], tmp_path_factory.mktemp("data") / tenant)
        yield made
    finally:
        for client in made.values():
            client.close()


def push(client: Client, task: Task, folder: Path) -> None:
    camera = Camera(name="front", height=task.side, width=task.side)
    contract = Contract(robot="toy", cameras=(camera,), state_dim=task.state, action_dim=task.action, rate_hz=10.0)
    draws = np.random.default_rng(task.state)
    rule = draws.normal(size=(task.state, task.action)).astype(np.float32)
    with LeRobotWriter(folder, 10.0, contract, video=False) as writer:
        for _ in range(3):
            states = draws.normal(size=(16, task.state)).astype(np.float32)
            pictures = draws.integers(0, 256, (16, task.side, task.side, 3), dtype=np.uint8)
            writer.add_episode(states, np.tanh(states @ rule), {"front": pictures}, f"rule {task.state}")
    info = client.datasets.push("own", folder, progress=False)
    assert info.state == "ready", info.faults


def train(client: Client, tenant: str, policy: str, steps: int = STEPS) -> joynexus.Job:
    task = TASKS[tenant]
    return client.sft(
        policy=policy,
        dataset="own",
        steps=steps,
        batch_size=task.batch,
        create=task.create,
        checkpoint_every=10,
        seed=task.state,
    )


@pytest.fixture(scope="module")
def alone(clients: dict[str, Client]) -> dict[str, list[float]]:
    """Each tenant's curve when nobody else trains."""
    curves = {}
    for tenant, client in clients.items():
        job = train(client, tenant, "alone")
        job.wait(progress=False, timeout_s=120)
        curves[tenant] = job.losses
    return curves


@pytest.fixture(scope="module")
def exact(operator: Client) -> bool:
    details = [role.detail for role in operator.status().roles if role.role == "trainer"]
    return all("exact" in detail["numerics"] and "not exact" not in detail["numerics"] for detail in details)


def same(curve: list[float], expected: list[float], *, exact: bool) -> None:
    if exact:
        assert curve == expected
    else:  # the probe says that this host cannot hold it; the bound is that of ADR 7
        np.testing.assert_allclose(curve, expected, rtol=2e-2)


def home(client: Client, policy: str) -> str:
    return client.policy(policy).info().home


@pytest.mark.parametrize("order", [0, 1])
def test_training_together_gives_each_tenant_its_curve_of_training_alone(
    clients: dict[str, Client], alone: dict[str, list[float]], exact: bool, order: int
) -> None:
    tenants = random.Random(order).sample(TENANTS, len(TENANTS))
    jobs = {tenant: train(clients[tenant], tenant, f"together-{order}") for tenant in tenants}
    for tenant, job in jobs.items():
        job.wait(progress=False, timeout_s=180)
        same(job.losses, alone[tenant], exact=exact)


def test_versions_trained_together_act_as_those_trained_alone(
    clients: dict[str, Client], alone: dict[str, list[float]], exact: bool
) -> None:
    for tenant, client in clients.items():
        task = TASKS[tenant]
        picture = np.full((task.side, task.side, 3), 100, np.uint8)
        state = np.linspace(-1, 1, task.state, dtype=np.float32)
        chunks = [
            client.policy(name).act({"front": picture}, "go", state, seed=5).actions for name in ("alone", "together-0")
        ]
        np.testing.assert_allclose(chunks[0], chunks[1], rtol=0 if exact else 1e-2)
        assert chunks[0].shape == (task.create.chunk, task.action)


def test_policy_that_moves_in_the_middle_of_its_training_has_the_curve_of_one_that_stays(
    clients: dict[str, Client], operator: Client, alone: dict[str, list[float]], exact: bool
) -> None:
    client = clients["ben"]
    job = train(client, "ben", "moved")
    until(lambda: job.info().done >= 12)
    before = home(client, "moved")
    other = {"trainer-1": "trainer-2", "trainer-2": "trainer-1"}[before]
    assert operator.move_policy("moved", other, tenant="ben").home == other
    assert job.info().done < STEPS, "it moved while it trained"
    job.wait(progress=False, timeout_s=120)
    assert home(client, "moved") == other
    same(job.losses, alone["ben"], exact=exact)


def test_move_that_cannot_be_is_refused_in_one_sentence(clients: dict[str, Client], operator: Client) -> None:
    with pytest.raises(JoyNexusError, match="trainer-9"):
        operator.move_policy("alone", "trainer-9", tenant="ada")
    with pytest.raises(JoyNexusError) as foreign:
        clients["ada"].move_policy("alone", "trainer-1", tenant="ben")
    assert foreign.value.code == "FORBIDDEN"


@pytest.mark.parametrize("signal_", [signal.SIGTERM, signal.SIGKILL])
def test_trainer_that_goes_in_the_middle_costs_nobody_a_step(
    cluster: LocalCluster,
    clients: dict[str, Client],
    alone: dict[str, list[float]],
    exact: bool,
    signal_: signal.Signals,
) -> None:
    jobs = {tenant: train(clients[tenant], tenant, f"left-{signal_.value}") for tenant in TENANTS}
    until(lambda: all(job.info().done >= 8 for job in jobs.values()))
    pid = cluster.running("trainer")
    os.kill(pid, signal_)
    for tenant, job in jobs.items():
        job.wait(progress=False, timeout_s=180)
        same(job.losses, alone[tenant], exact=exact)
    until(lambda: cluster.running("trainer") not in (0, pid))


def test_status_shows_verdict_lanes_and_homes(
    clients: dict[str, Client], operator: Client, cluster: LocalCluster
) -> None:
    until(lambda: sum(role.phase != "lost" for role in operator.status().roles if role.role == "trainer") == 2)
    job = train(clients["cho"], "cho", "seen", steps=400)
    seen: list[LaneStatus] = []

    def running() -> bool:
        lanes = [lane for lane in operator.status().lanes if (lane.queue, lane.tenant) == ("training", "cho")]
        seen.extend(lane for lane in lanes if lane.running)
        return bool(seen)

    until(running)
    assert (seen[0].weight, seen[0].priority) == (1.0, 0)
    assert not any(lane.tenant == "cho" for lane in clients["ada"].status().lanes)
    job.cancel()
    for role in operator.status().roles:
        if role.role in ("trainer", "inference"):
            assert role.detail["numerics"]
