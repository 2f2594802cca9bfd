"""Time forwards of one model by their size, once, at start-up.

In: a loaded backbone. Out: the least busy seconds seen for each number of tokens. Never: more than `BUDGET_S`, or than
one round of 15 samples where these take longer; or all forwards of one size in a row, for a host's speed drifts.
"""

from __future__ import annotations

import numpy as np

from joynexus.vla.backbones.base import Backbone
from joynexus.vla.busy import BusyClock
from joynexus.vla.feature import Observation

SIZES = (1, 2, 4, 8, 16)
BUDGET_S = 3.0
_ROUNDS = 3
_SIDE = 224  # what most cameras of robots are resized to


def time_forwards(backbone: Backbone) -> dict[int, float]:
    """Return seconds by tokens, for `SIZES` samples; the last size only if it is affordable."""
    random = np.random.default_rng(0)
    samples = [
        Observation((random.integers(0, 256, (_SIDE, _SIDE, 3), dtype=np.uint8),), "put the red block on the plate")
        for _ in range(SIZES[-1])
    ]
    length = backbone.tokens(samples[0])
    clock = BusyClock(backbone.device)

    def time(size: int) -> float:
        elapsed = clock.start()
        backbone.forward(samples[:size])
        return elapsed()

    time(1)  # the first forward also pays for what is made once
    spent = time(1)
    sizes = SIZES if spent * sum(SIZES) <= BUDGET_S else SIZES[:-1]
    rounds: list[dict[int, float]] = []
    while not rounds or (len(rounds) < _ROUNDS and spent + sum(rounds[-1].values()) <= BUDGET_S):
        rounds.append({size: time(size) for size in sizes})
        spent += sum(rounds[-1].values())
    return {length * size: min(times[size] for times in rounds) for size in sizes}
