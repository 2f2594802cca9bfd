from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joynexus.vla.grouping import SAME, Grouping

lengths = st.lists(st.integers(1, 400), min_size=1, max_size=64)
curves = st.dictionaries(st.integers(1, 2000), st.floats(1e-4, 10.0), min_size=2, max_size=8)


@given(curves, lengths)
def test_every_sample_goes_through_exactly_one_forward(curve: dict[int, float], samples: list[int]) -> None:
    sizes = Grouping(curve).cut(samples)
    assert sum(sizes) == len(samples)
    assert min(sizes) >= 1


@given(curves, st.integers(1, 400), st.integers(1, 64))
def test_equal_samples_are_cut_no_worse_than_whole_or_one_by_one(
    curve: dict[int, float], length: int, count: int
) -> None:
    grouping = Grouping(curve)
    parts = len(grouping.cut([length] * count))
    chosen = parts * grouping.seconds(length * count / parts)
    better = min(grouping.seconds(length * count), count * grouping.seconds(length))
    assert chosen <= better * (1 + SAME) * (1 + 1e-9)


def test_where_a_forward_has_a_price_of_its_own_all_go_together() -> None:
    assert Grouping({100: 1.1, 200: 1.2, 1600: 2.6}).cut([90, 110, 100, 100] * 4) == [16]


def test_where_long_rows_are_slower_samples_go_one_by_one() -> None:
    assert Grouping({100: 1.0, 200: 2.1, 800: 9.0}).cut([100] * 5) == [1] * 5


def test_a_best_size_between_cuts_evenly_by_tokens() -> None:
    grouping = Grouping({100: 1.3, 400: 4.0, 1600: 17.6})
    assert grouping.cut([100] * 8) == [4, 4]
    assert grouping.cut([100] * 9) == [4, 5]
    assert grouping.cut([400, 100, 100, 100, 100]) == [1, 4]
    assert "about 400 tokens at once: 1.30x the speed of 100, 1.10x that of 1600" in grouping.describe()


def test_times_that_are_as_good_as_equal_take_fewer_forwards() -> None:
    assert Grouping({100: 1.0, 200: 2.005, 800: 8.03}).cut([100] * 8) == [8]


def test_short_samples_are_not_taken_for_free_where_noise_bends_the_curve() -> None:
    """The line through the first two points meets zero at 50 tokens."""
    grouping = Grouping({100: 1.0, 200: 3.0, 1600: 24.0})
    assert grouping.seconds(20) == pytest.approx(0.2)
    assert grouping.cut([20] * 4) == [4]


def test_no_sample_makes_no_forward() -> None:
    assert Grouping({1: 1.0, 2: 1.5}).cut([]) == []


@pytest.mark.parametrize("curve", [{}, {100: 1.0}, {0: 1.0, 5: 1.0}, {1: 0.0, 2: 1.0}])
def test_a_curve_without_two_real_times_is_refused(curve: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="measured times"):
        Grouping(curve)
