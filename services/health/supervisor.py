"""Who starts and ends processes: one interface, and its back end for local processes.

In: names of instances. Out: their processes, as children with files of their own for output, or adopted by pid file.
Never: a shell, a signal to a process that is not surely the instance, or the death of a role because health died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Protocol

from joynexus.local import ClusterPlan, LocalCluster, wait_gone
from services.health.core import Ended

LOG_BYTES = 20 * 1024 * 1024
"""A log larger than this is put aside (one older one is kept) when its instance is started."""


class Supervisor(Protocol):
    """Starts, kills and notices the end of instances."""

    def adopt(self) -> dict[str, int]:
        """Take over what runs already; return pids by name."""
        ...

    def start(self, name: str) -> int:
        """Start an instance and return its pid; OSError if that is not possible."""
        ...

    def kill(self, name: str) -> None:
        """Kill an instance at once."""
        ...

    def ended(self) -> list[Ended]:
        """Return what ended since the last call."""
        ...

    def stop_all(self, grace_s: float) -> list[str]:
        """End all instances in an orderly way; return those that had to be killed."""
        ...


class LocalSupervisor:
    """Roles as processes of this machine. They are not tied to this process's life: another one can adopt them.

    Args:
        cluster: where pid files and logs lie.
        plan: what an instance runs.
    """

    def __init__(self, cluster: LocalCluster, plan: ClusterPlan) -> None:
        self._cluster, self._plan = cluster, plan
        self._roles = {role.name: role for role in plan.roles}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._handles: dict[str, int] = {}
        self._pids: dict[str, int] = {}
        self._out_of_memory: dict[str, int | None] = {}  # the kernel's count when an instance was started

    def adopt(self) -> dict[str, int]:
        """Take over what runs already, by pid file and start time."""
        adopted: dict[str, int] = {}
        for name in self._roles:
            pid = self._cluster.running(name)
            if pid and self._watch(name, pid):
                adopted[name] = pid
        return adopted

    def start(self, name: str) -> int:
        """Start an instance in a session of its own, so that neither Ctrl-C nor this process's end reaches it."""
        role = self._roles[name]
        log = self._cluster.log_file(name)
        _put_aside(log)
        with log.open("ab") as output:
            child = subprocess.Popen(
                [self._plan.python, "-m", f"services.{role.role}"],
                cwd=self._plan.root,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **role.env},  # last words stand last in the log
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._cluster.write_pid(name, child.pid)
        except OSError:  # a full disk: a process that nobody can find again would stand in the way of the next one
            child.kill()
            child.wait()
            raise
        self._children[name] = child
        self._out_of_memory[name] = _out_of_memory()
        self._watch(name, child.pid)
        return child.pid

    def kill(self, name: str) -> None:
        """Kill an instance at once; `ended` tells when it is gone."""
        if name in self._handles:
            signal.pidfd_send_signal(self._handles[name], signal.SIGKILL)

    def ended(self) -> list[Ended]:
        """Return what ended since the last call, with the last line of its log."""
        gone: list[Ended] = []
        for name, handle in list(self._handles.items()):
            child = self._children.get(name)
            if not wait_gone(handle, 0.0):
                self._write_down_again(name)
                continue
            if child is not None:
                code = child.wait()
                how, outside = _how(code), code == -signal.SIGKILL and self._had_memory(name)
                del self._children[name]
            else:
                code, outside = None, True
                how = "it ended (it was started by an earlier health process, so its exit code is unknown)"
            os.close(handle)
            del self._handles[name]
            gone.append(Ended(name=name, how=how + self._cluster.last_words(name), code=code, outside=outside))
        return gone

    def stop_all(self, grace_s: float) -> list[str]:
        """End workers first, so that they can hand over what they have, then the master."""
        workers = [name for name, role in self._roles.items() if role.role != "master"]
        masters = [name for name, role in self._roles.items() if role.role == "master"]
        return [*self._cluster.stop(workers, grace_s=grace_s), *self._cluster.stop(masters, grace_s=grace_s)]

    def _watch(self, name: str, pid: int) -> bool:
        try:
            self._handles[name] = os.pidfd_open(pid)
        except ProcessLookupError:
            return name in self._children
        self._pids[name] = pid
        return True

    def _write_down_again(self, name: str) -> None:
        """Have a live instance found by others, too, whatever became of its pid file."""
        if self._cluster.running(name) != self._pids[name]:
            with contextlib.suppress(OSError):  # a full disk: the next look tries again
                self._cluster.write_pid(name, self._pids[name])

    def _had_memory(self, name: str) -> bool:
        """Tell whether the kernel surely killed nobody for want of memory while an instance lived."""
        before = self._out_of_memory[name]
        return before is not None and before == _out_of_memory()


def _out_of_memory() -> int | None:
    """Return how many processes the kernel has killed for want of memory (`/proc/vmstat`); None if it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _how(code: int) -> str:
    if code >= 0:
        return f"it exited with code {code}" + (" (its watchdog found it wedged)" if code == 124 else "")
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"it was ended by {name}"


def _put_aside(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.replace(log.with_suffix(".log.old"))
