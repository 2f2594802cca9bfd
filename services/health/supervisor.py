"""Who starts and ends processes: one interface, and its back end for local processes.

In: names of instances; a new one is like the first of its group. Out: their processes, as children with files of their
own for output, or adopted by pid file.
Never: a shell, a signal to a process that is not surely the instance, or the death of a role because health died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from joynexus.local import ClusterPlan, LocalCluster, wait_gone
from joynexus.scale import group_of
from services.health.core import ORDERLY, Adopted, Ended, Removed, Started

LOG_BYTES = 20 * 1024 * 1024
"""A log larger than this is put aside (one older one is kept) when its instance is started."""

_LAST_WORDS = {"PYTHONUNBUFFERED": "1"}
"""So that they stand last in a log."""
SILENT = (*ORDERLY, -signal.SIGKILL)
"""Exit codes of ends of which a log says nothing: its last line tells of something else."""


class Supervisor(Protocol):
    """Starts, stops, kills and notices what becomes of instances."""

    def adopt(self) -> Adopted:
        """Take over what runs already."""
        ...

    def start(self, name: str) -> Started:
        """Start an instance; OSError if that is not possible."""
        ...

    def stop(self, name: str) -> None:
        """Have an instance finish what it has and end for good."""
        ...

    def kill(self, name: str) -> None:
        """Kill an instance at once."""
        ...

    def changes(self) -> Sequence[Adopted | Started | Ended | Removed]:
        """Return what happened since the last call, beside what was done here."""
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
        self._stopped: set[str] = set()

    def adopt(self) -> Adopted:
        """Take over what runs already, by pid file and start time."""
        running = self._cluster.all_running().items()
        ours = [(name, pid) for name, pid in running if group_of(name) in self._roles and self._watch(name, pid)]
        return Adopted(running=tuple(Started(name=name, pid=pid, instance=_instance(name)) for name, pid in ours))

    def start(self, name: str) -> Started:
        """Start an instance in a session of its own, so that neither Ctrl-C nor this process's end reaches it."""
        role = self._roles.get(name) or self._roles[group_of(name)]
        log = self._cluster.log_file(name)
        _put_aside(log)
        with log.open("ab") as output:
            child = subprocess.Popen(
                [self._plan.python, "-m", role.module or f"services.{role.role}"],
                cwd=self._plan.root,
                env={**os.environ, **role.env, "JOYNEXUS_INSTANCE": _instance(name), **_LAST_WORDS},
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
        return Started(name=name, pid=child.pid, instance=_instance(name))

    def stop(self, name: str) -> None:
        """Have an instance finish and end; its pid file goes with it."""
        self._stopped.add(name)
        self._signal(name, signal.SIGTERM)

    def kill(self, name: str) -> None:
        """Kill an instance at once; `changes` tells when it is gone."""
        self._signal(name, signal.SIGKILL)

    def changes(self) -> list[Ended]:
        """Return what ended since the last call, with the last line of its log where that may tell why."""
        gone: list[Ended] = []
        for name, handle in list(self._handles.items()):
            child = self._children.get(name)
            if not wait_gone(handle, 0.0):
                self._write_down_again(name)
                continue
            if child is not None:
                code = child.wait()
                killed, had_memory = code == -signal.SIGKILL, self._had_memory(name)
                how, outside = _how(code), killed and had_memory
                if killed and not had_memory:
                    how += ", perhaps by the kernel, for want of memory"
                del self._children[name]
            else:
                code, outside = None, True
                how = "it ended (it was started by an earlier health process, so its exit code is unknown)"
            os.close(handle)
            del self._handles[name]
            if name in self._stopped:
                self._stopped.remove(name)
                self._cluster.forget(name)
            said = "" if code in SILENT else self._cluster.last_words(name)
            gone.append(Ended(name=name, how=how + said, code=code, outside=outside))
        return gone

    def stop_all(self, grace_s: float) -> list[str]:
        """End workers first, so that they can hand over what they have, then the master; return who was killed."""
        names = {*self._roles, *self._pids}
        workers = sorted(names - {"master"})
        return [*self._cluster.stop(workers, grace_s=grace_s), *self._cluster.stop(["master"], grace_s=grace_s)]

    def _signal(self, name: str, number: signal.Signals) -> None:
        if name in self._handles:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                signal.pidfd_send_signal(self._handles[name], number)

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


def _instance(name: str) -> str:
    """Return what an instance registers with: the same in all its lives, and nowhere else."""
    return f"{socket.gethostname()}/{name}"


def _how(code: int) -> str:
    if code == 0:
        return "it was asked to end"
    if code > 0:
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
