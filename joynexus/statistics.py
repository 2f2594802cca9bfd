"""Exact normalisation statistics.

In: state and action arrays of all episodes. Out: `Statistics`. Never: an estimate merged from the statistics of
episodes (quantiles cannot be merged exactly) or those that a set brings along.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from joynexus.contract import Statistics, VectorStatistics


def compute_statistics(
    states: Sequence[npt.NDArray[np.float32]], actions: Sequence[npt.NDArray[np.float32]]
) -> Statistics:
    """Compute statistics over all steps of some episodes.

    Args:
        states: [T, S] of each episode.
        actions: [T, A] of each episode.
    """
    state, action = np.concatenate(states), np.concatenate(actions)
    return Statistics(count=len(state), state=vector_statistics(state), action=vector_statistics(action))


def vector_statistics(values: npt.NDArray[np.float32]) -> VectorStatistics:
    """Return, for each column of [T, D], statistics in float64.

    They are mean, population standard deviation, extremes, and the 1 % and 99 % quantiles (linear between neighbours,
    as numpy's default).
    """
    columns = [column.astype(np.float64) for column in values.T]  # one at a time: memory stays within one column
    quantiles = [np.quantile(column, [0.01, 0.99]) for column in columns]
    return VectorStatistics(
        mean=tuple(float(column.mean()) for column in columns),
        std=tuple(float(column.std()) for column in columns),
        min=tuple(float(column.min()) for column in columns),
        max=tuple(float(column.max()) for column in columns),
        q01=tuple(float(q[0]) for q in quantiles),
        q99=tuple(float(q[1]) for q in quantiles),
    )
