"""`python -m services.health`: look after a cluster until SIGTERM."""

from __future__ import annotations

import sys

from common import telemetry
from common.settings import HealthSettings, load_settings
from services.health.service import run


def main() -> int:
    """Run health; return the exit code."""
    try:
        settings = load_settings(HealthSettings)
        telemetry.configure("health", level=settings.log_level, json_logs=settings.json_logs)
        run(settings)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
