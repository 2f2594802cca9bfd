"""How often something may be done: buckets that fill evenly, by whoever does it.

In: a name and the time. Out: whether it may. Never: more names remembered than `MOST`.
"""

from __future__ import annotations

from collections import OrderedDict

MOST = 4096


class Rates:
    """A bucket for each name, and one for all of them together.

    Args:
        each, all: how often a minute, by one and by all; as often may be done at once.
    """

    def __init__(self, *, each: int, all: int) -> None:
        self._each, self._all = each, all
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._common = (float(all), 0.0)

    def take(self, name: str, now: float) -> bool:
        """Return whether `name` may do it now, and count it if so."""
        own = _filled(self._buckets.pop(name, (float(self._each), now)), self._each, now)
        common = _filled(self._common, self._all, now)
        may = own >= 1 and common >= 1
        self._buckets[name] = (own - may, now)
        self._common = (common - may, now)
        while len(self._buckets) > MOST:
            self._buckets.popitem(last=False)
        return may


def _filled(bucket: tuple[float, float], a_minute: int, now: float) -> float:
    level, at = bucket
    return min(float(a_minute), level + max(0.0, now - at) * a_minute / 60)
