"""The Gaussian that a head draws with, and its log-probability.

In: a spec of exploration; numbers, means and standard deviations. Out: log-probabilities and entropies, number by
number. Never: a sum over dimensions or steps (that is the algorithm's choice), or a random draw.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from joynexus.specs import ExplorationSpec

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Gaussian(nn.Module):
    """A standard deviation for each action dimension; `log_std` [A] is a parameter if it is learned, else a buffer."""

    log_std: Tensor

    def __init__(self, spec: ExplorationSpec, action_dim: int) -> None:
        super().__init__()
        log_std = torch.full((action_dim,), math.log(spec.std))
        if spec.learn_std:
            self.log_std = nn.Parameter(log_std)
        else:
            self.register_buffer("log_std", log_std)


def gaussian_log_prob(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return log N(x; mean, exp(log_std)^2) of each number: -((x - mean) / std)^2 / 2 - log std - log(2 pi) / 2."""
    return -0.5 * ((x - mean) / log_std.exp()).square() - log_std - _HALF_LOG_2PI


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """Return the entropy of each number in nats: 1/2 + log(2 pi) / 2 + log std."""
    return 0.5 + _HALF_LOG_2PI + log_std
