"""`python -m services.health.dashboard`: show the cluster to browsers until SIGTERM."""

from __future__ import annotations

from common import telemetry
from common.exits import cannot_start
from common.settings import DashboardSettings, load_settings
from services.health.dashboard.service import run


def main() -> None:
    """Run the dashboard; a reason not to start is one sentence on stderr and exit code 78."""
    try:
        settings = load_settings(DashboardSettings)
        telemetry.configure("dashboard", level=settings.log_level, json_logs=settings.json_logs)
        run(settings)
    except ValueError as error:
        raise cannot_start("the dashboard", error) from error


if __name__ == "__main__":
    main()
