"""What an operator allows each tenant: its share, its place in line, its limits.

In: a JSON file in the folder of keys, written by `joynexus admin tenants`. Out: `TenantLimits` by tenant. Never: a
change that needs a restart: the master looks at the file now and then. A tenant that is not in the file has the
defaults.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from joynexus.keys import write_private
from joynexus.unreadable import UNREADABLE

PRIORITIES = range(-10, 11)
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
"""Use is divided by the weight: with a tiny one sums of use would be infinite."""


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of one tenant; None takes the service's own default.

    Attributes:
        weight: share of device time relative to others' while both have work.
        priority: a lane with a higher priority goes first whenever it has work; lanes of one priority share by weight.
        max_inflight_ops: ops of one policy that may wait unanswered.
        max_waiting_acts, max_act_bytes: requests to act that may wait, and bytes of those under way.
        quota_bytes: blobs kept.
        max_policies: policies.
        budget: what it may cost in a month, in the currency of the price list (`joynexus/prices.py`).
        max_requests_per_s, max_blob_requests_per_s: by all its keys together, on the control and on the bulk socket.
    """

    weight: float = 1.0
    priority: int = 0
    max_inflight_ops: int | None = None
    max_waiting_acts: int | None = None
    max_act_bytes: int | None = None
    quota_bytes: int | None = None
    max_policies: int | None = None
    budget: float | None = None
    max_requests_per_s: int | None = None
    max_blob_requests_per_s: int | None = None

    def __post_init__(self) -> None:
        """Refuse, with a ValueError, what cannot be meant (raised as `msgspec.ValidationError` when decoding)."""
        if not LEAST_WEIGHT <= self.weight <= MOST_WEIGHT:  # also refuses NaN
            raise ValueError(f"weight must lie between {LEAST_WEIGHT:g} and {MOST_WEIGHT:g}, not {self.weight}")
        if self.priority not in PRIORITIES:
            raise ValueError(f"priority must lie between {PRIORITIES[0]} and {PRIORITIES[-1]}, not {self.priority}")
        for field in ("max_inflight_ops", "max_waiting_acts", "max_act_bytes", "quota_bytes", "max_policies"):
            value = getattr(self, field)
            if value is not None and value < 0:
                raise ValueError(f"{field} cannot be negative: {value}")
        if self.budget is not None and not 0 <= self.budget < 1e12:  # also refuses NaN
            raise ValueError(f"budget must lie between 0 and 1e12, not {self.budget}")
        for field in ("max_requests_per_s", "max_blob_requests_per_s"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be at least 1, not {value}: to let nobody in, revoke the keys")


def parse_limits(content: bytes) -> dict[str, TenantLimits]:
    """Return the limits of all tenants that have some, of the content of a `limits.json`; an error of `UNREADABLE`."""
    return msgspec.json.decode(content, type=dict[str, TenantLimits])


class TenantLimitsFile:
    """`limits.json` in the folder of keys; replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[str, TenantLimits]:
        """Return the limits of all tenants that have some; ValueError if the file is damaged."""
        try:
            return parse_limits(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, *UNREADABLE) as error:
            raise ValueError(f"the tenants' limits in {self._path} cannot be read ({error}): restore it") from error

    def change(self, tenant: str, fields: Mapping[str, float | int | None]) -> TenantLimits:
        """Change some of a tenant's limits and return them all; None takes one back, and the service's default holds.

        Raises:
            ValueError: if a field is unknown or a value out of range; nothing is changed then.
        """
        default = TenantLimits()
        values = {name: getattr(default, name, None) if value is None else value for name, value in fields.items()}
        with self._changing() as every:
            try:
                changed = msgspec.structs.replace(every.pop(tenant, default), **values)
            except TypeError as error:
                raise ValueError(f"these are no limits: {error}") from error
            if changed != default:
                every[tenant] = changed
        return changed

    def clear(self, tenant: str) -> None:
        """Give a tenant the service's defaults again.

        Raises:
            ValueError: if it has no limits of its own.
        """
        with self._changing() as every:
            if every.pop(tenant, None) is None:
                raise ValueError(f"tenant '{tenant}' has no limits of its own; `joynexus admin tenants list` shows all")

    @contextmanager
    def _changing(self) -> Iterator[dict[str, TenantLimits]]:
        """Give the limits to change; they are written back unless the block raises."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # The lock is a file of its own: the limits themselves are another file after each change.
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            every = self.load()
            yield every
            write_private(self._path, msgspec.json.format(msgspec.json.encode(every), indent=2) + b"\n")
