"""The followers of a trainer whose backbone's rows are spread over several devices: started, joined, watched.

In: settings that name devices. Out: a process for each device but the first, and a backbone that shares its rows with
them. Never: a trainer that outlives one of them (who has lost a device ends, and is started anew with all), or a
follower that outlives its trainer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import BinaryIO, cast

import torch
import torch.distributed as ranks

from common.exits import EXIT_CONFIG
from common.settings import TrainerSettings
from common.telemetry import get_logger
from joynexus.vla.backbones.base import Backbone
from joynexus.vla.backbones.spread import DeviceLost, RankLink, SpreadBackbone
from joynexus.vla.startup import LOADING_S

log = get_logger(__name__)

LOST_S = 10.0
"""A follower that is gone must be known to have ended, and how, within this."""
_NOT_THEIRS = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask the trainer to finish what it has: it needs its followers for that."""
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks are processes of one host: what they open can be reached from nowhere else."""


def join(rank: int, places: tuple[str, ...], meeting: int) -> None:
    """Enter the group of ranks, once this one's backbone is loaded (transformers saves nothing in a rank above 0).

    Args:
        rank: this one's number.
        places: devices of all.
        meeting: an open file, the same for all, in which they find each other.
    """
    on_gpus = places[0].startswith("cuda")
    if on_gpus:
        torch.cuda.set_device(places[rank])  # NCCL's own
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    timeout = timedelta(seconds=LOADING_S)
    found_at = f"file:///proc/self/fd/{meeting}"
    ranks.init_process_group(backend, init_method=found_at, rank=rank, world_size=len(places), timeout=timeout)


class Followers:
    """A process for each device but the first. Use it with `with`; without further devices it does nothing.

    Args:
        settings: of the trainer.
        end: ends this process as a follower ended; tests pass something milder.
    """

    def __init__(self, settings: TrainerSettings, *, end: Callable[[int], object] | None = None) -> None:
        self._places = settings.places
        self._end = end or end_like
        self._closing = False
        self._judged = threading.Event()
        self._meeting = -1
        self._streams: list[socket.socket] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Followers:
        if len(self._places) > 1:
            os.environ.update(_LOOPBACK)
            self._meeting = os.memfd_create("ranks")  # a file without a name: nobody need remove it
            for rank in range(1, len(self._places)):
                self._start(rank)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, DeviceLost):
            self._judged.wait(LOST_S)  # its line breaks before its end is known: this process is to end alike
        self._closing = True
        for process in self.processes:
            process.kill()  # there is nothing that it could save
        for process in self.processes:
            process.wait()
        for stream in self._streams:
            stream.close()
        if ranks.is_initialized():
            ranks.destroy_process_group()
        if self._meeting >= 0:
            os.close(self._meeting)

    def share(self, backbone: Backbone, add_busy: Callable[[float], None] = lambda _: None) -> Backbone:
        """Return the backbone that shares its rows with the followers; the same one if there are none.

        Raises:
            ValueError: if a device cannot take part.
        """
        if not self.processes:
            return backbone
        join(0, self._places, self._meeting)
        links = [
            RankLink(cast(BinaryIO, stream.makefile("rwb")), rank, f"the follower on {self._places[rank]}")
            for rank, stream in enumerate(self._streams, start=1)
        ]
        return SpreadBackbone(backbone, links, add_busy)

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        numbers = map(str, (rank, self._meeting, theirs.fileno(), os.getpid()))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_THEIRS)  # which the child inherits
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "services.trainer.follower", *numbers],
                stdin=subprocess.DEVNULL,
                pass_fds=[self._meeting, theirs.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        self._streams.append(ours)
        self.processes.append(process)
        threading.Thread(target=self._watch, args=(rank, process), name=f"follower-{rank}", daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._closing:
            return
        if code != EXIT_CONFIG:  # it has said itself what the operator is to do
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            log.critical("follower_lost", device=self._places[rank], how=how)
        self._end(code)
        self._judged.set()


def end_like(code: int) -> None:
    """End this process as another one ended, so that whoever judges the end sees what struck it."""
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    if code < 0:
        os.kill(os.getpid(), signal.SIGKILL if code == -signal.SIGKILL else signal.SIGABRT)
    os._exit(code or 1)
