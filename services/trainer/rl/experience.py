"""The experience of an update: everything its epochs are computed from, except the policy.

In: trajectories of whole episodes and an algorithm. Out: one row a decision, with advantages and what the policy said
when it acted. Never: weights, pictures, an action that was not executed, or a group that is left out.

A step is what the algorithm's `level` says: each executed action (K = C steps a decision), or each chunk (K = 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from joynexus.simulation.trajectories import Trajectories
from joynexus.specs import Algorithm, GrpoSpec, Level, PpoSpec
from services.trainer.rl.advantages import episode_weights, gae, group_advantages, normalised

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Experience:
    """N decisions with K steps each; tensors are on the CPU.

    Attributes:
        decisions: [N] int64, which of the decisions in the rollouts, counted through, are trained on.
        state: [N, S] float32, raw units.
        sample: [N, …] float32, what the head drew.
        executed: bool [N, C], the actions that count.
        mask: float32 [N, K], 1 for steps that count.
        log_prob: float32 [N, K], when the policy acted.
        advantage: float32 [N, K].
        weight: float32 [N, 1], of each decision's steps.
        value, returns: float32 [N, K], what the critic said, and what it should have; [N, 0] without one.
        explained_variance: how much of the returns' variance the critic knew; 0 without one.
        groups, groups_kept: advantage groups, and those that are trained on; 0 without groups.
    """

    decisions: Ints
    state: Tensor
    sample: Tensor
    executed: Tensor
    mask: Tensor
    log_prob: Tensor
    advantage: Tensor
    weight: Tensor
    value: Tensor
    returns: Tensor
    explained_variance: float = 0.0
    groups: int = 0
    groups_kept: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        tensors = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return self.decisions.nbytes + sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def values_of(algorithm: Algorithm, chunk: int) -> int:
    """Return how many values the critic must give for a chunk: 0 for an algorithm that needs none."""
    if not isinstance(algorithm, PpoSpec):
        return 0
    return chunk if algorithm.level == "action" else 1


def by_step(numbers: Tensor, executed: Tensor, level: Level) -> Tensor:
    """Sum numbers [B, C, A] of a chunk to those of its steps, [B, K]; `executed` [B, C] says which actions count."""
    actions = numbers.sum(dim=-1).masked_fill(~executed, 0.0)
    return actions if level == "action" else actions.sum(dim=-1, keepdim=True)


def make_experience(rollout: Trajectories, algorithm: Algorithm, reward_scale: float) -> Experience:
    """Make the experience of one update.

    Args:
        rollout: its episodes in order; pictures are not looked at.
        algorithm: PPO or GRPO.
        reward_scale: factor on rewards; within groups it cancels out, and is not applied.
    """
    steps = _Steps(rollout, algorithm.level)
    if isinstance(algorithm, PpoSpec):
        return _of_ppo(steps, algorithm, reward_scale)
    return _of_grpo(steps, algorithm)


class _Steps:
    """A rollout's steps. N decisions and E episodes; T is the number of steps that count.

    Attributes:
        rollout: where they come from.
        executed: [N, C], actions that count; mask: [N, K], steps that do.
        rewards: [N, K], of steps.
        per_episode: [E] steps that count of each episode.
        episode_returns: [E] sum of each episode's rewards.
        owner: [N] number of each decision's episode.
    """

    def __init__(self, rollout: Trajectories, level: Level) -> None:
        self.rollout, self.level = rollout, level
        rewards, by_chunk = rollout.rewards.astype(np.float64), level == "chunk"
        self.executed: Flags = np.arange(rewards.shape[1]) < rollout.executed[:, None]
        self.mask: Flags = np.ones((len(rewards), 1), np.bool_) if by_chunk else self.executed
        self.rewards: Doubles = rewards.sum(axis=1, keepdims=True) if by_chunk else rewards
        starts = np.cumsum(rollout.lengths) - rollout.lengths
        self.per_episode: Ints = np.add.reduceat(self.mask.sum(axis=1), starts)
        self.episode_returns: Doubles = np.add.reduceat(rewards.sum(axis=1), starts)
        self.owner: Ints = np.repeat(np.arange(len(starts)), rollout.lengths)

    def spread(self, steps: Doubles) -> Doubles:
        """Put numbers of the T steps that count back to [N, K], 0 elsewhere."""
        whole = np.zeros(self.mask.shape)
        whole[self.mask] = steps
        return whole

    def experience(
        self,
        decisions: Ints,
        advantage: Doubles,
        weight: Doubles,
        returns: Doubles,
        *,
        explained_variance: float = 0.0,
        groups: int = 0,
        groups_kept: int = 0,
    ) -> Experience:
        """Gather the decisions that are trained on; the other arrays have all N."""

        def taken(whole: npt.NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(whole[decisions]))

        rollout, executed = self.rollout, taken(self.executed)
        return Experience(
            decisions=decisions,
            state=taken(rollout.state),
            sample=taken(rollout.sample),
            executed=executed,
            mask=taken(self.mask).float(),
            log_prob=by_step(taken(rollout.log_prob), executed, self.level),
            advantage=taken(advantage).float(),
            weight=taken(weight[:, None]).float(),
            value=taken(rollout.value[:, : returns.shape[1]]),
            returns=taken(returns).float(),
            explained_variance=explained_variance,
            groups=groups,
            groups_kept=groups_kept,
        )


def _of_ppo(steps: _Steps, algorithm: PpoSpec, reward_scale: float) -> Experience:
    mask = steps.mask
    values, rewards = steps.rollout.value[mask], steps.rewards[mask] * reward_scale
    # The value behind an episode's last action is that of the first action that would have followed.
    advantages = gae(rewards, values, steps.per_episode, steps.rollout.last_value[:, 0], algorithm.gamma, algorithm.lam)
    returns = advantages + values
    variance = returns.var()
    return steps.experience(
        np.arange(len(mask)),
        steps.spread(normalised(advantages)),
        np.ones(len(mask)),
        steps.spread(returns),
        explained_variance=float(1.0 - advantages.var() / variance) if variance else 0.0,
    )


def _of_grpo(steps: _Steps, algorithm: GrpoSpec) -> Experience:
    found = group_advantages(steps.episode_returns, steps.rollout.seeds, algorithm.filter_low, algorithm.filter_high)
    weights = np.ones(len(steps.per_episode))
    if algorithm.by_length and found.groups_kept:
        weights[found.kept] = episode_weights(steps.per_episode[found.kept])
    owner = steps.owner
    return steps.experience(
        np.flatnonzero(found.kept[owner]),
        np.where(steps.mask, found.advantages[owner, None], 0.0),
        weights[owner],
        np.zeros((len(owner), 0)),
        groups=found.groups,
        groups_kept=found.groups_kept,
    )
