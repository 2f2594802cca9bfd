"""A process that imports a simulator's packages once and forks worker processes from there: one a family.

In: the names of modules; then one request a worker process, with its pipe. Out: its process id, or why it cannot be
forked. Never: a graphics context (it does not survive a fork), pickle, or a longer life than its parent's: with the
nursery all its workers die. A worker that ended keeps its process id until the parent has forgotten it: nobody else
gets that number, and its CPU time can be read.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from joynexus.simulation import worker
from joynexus.simulation.interface import SimulatorError

_PR_SET_PDEATHSIG = 1  # Linux: a signal for the death of the parent
_MAX_REQUEST_BYTES = 65_536
_IMPORT_S, _FORK_S = 300.0, 30.0
"""What a nursery's first answer may take, before which it imports, and a later one; else it and its workers end."""
_CLOSE_S = 2.0
_START = f"import sys; sys.path[:] = sys.argv[3:]; from {__name__} import main; main(int(sys.argv[1]), sys.argv[2])"


class Child:
    """A worker process that a nursery forked; `forget` is told its id once nobody asks about it any more."""

    def __init__(self, pid: int, forget: Callable[[int], None]) -> None:
        self.pid, self._forget = pid, forget
        self._handle = os.pidfd_open(pid)  # names this very process, also when another gets its number
        self._ended = select.poll()
        self._ended.register(self._handle, select.POLLIN)

    def join(self, timeout_s: float) -> bool:
        """Wait until it has ended; False if it still runs after the timeout."""
        return self._handle < 0 or bool(self._ended.poll(max(0.0, 1000.0 * timeout_s)))

    def kill(self) -> None:
        """End it by force, and return when it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        self._ended.poll()

    def close(self) -> None:
        """Forget it, once it has ended."""
        if self._handle >= 0:
            os.close(self._handle)
            self._forget(self.pid)
        self._handle = -1


class Nursery:
    """The parent's end.

    Args:
        preload: modules to import once; those that cannot be imported are left out.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._forgotten: deque[int] = deque()
        self.has_answered = False
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(_IMPORT_S)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(number), ",".join(preload), *sys.path],
                pass_fds=(number,),
                stdin=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def start(self, make: worker.MakeSimulator, pipe: Connection) -> Child:
        """Fork a worker process that serves `pipe`.

        Raises:
            OSError: if the nursery has died or does not answer.
            SimulatorError: if no process can be forked; the others run on.
        """
        words = [f"{make.__module__}:{make.__qualname__}"]
        with self._lock:
            while self._forgotten:
                words.append(str(self._forgotten.popleft()))
            socket.send_fds(self._channel, [" ".join(words).encode()], [pipe.fileno()])
            answer = self._channel.recv(_MAX_REQUEST_BYTES).decode()
        if not answer:
            raise ConnectionResetError("the process that starts simulators has died")
        if not self.has_answered:
            self.has_answered = True
            self._channel.settimeout(_FORK_S)
        if not answer.isdigit():
            raise SimulatorError(f"no process can be started for a simulator: {answer}")
        return Child(int(answer), self._forgotten.append)

    def close(self) -> None:
        """End it, and with it its workers."""
        self._channel.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        self._process.kill()
        self._process.wait()


_nurseries: dict[tuple[str, ...], Nursery] = {}
_lock = threading.Lock()


def start_worker(make: worker.MakeSimulator, preload: Sequence[str], pipe: Connection) -> Child:
    """Fork a worker process from the nursery that has these modules imported, which is started if it does not run.

    Args:
        make: makes a simulator; a function of a module, which the worker process imports by name.
        preload: modules that its nursery imports once.
        pipe: the worker's end of the pipe to its pool.

    Raises:
        ValueError: if `make` is no function of a module that can be imported.
        SimulatorError: if no process can be started.
    """
    if make.__module__ == "__main__" or not make.__qualname__.isidentifier():
        raise ValueError(f"{make.__qualname__} cannot be imported by a worker process: put it into a module, by itself")
    if not sys.platform.startswith("linux"):
        raise SimulatorError(
            f"simulators run on Linux alone, this is {sys.platform}: use a container or another machine"
        )
    key = tuple(preload)
    while True:
        try:
            with _lock:
                if key not in _nurseries:
                    _nurseries[key] = Nursery(key)
                nursery = _nurseries[key]
        except OSError as error:
            raise SimulatorError(f"no process can be started for simulators: {error}") from error
        try:
            return nursery.start(make, pipe)
        except OSError as error:
            with _lock:
                if _nurseries.get(key) is nursery:
                    del _nurseries[key]
            nursery.close()
            if not nursery.has_answered:  # else a new one may do better
                what = f"no process can be started that imports {', '.join(key) or 'what simulators need'}: {error}"
                raise SimulatorError(what) from error


def cpu_s_of(pid: int) -> float:
    """Return the CPU seconds of a process (Linux), 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def nurseries_cpu_s() -> float:
    """Return the CPU seconds of the nurseries that run: of what they import, once for all their workers."""
    with _lock:
        return sum(cpu_s_of(nursery.pid) for nursery in _nurseries.values())


@atexit.register
def _close_all() -> None:
    with _lock:
        for nursery in _nurseries.values():
            nursery.close()
        _nurseries.clear()


def main(channel_number: int, preload: str) -> None:
    """Be a nursery, until the parent is gone; `preload` has modules with commas between them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which closes the channel
    channel = socket.socket(fileno=channel_number)
    for module in filter(None, preload.split(",")):
        with suppress(Exception):  # a module that cannot be imported says so where a simulator needs it
            importlib.import_module(module)
    with suppress(BrokenPipeError, ConnectionResetError):
        while _serve(channel):
            pass


def _serve(channel: socket.socket) -> bool:
    """Fork one worker process; False if the parent is gone. The workers get the signal of this process's end."""
    request, numbers, _, _ = socket.recv_fds(channel, _MAX_REQUEST_BYTES, 1)
    if not numbers:
        return False
    name, *forgotten = request.decode().split()
    for ended in forgotten:
        with suppress(ChildProcessError):
            os.waitpid(int(ended), os.WNOHANG)
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:  # no memory, or too many processes: the workers that are there must not suffer from it
        answer = error.strerror or "fork failed"
    else:
        if pid == 0:
            channel.close()
            _be_worker(name, Connection(numbers[0]), parent)
        answer = str(pid)
    os.close(numbers[0])
    channel.send(answer.encode())
    return True


def _be_worker(make: str, pipe: Connection, parent: int) -> None:
    """Serve a pool, in a forked process; never returns."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # else that died before the kernel was told
            module, _, function = make.partition(":")
            worker.main(pipe, getattr(importlib.import_module(module), function))
            code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
