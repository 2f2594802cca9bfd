"""How much better than expected each step was: generalised advantages, and those within groups.

In: rewards and values, or returns of whole episodes. Out: advantages, in float64. Never: weights, torch, or a random
number: an update's advantages are a function of its trajectories alone.

What counts as a step, an action or a chunk, has been decided before; steps of episodes lie end to end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_GROUP_EPS = 1e-6
_EPS = 1e-8


def gae(rewards: Floats, values: Floats, lengths: Ints, last_values: Floats, gamma: float, lam: float) -> Doubles:
    """Return generalised advantages: A(t) = d(t) + gamma lam A(t+1), d(t) = r(t) + gamma V(t+1) - V(t).

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2016),
    eq. 16.

    Args:
        rewards, values: [T] of T steps in E episodes.
        lengths: [E] steps of each episode; their sum is T.
        last_values: [E] value behind the last step: 0 where the task ended the episode, else what the critic says, so
            that an episode that was cut off is not taken for a bad one.
        gamma, lam: discount, and how far a surprise reaches back.

    Returns:
        [T] advantages; with the values added they are what the critic is to learn.
    """
    reward, value = rewards.astype(np.float64).tolist(), values.astype(np.float64).tolist()
    advantages = np.empty(len(reward))
    end = 0
    for length, following in zip(lengths.tolist(), last_values.astype(np.float64).tolist(), strict=True):
        start, end = end, end + length
        carried = 0.0
        for step in reversed(range(start, end)):
            carried = reward[step] + gamma * following - value[step] + gamma * lam * carried
            advantages[step], following = carried, value[step]
    return advantages


def normalised(advantages: Doubles) -> Doubles:
    """Return advantages [T] about zero and with a standard deviation of one, as nearly all PPO code trains on them."""
    centred: Doubles = advantages - advantages.mean()
    return centred if len(centred) < 2 else centred / (advantages.std(ddof=1) + _EPS)


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of episodes within their groups.

    Attributes:
        advantages: [E], the same for all steps of an episode.
        kept: [E] bool, whether the episode's group is trained on.
        groups, groups_kept: how many groups there are.
    """

    advantages: Doubles
    kept: Flags
    groups: int
    groups_kept: int


def group_advantages(returns: Floats, seeds: Ints, low: float, high: float) -> GroupAdvantages:
    """Measure episodes against those that began the same: A = (R - mean) / (std + 1e-6), std with n - 1.

    Source: Shao et al., "DeepSeekMath" (2024), section 4.1.2; left out, as SimpleVLA-RL and RLinf do, is a group whose
    mean return lies outside `low` to `high`, and one that lost all episodes but one.

    Args:
        returns: [E] undiscounted sum of each episode's rewards.
        seeds: [E]; episodes of one seed are a group.
    """
    exact = returns.astype(np.float64)
    advantages, kept = np.zeros(len(exact)), np.zeros(len(exact), np.bool_)
    groups = np.unique(seeds)
    groups_kept = 0
    for seed in groups:
        members = np.flatnonzero(seeds == seed)
        group = exact[members]
        if len(members) < 2 or not low <= group.mean() <= high:
            continue
        advantages[members] = (group - group.mean()) / (group.std(ddof=1) + _GROUP_EPS)
        kept[members] = True
        groups_kept += 1
    return GroupAdvantages(advantages, kept, len(groups), groups_kept)


def episode_weights(lengths: Ints) -> Doubles:
    """Return a weight for each step of E episodes of `lengths`, so that all episodes weigh the same: [E], 1 on average.

    The average is that over steps, so that the loss keeps its size.
    """
    weights: Doubles = lengths.mean() / lengths
    return weights
