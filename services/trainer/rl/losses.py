"""Losses of a step: the policy's, clipped, and the value's.

In: log-probabilities, values and what they are compared with; all tensors have one shape, that of steps. Out: numbers
a step, with gradients where the inputs have them. Never: a mean: which steps count is the caller's to say.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MOST_LOG_RATIO = 20.0  # exp() of more than 88 is infinite in float32; the clip acts long before


class PolicyLoss(NamedTuple):
    """The policy's loss, and what happened on the way.

    Attributes:
        loss: with gradients.
        clipped: bool, where the clip took the gradient.
        capped: bool, where the dual clip did.
        kl: how far the policy moved since the reference: an estimate whose mean is the KL divergence.
    """

    loss: Tensor
    clipped: Tensor
    capped: Tensor
    kl: Tensor


def policy_loss(
    log_prob: Tensor, reference: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float, dual_clip: float
) -> PolicyLoss:
    """Return the clipped surrogate max(-A r, -A clip(r, 1 - low, 1 + high)), r = exp(log_prob - reference).

    Where A < 0 it is at most `dual_clip` |A|, unless that is 0. Sources: Schulman et al., "Proximal Policy Optimization
    Algorithms" (2017), eq. 7; the upper bound of its own is from Yu et al., "DAPO" (2025); the dual clip from Ye et
    al., "Mastering Complex Control in MOBA Games" (2020), eq. 5. `kl` is the estimator (r - 1) - log r of Schulman,
    "Approximating KL Divergence" (2020), never negative but for rounding.
    """
    log_ratio = (log_prob - reference).clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO)
    ratio = log_ratio.exp()
    plain, held = -advantage * ratio, -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss, clipped = torch.maximum(plain, held), held > plain
    capped = torch.zeros_like(clipped)
    if dual_clip:
        bound = dual_clip * advantage.abs()
        capped = (advantage < 0) & (loss > bound)
        loss = torch.where(capped, bound, loss)
    kl = (ratio - 1.0 - log_ratio).detach()
    return PolicyLoss(loss, clipped, capped, kl)


def value_loss(value: Tensor, old_value: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return half the squared error; with `clip`, of the value or of the value held near its old one if that is worse.

    Source: the reference implementation of Schulman et al. (2017), as described by Huang et al., "The 37 Implementation
    Details of Proximal Policy Optimization" (2022), detail 9.
    """
    loss = 0.5 * (value - returns).square()
    if clip:
        held = old_value + (value - old_value).clamp(-clip, clip)
        loss = torch.maximum(loss, 0.5 * (held - returns).square())
    return loss


def importance_weights(proximal: Tensor, behaviour: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return min(exp(proximal - behaviour), limit) without gradients, and where the limit acted.

    It makes up for the version that acted being older than the one that the update began with: Hilton et al., "Batch
    size-invariance for policy optimization" (2022), section 3; truncated as in AReaL (Fu et al., 2025). What is cut
    off is not divided out again: the number of steps stays the denominator.
    """
    with torch.no_grad():
        weights = (proximal - behaviour).clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO).exp()
        return weights.clamp(max=limit), weights > limit
