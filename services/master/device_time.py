"""How long a group takes by its rows: a fixed part, and a part for each row.

In: rows and seconds of groups that are done. Out: what a group of so many rows will take, and what sharing saves.
Never: an assumption about the device: until groups of different sizes were seen, all of it counts as fixed.
"""

from __future__ import annotations

import math

import msgspec

_FASTER, _SLOWER = 0.3, 0.1
"""Weights of the newest group: one that took long may have loaded a version first."""
_AT_MOST = 3.0
_ENOUGH = 9.0
"""A group is large enough when its rows take so many times as long as its fixed part."""


class _Size(msgspec.Struct):
    rows: float
    seconds: float


class DeviceTime:
    """The line `fixed_s + row_s * rows` through the groups of each size: 1, 2, 3 to 4, 5 to 8 rows, and so on.

    The line minimises relative errors, so that small groups count as much as large ones.

    Attributes:
        fixed_s: seconds that a group takes whatever its size; None while nothing is known.
        row_s: seconds for each of its rows.
    """

    def __init__(self) -> None:
        self.fixed_s: float | None = None
        self.row_s = 0.0
        self._sizes: dict[int, _Size] = {}

    def note(self, rows: int, seconds: float) -> None:
        """A group of so many rows took so long."""
        known = self._sizes.get((rows - 1).bit_length())
        if known is None:
            self._sizes[(rows - 1).bit_length()] = _Size(rows, seconds)
        else:
            weight = _FASTER if seconds < known.seconds else _SLOWER
            known.seconds += weight * (min(seconds, _AT_MOST * known.seconds) - known.seconds)
            known.rows += weight * (rows - known.rows)
        self._fit()

    def of(self, rows: int) -> float | None:
        """Return the seconds that a group of so many rows will take; None while nothing is known."""
        return None if self.fixed_s is None else self.fixed_s + self.row_s * rows

    def enough_rows(self, most: int) -> int:
        """Return the rows from which on a larger group would hardly do more in a second, at most `most`."""
        if self.fixed_s is None or self.row_s * most <= 0:
            return most
        return min(most, math.ceil(_ENOUGH * self.fixed_s / self.row_s) or 1)

    def parts(self, rows: int, workers: int) -> int:
        """Return among how many free workers to divide rows: each part must take longer for rows than it costs more."""
        if self.fixed_s is None or workers <= 1:
            return 1
        most = workers if self.fixed_s <= 0 else min(float(workers), rows * self.row_s / self.fixed_s)
        return max(1, min(rows, int(most)))

    def _fit(self) -> None:
        sizes = [size for size in self._sizes.values() if size.seconds > 0]
        if not sizes:
            self.fixed_s = 0.0
            return
        weights = [1 / size.seconds**2 for size in sizes]
        total = sum(weights)
        rows = sum(weight * size.rows for weight, size in zip(weights, sizes, strict=True)) / total
        seconds = sum(weight * size.seconds for weight, size in zip(weights, sizes, strict=True)) / total
        spread = sum(weight * (size.rows - rows) ** 2 for weight, size in zip(weights, sizes, strict=True))
        slope = sum(
            weight * (size.rows - rows) * (size.seconds - seconds) for weight, size in zip(weights, sizes, strict=True)
        )
        self.row_s = min(max(slope / spread, 0.0), seconds / rows) if spread > 0 else 0.0
        self.fixed_s = seconds - self.row_s * rows
