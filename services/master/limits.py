"""What each tenant may have: its share, its place in line, how much of it may wait; and when to ask again.

In: the operator's limits by tenant, the service's own defaults, and how fast lanes move. Out: numbers to hold requests
against, the refusal of what exceeds them. Never: anything that was accepted taken back because a limit sank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence

import msgspec

from joynexus.tenants import TenantLimits
from joynexus.wire import ErrorCode, JoyNexusError, failure
from services.master.config import CoreConfig
from services.master.lanes import Counters

_DEFAULT = TenantLimits()


class Limits:
    """The limits of all tenants.

    Args:
        config: what holds where the operator says nothing.
        queues: use by tenant in each queue; weights and priorities are set there.
    """

    def __init__(self, config: CoreConfig, queues: Sequence[Counters]) -> None:
        self._config = config
        self._queues = queues
        self._limits: Mapping[str, TenantLimits] = {}

    def change(self, limits: Mapping[str, TenantLimits]) -> None:
        """The operator's limits are these now; tenants that are not among them have the defaults."""
        before, self._limits = self._limits, dict(limits)
        for tenant in before.keys() | limits.keys():
            new = self.of(tenant)
            for counters in self._queues:
                counters.set(tenant, new.weight, new.priority)

    def tenants(self) -> Iterable[str]:
        """Return the tenants for which the operator set something."""
        return self._limits.keys()

    def of(self, tenant: str) -> TenantLimits:
        """Return what the operator set for a tenant."""
        return self._limits.get(tenant, _DEFAULT)

    def max_inflight_ops(self, tenant: str) -> int:
        """Return how many ops of one policy may wait unanswered."""
        return _chosen(self.of(tenant).max_inflight_ops, self._config.max_inflight_ops)

    def max_waiting_acts(self, tenant: str) -> int:
        """Return how many requests to act may wait."""
        return _chosen(self.of(tenant).max_waiting_acts, self._config.max_waiting_acts)

    def max_act_bytes(self, tenant: str) -> int:
        """Return how many bytes of requests to act may be under way."""
        return _chosen(self.of(tenant).max_act_bytes, self._config.max_act_bytes)

    def quota_bytes(self, tenant: str) -> int:
        """Return how many bytes of blobs may be kept."""
        return _chosen(self.of(tenant).quota_bytes, self._config.quota_bytes)

    def max_policies(self, tenant: str) -> int:
        """Return how many policies there may be."""
        return _chosen(self.of(tenant).max_policies, self._config.max_policies)


def _chosen(limit: int | None, default: int) -> int:
    return default if limit is None else limit


class _Lane(msgspec.Struct):
    moved: float
    interval_s: float
    refused: int = 0


class Pace:
    """How fast lanes move, so that whoever is refused learns when there will be room for it.

    A lane moves when one of its pieces is answered. Whoever is refused takes a place in an imagined line behind the
    full lane, which moves on with it: so a flood that is refused does not come back all at once.
    """

    NEW = 0.1
    """Weight of the newest interval."""
    GUESS_S = 0.1
    """Interval of a lane that has never moved."""
    LEAST_S, MOST_S = 0.01, 5.0
    """Bounds of a hint."""
    REMEMBERED = 10_000

    def __init__(self) -> None:
        self._lanes: OrderedDict[Hashable, _Lane] = OrderedDict()

    def moved(self, lane: Hashable, now: float) -> None:
        """A piece of a lane was answered."""
        known = self._lanes.get(lane)
        if known is None:
            self._lanes[lane] = _Lane(now, self.GUESS_S)
            if len(self._lanes) > self.REMEMBERED:
                self._lanes.popitem(last=False)
            return
        interval = min(now - known.moved, self.MOST_S)  # a lane that was idle for long is not slow
        known.interval_s += self.NEW * (interval - known.interval_s)
        known.moved = now
        known.refused = max(0, known.refused - 1)
        self._lanes.move_to_end(lane)

    def overloaded(
        self, lane: Hashable, now: float, sentence: str, *, limit: int, waiting: int, running: int
    ) -> JoyNexusError:
        """Make the refusal of what does not fit into a lane now.

        Args:
            sentence: what is full.
            limit: how much may be there (pieces, or bytes).
            waiting, running: pieces that wait, and that are with a worker.
        """
        known = self._lanes.setdefault(lane, _Lane(now, self.GUESS_S))
        known.refused += 1
        seconds = min(max(known.refused * known.interval_s, self.LEAST_S), self.MOST_S)
        details = {"limit": float(limit), "waiting": float(waiting), "running": float(running)}
        hint = round(1000 * seconds)
        return JoyNexusError(failure(ErrorCode.OVERLOADED, sentence, retry_after_ms=hint, details=details))
