"""A curve as shapes for SVG, with even ticks, a sentence that says what it shows, and its numbers as a table.

In: points in order of x. Out: a `Chart` whose shapes lie in a box of `WIDTH` by `HEIGHT` units that the page stretches
(so texts are no part of it: the page writes ticks beside the box). Never: a number that is not finite, more than
`POINTS` points or `TABLE` rows, or a gap drawn over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.health.dashboard import figures

WIDTH, HEIGHT = 1000.0, 300.0
POINTS = 200
"""Points drawn: longer curves are cut into so many parts, of each the mean is drawn, and its range shaded."""
TABLE = 20
"""Rows of the table beside it."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Chart:
    """What a page draws.

    Attributes:
        title, across, up: what it is, what its x axis counts, and what its y axis measures.
        lines: the `points` of polylines; several where the curve has gaps.
        bands: the `points` of polygons, from the least to the most of each part of a long curve.
        dot: where the newest point is; None if there is none.
        x_ticks, y_ticks: texts at even distances, from left to right and from top to bottom.
        grid: heights of the horizontal lines at the y ticks.
        sentence: what there is to see, for who does not see it.
        rows: pairs of texts: some of its points, evenly spread, the newest last.
    """

    title: str
    across: str
    up: str
    lines: tuple[str, ...] = ()
    bands: tuple[str, ...] = ()
    dot: Point | None = None
    x_ticks: tuple[str, ...] = ()
    y_ticks: tuple[str, ...] = ()
    grid: tuple[float, ...] = ()
    sentence: str = ""
    rows: tuple[tuple[str, str], ...] = ()


def draw(
    points: Sequence[Point],
    *,
    title: str,
    across: str,
    up: str,
    text: Callable[[float], str] = figures.amount,
    bounds: tuple[float, float] | None = None,
) -> Chart:
    """Draw a curve.

    Args:
        points: (x, y) with growing x from 0 on; a y that is not finite is a gap.
        title, across, up: see `Chart`.
        text: how a y reads.
        bounds: of the y axis; None takes what fits.
    """
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if not finite:
        return Chart(title=title, across=across, up=up, sentence=f"{title}: no points yet.")
    low, high = bounds or (min(y for _, y in finite), max(y for _, y in finite))
    bottom, top, steps = _even(low, high, whole=False)
    _, right, x_steps = _even(0.0, max(1.0, finite[-1][0]), whole=True)

    def at(x: float, y: float) -> str:
        return f"{WIDTH * x / right:.1f},{HEIGHT * (top - y) / (top - bottom):.1f}"

    lines: list[str] = []
    bands: list[str] = []
    for part in _without_gaps(points):
        means, least, most = _thin(part)
        lines.append(" ".join(at(x, y) for x, y in (means if len(means) > 1 else [means[0], means[0]])))
        if len(part) > len(means):
            bands.append(" ".join([*(at(x, y) for x, y in most), *(at(x, y) for x, y in reversed(least))]))
    x, y = finite[-1]
    lowest, highest = min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])
    return Chart(
        title=title,
        across=across,
        up=up,
        lines=tuple(lines),
        bands=tuple(bands),
        dot=(WIDTH * x / right, HEIGHT * (top - y) / (top - bottom)),
        x_ticks=tuple(figures.count(right * step / x_steps) for step in range(x_steps + 1)),
        y_ticks=tuple(text(top - (top - bottom) * step / steps) for step in range(steps + 1)),
        grid=tuple(HEIGHT * step / steps for step in range(steps + 1)),
        sentence=(
            f"{up} is {text(y)} at {across} {figures.count(x)}, after {text(finite[0][1])} at {across} "
            f"{figures.count(finite[0][0])}; lowest {text(lowest[1])} at {figures.count(lowest[0])}, "
            f"highest {text(highest[1])} at {figures.count(highest[0])}."
        ),
        rows=tuple((figures.count(x), text(y)) for x, y in _spread(finite, TABLE)),
    )


def _even(low: float, high: float, *, whole: bool) -> tuple[float, float, int]:
    """Return bounds around a range that are multiples of a round step, and how many steps lie between them.

    Args:
        low, high: the range.
        whole: steps are whole numbers.
    """
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = (low - 0.5, high + 0.5) if low else (0.0, 1.0)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return first * step, last * step, max(1, last - first)


def _without_gaps(points: Sequence[Point]) -> list[list[Point]]:
    parts: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            parts[-1].append(point)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def _thin(points: Sequence[Point]) -> tuple[list[Point], list[Point], list[Point]]:
    """Return means, least and most of at most `POINTS` even parts of a curve."""
    size = -(-len(points) // POINTS)
    means: list[Point] = []
    least: list[Point] = []
    most: list[Point] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        x = sum(x for x, _ in part) / len(part)
        values = [y for _, y in part]
        means.append((x, sum(values) / len(values)))
        least.append((x, min(values)))
        most.append((x, max(values)))
    return means, least, most


def _spread(points: Sequence[Point], most: int) -> list[Point]:
    if len(points) <= most:
        return list(points)
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]
