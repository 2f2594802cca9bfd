"""How a tenant gets into the dashboard: by a word that it asks for with its key, and that is good once."""

from __future__ import annotations

from joynexus.wire.base import Wire


class OpenDashboard(Wire, frozen=True, kw_only=True):
    """Let me look at the dashboard. Answer: `DashboardCode`, another one each time."""


class DashboardCode(Wire, frozen=True, kw_only=True):
    """What to show at the dashboard's door.

    Attributes:
        code: good for one entry; whoever has it sees what the asker's key may see.
        url: where the dashboard is; empty if the master does not know.
        valid_s: how long the code is good.
    """

    code: str
    url: str
    valid_s: float
