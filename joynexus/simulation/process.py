"""One worker process of a pool, and what the pool knows of it; replaced in place.

In: requests. Out: replies, or that none came. Never: a process that outlives its replacement, one that is replaced in
the middle of an episode because it grew, or a wait for the rest of a reply of which half came.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import msgspec

from joynexus.simulation.interface import SimulatorOptions
from joynexus.simulation.nursery import cpu_s_of, start_worker
from joynexus.simulation.pipes import limit_stalls
from joynexus.simulation.protocol import Made, Make, Reply, Request, decode_reply, encode
from joynexus.simulation.worker import MakeSimulator
from joynexus.unreadable import UNREADABLE

TIMEOUT = "timeout"
DEAD = "dead"
_STALL_S = 10.0
"""How long a process that is in the middle of a message may do nothing."""


class Recycling(msgspec.Struct, frozen=True, kw_only=True):
    """When a worker process is replaced between two episodes, since simulators leak; 0 never.

    Attributes:
        episodes: begun in it.
        memory_mib, handles: growth of its resident memory and of its open files since it had run its first episode.
    """

    episodes: int = 0
    memory_mib: int = 0
    handles: int = 0


class WorkerProcess:
    """Hosts some environments of one task, numbered from 0.

    Args:
        task, options: what to make.
        rows: how many environments.
        make: makes a simulator; a function of a module.
        preload: modules that are imported once for all processes.
        make_s: seconds that making them may take.
        recycling: when it is replaced.
    """

    def __init__(
        self,
        task: str,
        options: SimulatorOptions,
        rows: int,
        make: MakeSimulator,
        preload: Sequence[str],
        make_s: float,
        recycling: Recycling,
    ) -> None:
        self.task, self.rows = task, rows
        self._make, self._make_simulator, self._make_s = Make(task, options, rows), make, make_s
        self._preload, self._recycling = preload, recycling
        self._ended_cpu_s = self._seen_cpu_s = 0.0
        self.made: Made | None = None
        self.made_in_s = 0.0
        self._start()

    def _start(self) -> None:
        self.pipe, theirs = Pipe()
        limit_stalls(self.pipe, _STALL_S)
        with theirs:
            self._child = start_worker(self._make_simulator, self._preload, theirs)
        self.made, self._killed = None, False
        self._started = time.monotonic()
        self.make_by = self._started + self._make_s
        self.episodes = 0
        self._first: tuple[float, int] | None = None
        self.busy: set[int] = set()
        self.send(self._make)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def is_made(self, made: Made) -> None:
        """Note what its environments are."""
        self.made, self.made_in_s = made, time.monotonic() - self._started

    def send(self, request: Request) -> None:
        """Send a request; if it died, the missing reply says so."""
        with suppress(OSError):
            self.pipe.send_bytes(encode(request))

    def hang_up(self) -> None:
        """Close the pipe, upon which it ends unless it is wedged."""
        self.pipe.close()

    def cpu_s(self) -> float:
        """CPU seconds, those of the processes that it replaced too."""
        if not self._killed:  # else its entry may be there still, and is counted, or be another process's
            self._seen_cpu_s = max(self._seen_cpu_s, cpu_s_of(self.pid))  # 0 if it went with its nursery
        return self._ended_cpu_s + self._seen_cpu_s

    def kill(self, patience_s: float = 0.0) -> None:
        """End it, by force unless it ends by itself within the patience."""
        self._ended_cpu_s, self._seen_cpu_s, self._killed = self.cpu_s(), 0.0, True
        if not self._child.join(patience_s):
            self._child.kill()
        self._child.close()

    def replace(self) -> None:
        """Kill the process and start another, which makes its environments while others work."""
        self.hang_up()
        self.kill()
        self._start()

    def begin(self, rows: Sequence[int]) -> None:
        """Note that episodes begin in these rows; the process is replaced first if it is due and none would be lost."""
        if self.busy <= set(rows) and self.episodes and self._due():
            self.replace()
        self.episodes += len(rows)
        self.busy.update(rows)

    def _due(self) -> bool:
        limits, size = self._recycling, process_size(self.pid)
        if self._first is None:
            self._first = size
        memory_mib, handles = size[0] - self._first[0], size[1] - self._first[1]
        return (
            0 < limits.episodes <= self.episodes or 0 < limits.memory_mib <= memory_mib or 0 < limits.handles <= handles
        )


def receive(processes: Sequence[WorkerProcess], deadline_s: float) -> dict[WorkerProcess, Reply | str]:
    """Collect one reply from each; `TIMEOUT` or `DEAD` where none came."""
    replies: dict[WorkerProcess, Reply | str] = dict.fromkeys(processes, TIMEOUT)
    waiting = {process.pipe: process for process in processes}
    until = time.monotonic() + deadline_s
    while waiting:
        ready = wait(list(waiting), max(0.0, until - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            process = waiting.pop(pipe)
            try:
                replies[process] = decode_reply(pipe.recv_bytes())
            except BlockingIOError:
                continue  # it hangs in the middle of its reply
            except (EOFError, OSError, *UNREADABLE):
                replies[process] = DEAD
    return replies


def process_size(pid: int) -> tuple[float, int]:
    """Return a process's resident memory in MiB and its number of open files (Linux), zeros if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0.0, 0
