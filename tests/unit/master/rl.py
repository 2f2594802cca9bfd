"""RL jobs of tests: a spec, what was rolled out and trained for it, and whether that is right."""

from __future__ import annotations

import msgspec

from common.journal.records import VersionRecord
from joynexus.specs import PpoSpec, RlSpec
from joynexus.wire.back import Rollout, TrainItem
from joynexus.wire.front import GetPolicy, PolicyInfo
from services.master.plan import compile_rl
from tests.unit.master.actors import BLOBS, PAGES, FakeEnv, FakeTrainer
from tests.unit.master.world import World

PPO = PpoSpec(epochs=2)


def rl(**changes: object) -> RlSpec:
    spec = RlSpec(
        policy="p", env="metaworld/reach-v3", algorithm=PPO, updates=4, episodes=12, checkpoint_every=2, seed=3
    )
    return msgspec.structs.replace(spec, **changes)


def items(trainer: FakeTrainer) -> list[TrainItem]:
    return [item for group in trainer.groups for item in group.items if item.kind != "checkpoint"]


def rollouts(env: FakeEnv) -> list[Rollout]:
    return [task for task in env.tasks if isinstance(task, Rollout)]


def policy(world: World) -> PolicyInfo:
    return world.ask(GetPolicy(policy="p"), PolicyInfo)


def versions(world: World) -> list[VersionRecord]:
    """Versions of the policy that the journal has."""
    return [version for version in world.journal.of(VersionRecord) if version.tenant == "a"]


def trained(world: World) -> list[tuple[Rollout, ...]]:
    """Which pages the newest version was trained on, update by update."""
    newest = max(versions(world), key=lambda version: version.version)
    weights = BLOBS[newest.digest]
    updates = range(len(weights.trained) // PPO.epochs)
    order = [(update, epoch) for update in updates for epoch in range(PPO.epochs)]
    assert [(update, epoch) for update, epoch, _ in weights.trained] == order, "each epoch once, in order"
    first, second = ([digests for _, epoch, digests in weights.trained if epoch == number] for number in range(2))
    assert first == second, "all epochs of an update are over the same pages"
    return [tuple(PAGES[digest] for digest in digests) for digests in first]


def check(world: World, spec: RlSpec, first: int = 1) -> None:
    """Every page was trained on once, in order, from its own seeds, and none was too old."""
    plan = compile_rl(spec, rollout_episodes=world.config.rollout_episodes)
    updates = trained(world)
    assert len(updates) == spec.updates
    for update, pages in enumerate(updates):
        numbers = range(update * plan.pages, (update + 1) * plan.pages)
        assert [(page.seeds, page.draws) for page in pages] == [plan.page(number) for number in numbers]
        assert all(0 <= update - (page.version - first) <= spec.max_staleness for page in pages)
