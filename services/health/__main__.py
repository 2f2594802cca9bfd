"""`python -m services.health`: look after a cluster until SIGTERM."""

from __future__ import annotations

from common import telemetry
from common.exits import cannot_start
from common.settings import HealthSettings, load_settings
from services.health.service import run


def main() -> None:
    """Run health; a reason not to start is one sentence on stderr and exit code 78."""
    try:
        settings = load_settings(HealthSettings)
        telemetry.configure("health", level=settings.log_level, json_logs=settings.json_logs)
        run(settings)
    except ValueError as error:
        raise cannot_start("health", error) from error


if __name__ == "__main__":
    main()
