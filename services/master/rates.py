"""How often each tenant may ask, and how often it is told that something of it was refused.

In: who asks, when, and the operator's limits. Out: yes, or when to ask again. Never: memory that grows with what is
asked, or a look into a message: this comes before a body is decoded.

Each tenant has a bucket at each kind of door, for all its keys together. It holds what may be asked at once, and fills
at the tenant's rate. Whoever is refused takes a place in an imagined line, and its hint is when that comes up; so a
flood that is refused does not come back all at once. Refusals have a bucket of their own, and when that is empty
nothing is said: a stream of garbage must not make a stream of answers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

BURST_S = 2.0
"""What may be asked at once is what may be asked in so many seconds."""
MOST_S = 5.0
"""Longest hint."""
REFUSALS_PER_S = 200.0
"""Refusals told to one tenant (or one key that is no tenant's); no client that waits as it is told comes near."""
_REMEMBERED = 10_000


class _Bucket(msgspec.Struct):
    """A token bucket, and the line of those who were refused.

    Attributes:
        level: what may be asked now.
        line: how many were refused and may not have come back yet.
        at: when it was last looked at.
    """

    level: float
    line: float
    at: float

    def take(self, per_s: float, now: float) -> float:
        """Take one; return 0, or the seconds after which to ask again."""
        filled = max(0.0, now - self.at) * per_s
        self.level = min(self.level + filled, _most(per_s))
        self.line = max(0.0, self.line - filled)
        self.at = now
        if self.level >= 1:
            self.level -= 1
            return 0.0
        self.line = min(self.line + 1, MOST_S * per_s)
        return max(self.line, 1 - self.level) / per_s


def _most(per_s: float) -> float:
    return max(1.0, BURST_S * per_s)


class _Buckets(OrderedDict[str, _Bucket]):
    """Buckets by name; one that was not used for long is full, and need not be remembered."""

    def take(self, name: str, per_s: float, now: float) -> float:
        bucket = self.get(name)
        if bucket is None:
            bucket = self[name] = _Bucket(_most(per_s), 0.0, now)
            if len(self) > _REMEMBERED:
                self.popitem(last=False)
        else:
            self.move_to_end(name)
        return bucket.take(per_s, now)


class Rates:
    """The rates of all tenants at one kind of door. One thread uses it.

    Args:
        per_s: requests a second of a tenant of which the operator says nothing.
    """

    def __init__(self, per_s: float) -> None:
        self._default = per_s
        self._chosen: dict[str, float] = {}
        self._asked = _Buckets()
        self._refused = _Buckets()

    def change(self, per_s: Mapping[str, int | None]) -> None:
        """The operator's limits are these now."""
        self._chosen = {tenant: limit for tenant, limit in per_s.items() if limit is not None}

    def of(self, tenant: str) -> float:
        """Return how many requests a second a tenant may make."""
        return self._chosen.get(tenant, self._default)

    def ask(self, tenant: str, now: float) -> int:
        """Count a request of a tenant, whatever it is; return 0, or in how many milliseconds to ask again."""
        seconds = self._asked.take(tenant, self.of(tenant), now)
        return math.ceil(1000 * seconds)

    def may_tell(self, whom: str, now: float) -> bool:
        """Count a refusal; tell whether to say it: to a tenant by name, or to a key that is no tenant's."""
        return not self._refused.take(whom, REFUSALS_PER_S, now)
