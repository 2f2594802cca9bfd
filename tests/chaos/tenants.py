"""What tenants do while their cluster fails, and what they keep for comparison with a calm run, bit for bit.

In: a connection, the name of a policy, how much to do. Out: losses, curves, weights, what the cluster said. Never: an
answer that is not compared with the tenant's own count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import joynexus
from joynexus import Client, export_layout
from joynexus.keyring import Keyring
from tests.chaos.cluster import BACKBONE, Cluster
from tests.chaos.jobs import DATASET, RECIPE, actions
from tests.process import test_rl

LAST_S = 600.0
"""What was begun may take so long after the last fault."""
PUBLISH_EVERY = 25
"""Steps of the loop between two publications."""


class Tenant(threading.Thread):
    """Works on a connection of its own; keeps what it made, or what went wrong."""

    def __init__(self, cluster: Cluster, name: str, work: Callable[[Client], object]) -> None:
        super().__init__(name=name, daemon=True)
        self._file = Keyring(cluster.local.keys).cluster_file(name)
        self._work = work
        self.made: object = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with joynexus.connect(self._file, timeout_s=60) as client:
                self.made = self._work(client)
        except BaseException as error:
            self.error = error

    def result(self, timeout_s: float) -> object:
        """Wait for what it makes."""
        self.join(timeout_s)
        assert not self.is_alive(), f"{self.name} is still at work"
        if self.error is not None:
            raise self.error
        return self.made


@dataclass(frozen=True)
class Imitated:
    """What an SFT job leaves."""

    losses: tuple[float, ...]
    weights: bytes


def imitate(client: Client, policy: str, steps: int, folder: Path, timeout_s: float) -> Imitated:
    """Run an SFT job to its end."""
    job = client.sft(policy=policy, dataset=DATASET, steps=steps, batch_size=8, create=RECIPE, checkpoint_every=25)
    info = job.wait(progress=False, timeout_s=timeout_s)
    assert (info.state, info.done, info.version) == ("succeeded", steps, 1), info.message
    assert client.policy(policy).info().step == steps
    return Imitated(tuple(job.losses), weights(client, policy, folder))


def reinforce(
    client: Client, policy: str, updates: int, timeout_s: float, *, staleness: int = 0
) -> list[tuple[object, ...]]:
    """Run an RL job to its end: every rollout acted with a version within the bound, each decision counts once."""
    spec = test_rl.rl(policy, updates=updates, max_staleness=staleness)
    job = client.submit(spec)
    info = job.wait(progress=False, timeout_s=timeout_s)
    assert (info.state, info.done, info.version) == ("succeeded", updates, updates + 1), info.message
    points = job.updates
    assert [point.update for point in points] == list(range(updates))
    assert all(0 <= point.staleness <= staleness for point in points)
    assert all(point.metrics["decisions"] == spec.episodes * 6 for point in points)
    return test_rl.numbers(points)


@dataclass(frozen=True)
class Driven:
    """What a loop was told."""

    losses: list[float]
    actions: list[bytes]  # of each version
    weights: bytes  # of the last one
    longest_s: float


def drive(client: Client, policy: str, folder: Path, more: Callable[[int], bool]) -> Driven:
    """Train step by step while there is `more`, counting; what the cluster says must be that count."""
    losses: list[float] = []
    acted: list[bytes] = []
    longest = 0.0

    def publish() -> None:
        version = len(acted) + 1
        assert driven.publish().result(LAST_S).version == version
        acted.append(actions(client, policy, version, timeout_s=LAST_S))

    with client.create_policy(policy, dataset=DATASET, backbone=BACKBONE, chunk=4, seed=5) as driven:
        while more(len(losses)):
            since, first = time.monotonic(), 8 * (len(losses) % 7)
            loss = driven.forward_backward(dataset=DATASET, indices=range(first, first + 8))
            step = driven.optim_step()
            losses.append(loss.result(LAST_S).metrics["loss"])
            assert step.result(LAST_S).metrics["step"] == len(losses)
            if len(losses) % PUBLISH_EVERY == 0:
                publish()
            longest = max(longest, time.monotonic() - since)
        publish()
        info = driven.info()
        assert (info.step, info.next_seq) == (len(losses), 1 + 2 * len(losses) + len(acted))
    return Driven(losses, acted, weights(client, policy, folder), longest)


def weights(client: Client, policy: str, folder: Path) -> bytes:
    """The tensors of a policy's newest version, as they lie in its file (whose header names the policy)."""
    file = client.policy(policy).export(folder / client.tenant / policy) / export_layout.WEIGHTS
    content = file.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]
