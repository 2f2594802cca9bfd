"""`python -m services.master`: settings from the environment, then the service until SIGTERM."""

from __future__ import annotations

import signal

from common import telemetry
from common.exits import cannot_start
from common.settings import MasterSettings, load_settings


def main() -> None:
    """Run the master; a reason not to start is one sentence on stderr and exit code 1, or 78 if a start cannot help."""
    try:
        settings = load_settings(MasterSettings)
    except ValueError as error:
        raise cannot_start("the master", error) from error
    telemetry.configure("master", level=settings.log_level, json_logs=settings.json_logs)
    from common.journal.errors import JournalDamagedError
    from services.master.service import MasterService

    try:
        service = MasterService(settings)
    except JournalDamagedError as error:
        raise cannot_start("the master", error) from error
    except ValueError as error:  # an address is taken, say: the next start may find it free
        raise SystemExit(f"the master cannot start: {error}") from error
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: service.stop())
    service.run()


if __name__ == "__main__":
    main()
