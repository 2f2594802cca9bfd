"""The four tenants' jobs, as specs for real clients: recipes of `_tenants`, sized to take equally long alone.

In: a number of updates of the LIBERO tenant. Out: a `JobSpec` a tenant, and the data set that one of them imitates.
Never: a recipe other than those of the workload simulator, but for the number of episodes in an update.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np

from benchmarks._isolated import Alone, Devices, rl_iteration, sft_step
from benchmarks._tenants import LIBERO, MANISKILL, SFT_BATCH, Rl
from benchmarks._times import Times
from benchmarks._waiting_device import ACTION, BACKBONE, CAMERA, INSTRUCTION, STATE, picture
from joynexus.contract import Contract
from joynexus.specs import Algorithm, GrpoSpec, JobSpec, ModuleConfig, PpoSpec, RlPolicy, RlSpec, SftPolicy, SftSpec
from joynexus.wire.front import JobInfo
from services.env.datasets.writer import LeRobotWriter

TENANTS = ("rl-libero", "rl-maniskill-1", "rl-maniskill-2", "sft")
DATASET = "demos"
EPOCHS = 9
"""Passes of the SFT job over its data set, as in `benchmarks.simulate`."""
_EPISODE = {"libero": 30, "maniskill": 20}
"""Chunks of an episode: 240 and 160 steps in chunks of 8."""
_GROUP = 8
_SMALL: dict[str, ModuleConfig] = {
    "oft": {"heads": 1, "width": 8, "hidden": 16},
    "groot": {"layers": 1, "heads": 2, "width": 16},
}
"""Heads whose real work hides behind the time that the table gives to large ones."""


class Jobs(msgspec.Struct, frozen=True):
    """How often each tenant does its unit of work: an update, or a step.

    Attributes:
        recipes: by RL tenant; LIBERO's with part of the recipe's rollout epochs, so that jobs are short.
    """

    recipes: dict[str, Rl]
    counts: dict[str, int]

    @property
    def micro(self) -> dict[int, int]:
        """Rows of a micro-batch, by rows of a minibatch."""
        return {recipe.batch: recipe.micro for recipe in self.recipes.values()}

    @property
    def dataset_steps(self) -> int:
        """Steps of the data set."""
        return math.ceil(self.counts["sft"] * SFT_BATCH / EPOCHS)

    def alone(self, times: Times, tenant: str, devices: Devices) -> Alone:
        """Return what a tenant's job takes alone by arithmetic: nothing kept, no messages."""
        if tenant == "sft":
            return sft_step(times, devices) * self.counts[tenant]
        return rl_iteration(times, self.recipes[tenant], devices) * self.counts[tenant]


def make_jobs(times: Times, devices: Devices, *, updates: int, rollout_epochs: int) -> Jobs:
    """Size the jobs so that all take about as long as `updates` of the LIBERO tenant.

    Args:
        times: the table.
        devices: on which each has them alone.
        updates: of the LIBERO tenant.
        rollout_epochs: of its update, of four that the recipe has.
    """
    libero = msgspec.structs.replace(LIBERO, chunks=rollout_epochs * _EPISODE["libero"])
    recipes = {"rl-libero": libero, "rl-maniskill-1": MANISKILL, "rl-maniskill-2": MANISKILL}
    once = Jobs(recipes, dict.fromkeys(TENANTS, 1))
    length_s = updates * once.alone(times, "rl-libero", devices).seconds
    counts = {tenant: max(1, round(length_s / once.alone(times, tenant, devices).seconds)) for tenant in TENANTS}
    return Jobs(recipes, counts)


def spec_of(jobs: Jobs, tenant: str) -> JobSpec:
    """Return a tenant's job."""
    count = jobs.counts[tenant]
    if tenant == "sft":
        create = SftPolicy(backbone=BACKBONE, head="groot", head_config=_SMALL["groot"], chunk=16)
        return SftSpec(policy="policy", dataset=DATASET, steps=count, batch_size=SFT_BATCH, create=create)
    recipe = jobs.recipes[tenant]
    algorithm: Algorithm = PpoSpec(level="chunk", epochs=1, minibatch=recipe.batch)
    if recipe.simulator == "libero":
        algorithm = GrpoSpec(
            group_size=_GROUP, level="chunk", epochs=1, minibatch=recipe.batch, filter_low=-1e9, filter_high=1e9
        )
    return RlSpec(
        policy="policy",
        env=f"{recipe.simulator}/task",
        algorithm=algorithm,
        updates=count,
        episodes=recipe.samples // _EPISODE[recipe.simulator],
        episode_limit=_EPISODE[recipe.simulator] * recipe.chunk,
        create=RlPolicy(
            backbone=BACKBONE, head="oft", head_config=_SMALL["oft"], chunk=recipe.chunk, cameras=(CAMERA,)
        ),
        warmup_episodes=1,
        first_seed=1_000_000 * (1 + TENANTS.index(tenant)),
    )


def observations(jobs: Jobs, info: JobInfo) -> int:
    """Count what a job saw: steps of its data set, or decisions of its episodes and the ends whose value was asked."""
    spec = info.spec
    if isinstance(spec, SftSpec):
        return min(jobs.dataset_steps, spec.steps * spec.batch_size)
    ends = isinstance(spec, RlSpec) and isinstance(spec.algorithm, PpoSpec)
    return sum(int(point.metrics["decisions"]) + ends * point.episodes for point in info.updates)


def write_dataset(folder: Path, steps: int, episode: int = 125) -> None:
    """Write a data set of so many steps; no picture is there twice."""
    contract = Contract(robot="arm", cameras=(CAMERA,), state_dim=STATE, action_dim=ACTION)
    random = np.random.default_rng(0)
    with LeRobotWriter(folder, 10.0, contract, video=False) as writer:
        for first in range(0, steps, episode):
            count = min(episode, steps - first)
            pictures = np.stack([picture("demonstration", first + step) for step in range(count)])
            states = random.standard_normal((count, STATE), np.float32)
            actions = random.uniform(-1, 1, (count, ACTION)).astype(np.float32)
            writer.add_episode(states, actions, {CAMERA.name: pictures}, INSTRUCTION)
