"""`python -m services.trainer`: settings from the environment, reproducible numerics, then the service.

Thin on purpose: how the matrix library computes is fixed when torch is loaded, so nothing here may import it first.
"""

from __future__ import annotations

from common import telemetry
from common.exits import cannot_start
from common.settings import TrainerSettings, load_settings
from joynexus.vla import numerics


def main() -> None:
    """Run the trainer; a reason not to start is one sentence on stderr and exit code 78."""
    try:
        settings = load_settings(TrainerSettings)
    except ValueError as error:
        raise cannot_start("the trainer", error) from error
    telemetry.configure("trainer", level=settings.log_level, json_logs=settings.json_logs)
    numerics.configure(settings.threads)
    from services.trainer.service import run

    run(settings)


if __name__ == "__main__":
    main()
