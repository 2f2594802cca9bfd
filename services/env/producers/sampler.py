"""Which samples each training step sees.

In: a seed and a step number. Out: positions 0 … n-1. Never: a state: a step's batch depends on nothing but seed, step,
set size and batch size, so that a replay after a crash sees the same samples.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt


def batch_indices(seed: int, step: int, n: int, batch_size: int) -> npt.NDArray[np.int64]:
    """Return the positions of the samples of one step.

    All epochs, each a permutation of 0 … n-1 of its own, stand end to end; step k takes places k*B to (k+1)*B-1. So
    every sample is seen exactly once an epoch, and a batch at an epoch's end continues in the next.

    Args:
        seed: of the order (a job's).
        step: step number, from 0.
        n: number of samples.
        batch_size: B.

    Returns:
        [B] int64.

    Raises:
        ValueError: if there is no sample, or a number is negative.
    """
    if n < 1 or batch_size < 1 or step < 0 or seed < 0:
        raise ValueError(
            f"no batch of {batch_size} can be drawn from {n} samples at step {step} with seed {seed}: "
            "samples and batch must be 1 or more, step and seed 0 or more"
        )
    places = step * batch_size + np.arange(batch_size, dtype=np.int64)
    epochs = places // n
    orders = {epoch: _permutation(seed, epoch, n) for epoch in np.unique(epochs).tolist()}
    return np.array([orders[epoch][place] for epoch, place in zip(epochs.tolist(), places % n, strict=True)], np.int64)


@lru_cache(maxsize=16)  # a pass over a large set asks for the same order thousands of times
def _permutation(seed: int, epoch: int, n: int) -> npt.NDArray[np.int64]:
    """Return the order of an epoch: samples sorted by their draws from Philox, keyed by seed and epoch.

    Raw draws, because numpy promises to keep those, not those of `Generator.permutation`, from release to release.
    """
    draws = np.random.Philox(np.random.SeedSequence((seed, epoch))).random_raw(n)
    return np.argsort(draws, kind="stable")
