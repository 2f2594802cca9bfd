"""Prepare a data set in a process of its own, so that a file made to harm whoever reads it harms that process alone.

In: a data set's folder, a blob store. Out: what `prepare_dataset` returns or raises. Never: a file of a set that is
opened here, or trust in what that process says: its words are typed messages, and its manifest may name nothing but the
blobs that it has just written.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Protocol

import msgspec

from joynexus.datasets import DatasetManifest, Fault
from joynexus.simulation.pipes import limit_stalls
from joynexus.unreadable import UNREADABLE
from services.env.datasets.report import DatasetError, Report

SILENT_S = 600.0
"""A reader that has nothing to tell for so long (an episode, a file, a picture done) is at an end."""
MOST_BYTES = 256 << 20
"""Of one message: a manifest of half a million episodes."""

_END_S = 10.0
_START = "import sys; sys.path[:] = sys.argv[2:]; from services.env.datasets.reader import main; main(int(sys.argv[1]))"
_OF_THE_FILES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL})
_ADVICE = "write the set again, or leave out files until it can be read"


class Blobs(Protocol):
    """What of a `BlobStore` this needs."""

    def put_file(self, path: Path, *, move: bool = True) -> tuple[str, int]:
        """Store a file; returns digest and size."""


class Job(msgspec.Struct, frozen=True):
    """What a reader is told first: where the set is, the file to write each episode to, how large pictures may be."""

    folder: str
    episode: str
    image_side: int | None
    memory_bytes: int


class Alive(msgspec.Struct, frozen=True, tag=True):
    """It gets on."""


class Store(msgspec.Struct, frozen=True, tag=True):
    """An episode is written; the next one may be once it is `Stored`."""


class Stored(msgspec.Struct, frozen=True):
    """Digest and size of an episode."""

    digest: str
    nbytes: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """All is read."""

    manifest: DatasetManifest


class Faulty(msgspec.Struct, frozen=True, tag=True):
    """The set cannot be used."""

    faults: tuple[Fault, ...]


class Unwritten(msgspec.Struct, frozen=True, tag=True):
    """The disk did not do what it should."""

    errno: int


class ReaderLostError(RuntimeError):
    """The reader ended, and nothing says that the set is to blame."""


Told = Alive | Store | Done | Faulty | Unwritten
_decode: Callable[[bytes], Told] = msgspec.msgpack.Decoder(Told).decode


def prepare_apart(
    folder: Path,
    blobs: Blobs,
    scratch: Path,
    *,
    memory_bytes: int,
    image_side: int | None = None,
    alive: Callable[[], None] = lambda: None,
    busy: Callable[[float], None] = lambda seconds: None,
    silent_s: float = SILENT_S,
) -> DatasetManifest:
    """Do as `prepare_dataset` does, in a process of its own.

    Args:
        folder: the set.
        blobs: where the episodes go.
        scratch: where the other process writes them; on the file system of `blobs`, if they are to be moved there.
        memory_bytes: that it may take.
        image_side: as of `prepare_dataset`.
        alive: called as it gets on.
        busy: told the CPU seconds that it took, once it has ended.
        silent_s: how long it may say nothing.

    Raises:
        DatasetError: if the set cannot be used: for its faults, or because it broke its reader.
        OSError: if the disk fails.
        ReaderLostError: if the reader was killed, or said what it should not.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as written:
        episode = Path(written) / "episode"
        ours, theirs = Pipe()
        with ours:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-c", _START, str(theirs.fileno()), *sys.path],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={name: value for name, value in os.environ.items() if not name.startswith("JOYNEXUS_")},
                )
            job = Job(str(folder), str(episode), image_side, memory_bytes)
            try:
                manifest = _follow(ours, job, blobs, alive, silent_s)
                if manifest is None:
                    _wait(process.pid)
            finally:
                os.kill(process.pid, signal.SIGKILL)  # what it ended by before stays its end
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                busy(usage.ru_utime + usage.ru_stime)
        if manifest is None:
            raise _ended(folder.name, process.returncode)
        return manifest


def _follow(
    reader: Connection, job: Job, blobs: Blobs, alive: Callable[[], None], silent_s: float
) -> DatasetManifest | None:
    """Do what the reader asks for until it has the manifest; None if it died."""
    stored: list[tuple[str, int]] = []
    limit_stalls(reader, silent_s)
    try:
        reader.send_bytes(msgspec.msgpack.encode(job))
        while reader.poll(silent_s):
            told = _decode(reader.recv_bytes(MOST_BYTES))
            alive()
            match told:
                case Store():
                    stored.append(blobs.put_file(Path(job.episode), move=True))
                    reader.send_bytes(msgspec.msgpack.encode(Stored(*stored[-1])))
                case Done(manifest):
                    if [(episode.blob, episode.nbytes) for episode in manifest.episodes] != stored:
                        raise ReaderLostError("the process that read the set names episodes that it did not write")
                    return manifest
                case Faulty(faults):
                    raise DatasetError(Report(faults=faults))
                case Unwritten(errno):
                    raise OSError(errno, os.strerror(errno))
    except (EOFError, ConnectionError):
        return None
    except BlockingIOError:
        pass  # it stopped in the middle of a message
    except UNREADABLE as error:
        raise ReaderLostError(f"the process that read the set said what cannot be read: {error}") from error
    raise _broken(Path(job.folder).name, f"reading it got on with nothing for {silent_s:.0f} s: {_ADVICE}")


def _wait(pid: int) -> None:
    """Wait a little for a process that has hung up to end by itself, so that it can be told how it did."""
    handle = os.pidfd_open(pid)
    try:
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        ended.poll(1000.0 * _END_S)
    finally:
        os.close(handle)


def _ended(name: str, code: int) -> Exception:
    """Return what is to be raised over a reader that ended by itself."""
    if code < 0 and -code in _OF_THE_FILES:
        signal_name = signal.Signals(-code).name
        return _broken(name, f"one of its files makes the program that reads it crash ({signal_name}): {_ADVICE}")
    return ReaderLostError(f"the process that read the set ended with {code}: see the log of the env service")


def _broken(name: str, what: str) -> DatasetError:
    return DatasetError(Report(faults=(Fault(severity="error", where=name, what=what),)))
