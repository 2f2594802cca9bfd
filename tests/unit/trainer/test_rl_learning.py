"""RL learns: a policy that acts on a point mass and is trained through the trainer reaches its goals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from joynexus.specs import Algorithm, CriticSpec, ExplorationSpec, GrpoSpec, OptimizerSpec, PpoSpec
from tests.unit.trainer.rollouts import INSTRUCTION, RlLoop
from tests.unit.workers import Arrays, Bench, Group, opening, spec

PPO = PpoSpec(minibatch=64, epochs=4, gamma=0.95, critic=CriticSpec(width=32))
GRPO = GrpoSpec(group_size=8, minibatch=48, epochs=4)
GROOT = {"width": 32, "layers": 2, "heads": 2, "repeated_diffusion_steps": 2}
TESTS = [(10_000 + number, number) for number in range(64)]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # on a busy host each takes minutes


def loop_of(tmp_path: Path, algorithm: Algorithm, lr: float, exploration: ExplorationSpec, **changes: Any) -> RlLoop:
    made_of = msgspec.structs.replace(spec(cameras=0), chunk=2, **changes)
    return RlLoop(
        Bench(tmp_path),
        made_of,
        algorithm,
        reward="dense" if isinstance(algorithm, PpoSpec) else "success",
        episodes=32 if isinstance(algorithm, PpoSpec) else 64,
        exploration=exploration,
        optimizer=OptimizerSpec(lr=lr),
    )


def success(loop: RlLoop) -> float:
    """Rate of success of the newest version on fixed seeds, exploring."""
    return float(loop.collected(loop.acting, TESTS).success.mean())


def improve(loop: RlLoop, updates: int) -> tuple[float, float]:
    """Return the rates of success before and after."""
    loop.start()
    before = success(loop)
    for number in range(updates):
        loop.update(number, loop.roll(loop.acting, number))
        loop.publish()
    return before, success(loop)


def imitate_a_slow_expert(loop: RlLoop, steps: int) -> None:
    """Supervised steps on actions of the right direction that are too small to arrive in time."""
    dice, group = np.random.default_rng(0), Group(opening(loop.name, loop.spec))
    for _ in range(steps):
        arrays = Arrays(0, rows=64, cameras=0)
        arrays.instructions = [INSTRUCTION] * 64
        arrays.state = dice.uniform(-1, 1, (64, 4)).astype(np.float32)
        way = arrays.state[:, 2:] - arrays.state[:, :2]
        way = 0.3 * way / np.maximum(np.linalg.norm(way, axis=1, keepdims=True), 0.2)
        arrays.action, arrays.mask = np.repeat(way[:, None], 2, axis=1), np.ones((64, 2), np.bool_)
        loop.seq += 1
        group.train(loop.name, loop.seq, arrays)
    loop.bench.done(group)


@pytest.mark.parametrize(("algorithm", "updates"), [(PPO, 20), (GRPO, 30)], ids=["ppo", "grpo"])
def test_oft_learns_from_scratch_to_reach_its_goals(tmp_path: Path, algorithm: Algorithm, updates: int) -> None:
    before, after = improve(loop_of(tmp_path, algorithm, 3e-3, ExplorationSpec(std=0.5)), updates)
    assert before < 0.3
    assert after > 0.85


@pytest.mark.parametrize(
    ("algorithm", "flow", "lr"), [(PPO, "sde", 1e-3), (GRPO, "noise", 5e-4)], ids=["ppo, flow-sde", "grpo, flow-noise"]
)
def test_groot_learns_from_rewards_what_a_slow_expert_did_not_show(
    tmp_path: Path, algorithm: Algorithm, flow: Any, lr: float
) -> None:
    loop = loop_of(tmp_path, algorithm, lr, ExplorationSpec(flow=flow), head="groot", head_config=GROOT)
    loop.spec = msgspec.structs.replace(loop.spec, optimizer=OptimizerSpec(lr=3e-3))
    loop.episodes = 32
    imitate_a_slow_expert(loop, 150)
    before, after = improve(loop, 16)
    assert before < 0.65
    assert after > before + 0.2
