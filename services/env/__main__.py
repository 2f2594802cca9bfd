"""`python -m services.env`: settings from the environment, then the service."""

from __future__ import annotations

from common import telemetry
from common.exits import cannot_start
from common.settings import EnvSettings, load_settings


def main() -> None:
    """Run the env service; a reason not to start is one sentence on stderr and exit code 78."""
    try:
        settings = load_settings(EnvSettings)
    except ValueError as error:
        raise cannot_start("the env service", error) from error
    telemetry.configure("env", level=settings.log_level, json_logs=settings.json_logs)
    from services.env.service import run  # after logging is set up: its imports may warn

    run(settings)


if __name__ == "__main__":
    main()
