"""What went wrong lately, for people to see.

In: log lines. Out: the last warnings and errors, each with the tenant whose work it concerns. Never: so many of one
tenant's that others' are lost, a line that a log would not show, or one to a tenant that was written for operators.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from joynexus.wire.back import RecentRow

_EACH, _ALL = 50, 200
_MAX_TEXT = 400
_REASONS = ("why", "reason")
_TENANTS_TOO = frozenset(
    {
        "budget_nearly_used", "checkpoint_failed", "job_ended", "job_parked", "over_budget", "slot_failed",
        "task_came_to_nothing", "task_failed", "weights_refused",
    }
)  # fmt: skip
"""What tells a tenant of its own work, in words that a failure may have; others may name files of the service."""


class Recent:
    """The last of each tenant's, and of those that are nobody's alone."""

    def __init__(self) -> None:
        self._rows: dict[str, deque[RecentRow]] = {}

    def note(self, at: float, level: str, event: str, fields: Mapping[str, str | int | float | bool]) -> None:
        """A log line was written; keep it if it tells of something that went wrong."""
        failed = event == "job_ended" and fields.get("state") == "failed"
        if level not in ("warning", "error") and not failed:
            return
        tenant = str(fields.get("tenant", ""))
        row = RecentRow(at=at, level="error" if failed else level, event=event, tenant=tenant, text=_sentence(fields))
        self._rows.setdefault(tenant, deque(maxlen=_EACH)).append(row)

    def of(self, tenant: str | None) -> tuple[RecentRow, ...]:
        """Return what a tenant is told of its own, or everybody's, oldest first."""
        if tenant is not None:
            return tuple(row for row in self._rows.get(tenant, ()) if tenant and row.event in _TENANTS_TOO)
        rows = [row for rows in self._rows.values() for row in rows]
        return tuple(sorted(rows, key=lambda row: row.at)[-_ALL:])


def _sentence(fields: Mapping[str, str | int | float | bool]) -> str:
    """Say what happened: to what, and why."""
    what = " ".join(f"{name} {value}" for name, value in fields.items() if name not in (*_REASONS, "tenant", "state"))
    why = next((str(fields[name]) for name in _REASONS if fields.get(name)), "")
    text = f"{what}: {why}" if what and why else what or why
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 2]} …"
