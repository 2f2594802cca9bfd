"""A small supervised job and all that it leaves, for comparing one run with another bit for bit.

In: a connection, a name for the policy. Out: losses, and how the trained version acts. Never: a number that depends on
anything but the data set, the recipe and the number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

import joynexus
from joynexus import Client, SftPolicy
from services.env.datasets.writer import LeRobotWriter
from tests.chaos.cluster import BACKBONE
from tests.process.test_cluster import CONTRACT

RECIPE = SftPolicy(backbone=BACKBONE, chunk=4, seed=3)
DATASET = "toy"


@dataclass(frozen=True)
class Numbers:
    """What a job leaves: its losses, and the bytes of one chunk of actions of its version."""

    losses: tuple[float, ...]
    actions: bytes


def push(client: Client, folder: Path, seed: int = 0) -> None:
    """Push a set in which the action is a function of the state; its name is that of the folder."""
    random = np.random.default_rng(seed)
    weights = random.normal(size=(4, 2)).astype(np.float32)
    with LeRobotWriter(folder, 10.0, CONTRACT, video=False) as writer:
        for _ in range(3):
            states = random.normal(size=(20, 4)).astype(np.float32)
            images = random.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
            writer.add_episode(states, np.tanh(states @ weights), {"front": images}, "follow the rule")
    info = client.datasets.push(folder.name, folder, progress=False)
    assert (info.state, info.episodes, info.steps) == ("ready", 3, 60), info.faults


def sft(client: Client, policy: str, steps: int) -> joynexus.Job:
    """Submit the job."""
    return client.sft(policy=policy, dataset=DATASET, steps=steps, batch_size=8, create=RECIPE, checkpoint_every=10)


def numbers(client: Client, job: joynexus.Job, policy: str, steps: int, *, timeout_s: float = 240.0) -> Numbers:
    """Wait for its end, and return what it leaves."""
    info = job.wait(progress=False, timeout_s=timeout_s)
    assert (info.state, info.done, info.version) == ("succeeded", steps, 1), info.message
    return Numbers(tuple(job.losses), actions(client, policy, 1))


def actions(client: Client, policy: str, version: int, *, timeout_s: float = 120.0) -> bytes:
    """What a version does with one observation, always the same."""
    random = np.random.default_rng(1)
    picture = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    state = random.normal(size=4).astype(np.float32)
    asked = client.policy(policy)
    answer = asked.act({"front": picture}, "follow the rule", state, version=version, timeout_s=timeout_s)
    assert answer.version == version
    return answer.actions.tobytes()
