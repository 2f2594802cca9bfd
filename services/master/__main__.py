"""`python -m services.master`: settings from the environment, then the service until SIGTERM."""

from __future__ import annotations

import signal

from common import telemetry
from common.settings import MasterSettings, load_settings


def main() -> None:
    """Run the master; a reason not to start is one sentence on stderr and exit code 1."""
    try:
        settings = load_settings(MasterSettings)
        telemetry.configure("master", level=settings.log_level, json_logs=settings.json_logs)
        from services.master.service import MasterService

        service = MasterService(settings)
    except ValueError as error:
        raise SystemExit(f"the master cannot start: {error}") from error
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: service.stop())
    service.run()


if __name__ == "__main__":
    main()
