"""Device time: a fixed part and a part by row, learned from groups."""

from __future__ import annotations

import random

import pytest

from services.master.device_time import DeviceTime


def learned(
    fixed_s: float, row_s: float, *, noise: float = 0.0, sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
) -> DeviceTime:
    chance, device = random.Random(0), DeviceTime()
    for _ in range(60):
        for rows in sizes:
            device.note(rows, (fixed_s + row_s * rows) * (1 + chance.uniform(-noise, noise)))
    return device


def test_nothing_is_known_before_the_first_group() -> None:
    device = DeviceTime()
    assert device.of(4) is None
    assert device.enough_rows(32) == 32
    assert device.parts(8, 2) == 1


@pytest.mark.parametrize(("fixed_s", "row_s"), [(0.020, 0.0), (0.0, 0.020), (0.010, 0.002)])
def test_both_parts_are_learned(fixed_s: float, row_s: float) -> None:
    device = learned(fixed_s, row_s)
    assert device.fixed_s == pytest.approx(fixed_s, abs=5e-4)
    assert device.of(8) == pytest.approx(fixed_s + 8 * row_s, rel=0.02)


def test_noise_averages_out() -> None:
    assert learned(0.010, 0.002, noise=0.2).of(8) == pytest.approx(0.026, rel=0.15)


def test_one_size_alone_counts_as_fixed() -> None:
    assert learned(0.010, 0.002, sizes=(8,)).fixed_s == pytest.approx(0.026)


def test_a_group_that_had_to_load_first_is_soon_forgotten() -> None:
    device = DeviceTime()
    device.note(1, 5.0)
    for _ in range(30):
        device.note(1, 0.02)
    assert device.of(1) == pytest.approx(0.02, rel=0.01)


def test_a_negative_or_missing_part_is_never_learned() -> None:
    device = DeviceTime()
    for rows, seconds in ((1, 0.03), (8, 0.02), (4, 0.0)):
        device.note(rows, seconds)
    assert device.fixed_s is not None
    assert device.fixed_s >= 0
    assert device.row_s >= 0


def test_rows_are_enough_once_nine_tenths_of_the_time_go_into_them() -> None:
    assert learned(0.020, 0.0).enough_rows(32) == 32
    assert learned(0.010, 0.010).enough_rows(32) == 9
    assert learned(0.0, 0.010).enough_rows(32) == 1


def test_free_workers_share_rows_where_each_part_is_worth_its_fixed_cost() -> None:
    assert learned(0.020, 0.0).parts(16, 2) == 1
    assert learned(0.0, 0.020).parts(16, 2) == 2
    assert learned(0.010, 0.002).parts(8, 4) == 1
    assert learned(0.010, 0.010).parts(8, 4) == 4
    assert learned(0.0, 0.020).parts(1, 4) == 1
