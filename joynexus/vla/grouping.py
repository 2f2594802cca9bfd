"""How many tokens go through a model at once: as many as are fast, found by measuring.

In: seconds of a forward by its number of tokens, and the lengths of samples. Out: how to cut the samples into forwards.
Never: anything that changes a number. It decides sizes only, and a device where sizes change bits says so elsewhere.

A long row of tokens spares dispatches and reads the weights once; past the point where one sample keeps the device
busy it gains nothing, and on a CPU it loses some per cent to caches. Where that point lies depends on host and model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise

SAME = 0.01
"""Times within this share of each other count as equal; fewer forwards are taken then."""


class Grouping:
    """The measured curve of one backbone on one device.

    Args:
        seconds: time of a forward by its number of tokens, at least two points.

    Raises:
        ValueError: if there are fewer points, or one is not positive.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        if len(seconds) < 2 or any(tokens < 1 or time <= 0 for tokens, time in seconds.items()):
            raise ValueError(
                "a grouping needs two measured times or more, each of some tokens and more than no seconds"
            )
        self._points = sorted(seconds.items())

    def seconds(self, tokens: float) -> float:
        """Expect the time of a forward: linear between points; above the last in proportion to it.

        Below the first point its segment goes on, for what remains at zero tokens is what a forward costs in itself.
        Where noise makes that less than nothing, it goes in proportion: short samples are not for free.
        """
        last_tokens, last_seconds = self._points[-1]
        if tokens >= last_tokens:
            return last_seconds * tokens / last_tokens
        right = max(bisect_left(self._points, (tokens, 0.0)), 1)
        (x0, y0), (x1, y1) = self._points[right - 1], self._points[right]
        line = y0 + (tokens - x0) * (y1 - y0) / (x1 - x0)
        return line if tokens >= x0 else max(line, y0 * tokens / x0)

    def cut(self, lengths: Sequence[int]) -> list[int]:
        """Cut samples, in order, into forwards of about equal tokens.

        Args:
            lengths: tokens of each sample.

        Returns:
            the number of samples of each forward; their sum is the number of samples.
        """
        if not lengths:
            return []
        total = sum(lengths)
        times = [count * self.seconds(total / count) for count in range(1, len(lengths) + 1)]
        limit = min(times) * (1 + SAME)
        count = next(index for index, time in enumerate(times, start=1) if time <= limit)
        return even_parts(lengths, count)

    def describe(self) -> str:
        """Say in one sentence what was found."""
        rates = {tokens: time / tokens for tokens, time in self._points}
        best = max(tokens for tokens, rate in rates.items() if rate <= min(rates.values()) * (1 + SAME))
        first, last = self._points[0][0], self._points[-1][0]
        gain = rates[first] / rates[best]
        if best == last:
            return f"the more tokens the better up to {last}: {gain:.2f}x the speed of {first} at once"
        over = rates[last] / rates[best]
        return f"about {best} tokens at once: {gain:.2f}x the speed of {first}, {over:.2f}x that of {last}"


def even_parts(lengths: Sequence[int], count: int) -> list[int]:
    """Cut into `count` parts of one sample or more, with sums as equal as whole samples allow."""
    total, done, cuts = sum(lengths), 0, [0]
    for index, length in enumerate(lengths):
        done += length
        part, left = len(cuts), len(lengths) - index - 1
        must = left == count - part  # each of the parts to come needs a sample
        if part < count and (must or done + length / 2 >= total * part / count):
            cuts.append(index + 1)
    return [end - start for start, end in pairwise([*cuts, len(lengths)])]
