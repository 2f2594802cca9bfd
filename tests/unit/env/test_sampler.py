"""Promises of the sampler: every sample once an epoch, and any step's batch without its history."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.env.producers.sampler import batch_indices


@given(seed=st.integers(0, 2**32), n=st.integers(1, 60), batch=st.integers(1, 90), epochs=st.integers(1, 3))
def test_every_sample_is_seen_once_an_epoch_across_batch_borders(seed: int, n: int, batch: int, epochs: int) -> None:
    steps = -(-n * epochs // batch)
    stream = np.concatenate([batch_indices(seed, step, n, batch) for step in range(steps)])
    for epoch in range(epochs):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_a_steps_batch_needs_no_earlier_step() -> None:
    forward = [batch_indices(7, step, 100, 32) for step in range(20)]
    backward = [batch_indices(7, step, 100, 32) for step in reversed(range(20))]
    assert all(np.array_equal(a, b) for a, b in zip(forward, reversed(backward), strict=True))


def test_orders_differ_between_epochs_and_between_seeds() -> None:
    first = batch_indices(0, 0, 50, 50)
    assert not np.array_equal(first, batch_indices(0, 1, 50, 50))
    assert not np.array_equal(first, batch_indices(1, 0, 50, 50))


def test_the_order_is_the_same_on_every_machine_and_release() -> None:
    """A replay on another machine or numpy must see the same samples: these numbers may never change."""
    assert batch_indices(3, 5, 10, 8).tolist() == [2, 9, 4, 3, 6, 5, 1, 0]


@pytest.mark.parametrize(("seed", "step", "n", "batch"), [(0, 0, 0, 1), (0, 0, 5, 0), (0, -1, 5, 1), (-1, 0, 5, 1)])
def test_impossible_batches_are_refused(seed: int, step: int, n: int, batch: int) -> None:
    with pytest.raises(ValueError, match="can be drawn"):
        batch_indices(seed, step, n, batch)
