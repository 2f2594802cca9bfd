"""The process that opens the files of data sets: one set, then it ends. Its other end is `apart`.

In: a pipe that names a folder, and a file to write episodes to. Out: the episodes, one after the other, and the
manifest or what is wrong. Never: a key, the network, or a file but the set's, the program's own, and those it writes.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

import common
import joynexus
import services
from joynexus.datasets import Fault
from services.env.confinement import confine
from services.env.datasets.apart import Alive, Done, Faulty, Job, Store, Stored, Told, Unwritten
from services.env.datasets.report import DatasetError

_PR_SET_PDEATHSIG = 1  # Linux: a signal for the death of the parent
_ALIVE_S = 0.5
_SYSTEM = (
    "/usr",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/dev/null",
    "/dev/urandom",
    "/proc/self",
    "/sys/devices/system",
)


def main(number: int) -> None:
    """Read one set; `number` is the pipe's descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends this process
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pipe = Connection(number)
    job = msgspec.msgpack.decode(pipe.recv_bytes(), type=Job)
    folder = Path(job.folder)
    confine([folder, *_program()], Path(job.episode).parent, memory_bytes=job.memory_bytes)
    faulthandler.enable()  # a crash says where
    _tell(pipe, _outcome(folder, job, _Parent(pipe, Path(job.episode))))


def _program() -> Iterator[Path]:
    """Give what Python and its packages are read from; the folder of this checkout may also hold keys."""
    code = {Path(package.__path__[0]) for package in (common, joynexus, services)}
    roots = {path.parent for path in code}
    yield from code
    yield from (path for path in map(Path, sys.path) if path.resolve() not in roots)
    yield from (Path(path) for path in {*sysconfig.get_paths().values(), sys.base_prefix})
    yield from map(Path, _SYSTEM)


def _outcome(folder: Path, job: Job, parent: _Parent) -> Told:
    try:
        from services.env.datasets.prepare import prepare_dataset  # its libraries are loaded in bounds

        return Done(prepare_dataset(folder, parent, image_side=job.image_side, alive=parent.alive))
    except DatasetError as error:
        return _too_much(folder, job) if isinstance(error.__cause__, MemoryError) else Faulty(error.report.faults)
    except MemoryError:
        return _too_much(folder, job)
    except OSError as error:
        if error.errno is None:
            return _broken(folder, error)
        return Unwritten(error.errno)
    except Exception as error:  # there is no end to what libraries raise over a file that nobody thought of
        return _broken(folder, error)


def _broken(folder: Path, error: Exception) -> Faulty:
    traceback.print_exception(error)  # into the log of the env service
    what = f"reading it fails ({type(error).__name__}): write the set again, or leave out files until it can be read"
    return Faulty((Fault(severity="error", where=folder.name, what=what),))


def _too_much(folder: Path, job: Job) -> Faulty:
    what = f"reading it takes more than {job.memory_bytes >> 20} MiB of memory: split it into several data sets"
    return Faulty((Fault(severity="error", where=folder.name, what=what),))


class _Parent:
    """What preparing asks of a blob store: the other process does it."""

    def __init__(self, pipe: Connection, episode: Path) -> None:
        self._pipe, self._episode = pipe, episode
        self._told = 0.0

    def alive(self) -> None:
        """Say that there is progress, not too often."""
        now = time.monotonic()
        if now - self._told >= _ALIVE_S:
            self._told = now
            _tell(self._pipe, Alive())

    @contextmanager
    def new_file(self) -> Iterator[Path]:
        """Give the one file that is known at the other end, empty."""
        self._episode.unlink(missing_ok=True)
        yield self._episode

    def put_file(self, path: Path, *, move: bool = False) -> tuple[str, int]:
        """Have it stored."""
        _tell(self._pipe, Store())
        stored = msgspec.msgpack.decode(self._pipe.recv_bytes(), type=Stored)
        return stored.digest, stored.nbytes


def _tell(pipe: Connection, told: Told) -> None:
    try:
        pipe.send_bytes(msgspec.msgpack.encode(told))
    except BrokenPipeError:
        os._exit(0)  # nobody wants it any more
