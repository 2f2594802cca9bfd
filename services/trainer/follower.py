"""`python -m services.trainer.follower RANK MEETING STREAM TRAINER`: one further device of a trainer, which starts it.

In: the trainer's environment, its number, the open file in which the ranks meet, an open socket to the trainer, the
trainer's process id. Out: what `joynexus.vla.backbones.spread_worker` does. Never: a life beyond the trainer's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from typing import BinaryIO, cast

from common import telemetry
from common.exits import cannot_start
from common.settings import TrainerSettings, load_settings
from joynexus.vla import numerics

_PR_SET_PDEATHSIG = 1  # Linux: a signal for the death of the parent


def main(arguments: list[str]) -> None:
    """Forward rows for a trainer; a reason not to start is one sentence on stderr and exit code 78."""
    rank, meeting, number, trainer = map(int, arguments)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != trainer:
        return  # it died before the kernel was told
    stream = socket.socket(fileno=number)
    settings = load_settings(TrainerSettings)  # the trainer has read the same
    place = settings.places[rank]
    telemetry.configure("trainer", level=settings.log_level, json_logs=settings.json_logs)
    numerics.configure(settings.threads)
    from joynexus.vla.backbones import load_backbone, spread_worker
    from joynexus.vla.backbones.spread import RankLink
    from services.trainer.followers import join

    try:
        backbone = load_backbone(
            settings.backbone,
            device=place,
            dtype=settings.dtype,
            cache_dir=settings.cache_dir,
            image_side=settings.image_side or None,
        )
    except ValueError as error:
        raise cannot_start(f"the trainer's follower on {place}", error) from error
    join(rank, settings.places, meeting)
    spread_worker.serve(backbone, RankLink(cast(BinaryIO, stream.makefile("rwb")), 0, "the trainer"))
    os._exit(0)  # nothing is left to save, and taking down all that torch holds takes seconds


if __name__ == "__main__":
    main(sys.argv[1:])
