"""Promises of the action error: padding and constant numbers do not count, the trivial policies are what they say."""

import numpy as np
import pytest

from common.prepared import Batch
from joynexus.contract import VectorStatistics
from services.env.producers.action_error import ActionErrors

STATISTICS = VectorStatistics(
    mean=(1.0, 5.0), std=(2.0, 0.0), min=(-3.0, 5.0), max=(3.0, 5.0), q01=(-3.0, 5.0), q99=(3.0, 5.0)
)


def batch(mask: list[list[bool]]) -> Batch:
    action = np.array([[[0.0, 5.0], [2.0, 5.0]], [[4.0, 5.0], [4.0, 5.0]]], np.float32)
    return Batch(np.array([[1.0, 5.0], [0.0, 9.0]], np.float32), action, np.array(mask), ["a", "a"])


def test_errors_are_means_over_valid_steps_in_units_of_the_spread() -> None:
    recorded = batch([[True, True], [True, False]])
    predicted = recorded.action + np.array([[[1, 50], [3, 50]], [[5, 50], [1000, 50]]], np.float32)
    errors = ActionErrors(STATISTICS, 2)
    errors.add(recorded, predicted)
    result = errors.result()
    assert result.policy == pytest.approx((1 + 3 + 5) / 2 / 3)
    assert result.mean_action == pytest.approx((1 + 1 + 3) / 2 / 3)
    assert result.repeat_state == pytest.approx((1 + 1 + 4) / 2 / 3)
    assert result.per_dimension[0] == pytest.approx(result.policy)
    assert np.isnan(result.per_dimension[1])
    assert result.per_step == pytest.approx([(1 + 5) / 2 / 2, 3 / 2])
    assert result.samples == 2


def test_batches_add_up_to_the_whole() -> None:
    recorded = batch([[True, True], [True, False]])
    predicted = recorded.action + 1
    whole, parts = ActionErrors(STATISTICS, 2), ActionErrors(STATISTICS, 2)
    whole.add(recorded, predicted)
    for row in range(2):
        one = slice(row, row + 1)
        part = Batch(recorded.state[one], recorded.action[one], recorded.action_mask[one], ["a"])
        parts.add(part, predicted[one])
    assert parts.result()[:3] == pytest.approx(whole.result()[:3])
    assert parts.result().samples == 2


def test_a_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"predicted actions have shape \(2, 1, 2\)"):
        ActionErrors(STATISTICS, 2).add(batch([[True, True]] * 2), np.zeros((2, 1, 2), np.float32))
