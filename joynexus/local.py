"""A cluster of processes on this machine: where its files lie, what is to run, what runs.

In: the cluster's folder. Out: paths, the plan of roles, live processes by pid file. Never: the process table searched
by name: a pid counts only while the process has the start time that was written down with it.

    client.toml       how its owner connects           keys/    the folder of keys
    state/ blobs/     what must survive                cache/   what may be deleted
    run/plan.json     roles that are to run            run/health.json  what health knows of them
    run/<name>.pid    process of an instance           run/<name>.log   its output
    run/scale.json    how many there may be, if anybody said so
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from joynexus.keys import write_private
from joynexus.scale import Range, parse_scale
from joynexus.wire.back import Decision

_WORDS = 300
"""Characters that are told of the last line of a log."""
_EVERYDAY = re.compile(r'\[(debug|info) *\]|"level": ?"(debug|info)"')
"""In a line of a log that tells of nothing wrong."""


class RolePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One process that is to run.

    Attributes:
        name: of the instance (`trainer`, `env-2`).
        role: what it registers as.
        module: `python -m <module>` runs it; empty: `services.<role>`.
        env: its environment variables beside the inherited ones.
    """

    name: str
    role: str
    module: str = ""
    env: dict[str, str] = {}


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to run.

    Attributes:
        python: interpreter.
        root: folder of the checkout, the processes' working directory.
        roles: in the order in which they start; the master first.
    """

    python: str
    root: str
    roles: tuple[RolePlan, ...]


class InstanceHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What health knows of one instance.

    Attributes:
        state: `starting`, `running` (registered), `restarting` (waits for its next start), `crash-loop`, `leaving`
            (finishes what it has, and is no more).
        instance: what it registers with at the master; empty if only its pid is known.
        restarts: since health has known it.
        reason: why it was last restarted.
    """

    name: str
    role: str
    state: str
    pid: int = 0
    instance: str = ""
    restarts: int = 0
    reason: str = ""


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """`run/health.json`.

    Attributes:
        decisions: the last ones on how many instances there should be, oldest first.
    """

    pid: int
    instances: tuple[InstanceHealth, ...]
    decisions: tuple[Decision, ...] = ()


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`run/<name>.pid`: a pid and the start time that makes it unmistakable (ticks since boot, and the boot's id)."""

    pid: int
    started: int
    boot: str


class LocalCluster:
    """Paths and processes of the cluster in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.run = self.folder / "run"
        self.keys = self.folder / "keys"
        self.client_file = self.folder / "client.toml"
        self.plan_file = self.run / "plan.json"
        self.health_file = self.run / "health.json"
        self.scale_file = self.run / "scale.json"

    def log_file(self, name: str) -> Path:
        """Return where an instance writes its output."""
        return self.run / f"{name}.log"

    def last_words(self, name: str) -> str:
        """Return the last line of an instance's log, as part of a sentence; nothing if it tells of everyday work."""
        try:
            with self.log_file(name).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
                lines = log.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        spoken = [line.strip() for line in lines if line.strip()]
        if not spoken or _EVERYDAY.search(spoken[-1]):
            return ""
        return f"; its log ends: {spoken[-1][:_WORDS]}{'…' * (len(spoken[-1]) > _WORDS)}"

    def save_plan(self, plan: ClusterPlan) -> None:
        """Write down what is to run."""
        write_private(self.plan_file, msgspec.json.format(msgspec.json.encode(plan)) + b"\n")

    def load_plan(self) -> ClusterPlan:
        """Read what is to run; ValueError if that was not written down."""
        try:
            return msgspec.json.decode(self.plan_file.read_bytes(), type=ClusterPlan)
        except (OSError, msgspec.MsgspecError) as error:
            raise ValueError(
                f"{self.folder} holds no local cluster: start one with `joynexus up` (containers: docker compose)"
            ) from error

    def save_health(self, report: HealthReport) -> None:
        """Write down what health knows."""
        temporary = self.health_file.with_name(".health.json.new")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        temporary.replace(self.health_file)

    def load_health(self) -> HealthReport | None:
        """Read what health knew last; None if there is nothing to read."""
        try:
            return msgspec.json.decode(self.health_file.read_bytes(), type=HealthReport)
        except (OSError, msgspec.MsgspecError):
            return None

    def save_scale(self, limits: Mapping[str, Range]) -> None:
        """Write down how many processes of each group there may be."""
        words = {group: str(limit) for group, limit in limits.items()}
        write_private(self.scale_file, msgspec.json.format(msgspec.json.encode(words)) + b"\n")

    def load_scale(self) -> dict[str, Range]:
        """Read how many there may be; ValueError with one sentence if that cannot be read."""
        try:
            words = msgspec.json.decode(self.scale_file.read_bytes(), type=dict[str, str])
            return parse_scale(",".join(f"{group}={limit}" for group, limit in words.items()))
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            raise ValueError(
                f"{self.scale_file} cannot be read ({error}): delete it, then say it again with `joynexus scale`"
            ) from error

    # Processes

    def write_pid(self, name: str, pid: int) -> None:
        """Write down which process an instance is."""
        record = ProcessRecord(pid=pid, started=_start_ticks(pid), boot=_boot_id())
        write_private(self.run / f"{name}.pid", msgspec.json.encode(record))

    def running(self, name: str) -> int:
        """Return the pid of an instance, 0 if it does not run."""
        try:
            record = msgspec.json.decode((self.run / f"{name}.pid").read_bytes(), type=ProcessRecord)
        except (OSError, msgspec.MsgspecError):
            return 0
        same = record.boot == _boot_id() and 0 < record.started == _start_ticks(record.pid)
        return record.pid if same else 0

    def all_running(self) -> dict[str, int]:
        """Return the pids of all instances that run, by name."""
        names = sorted(path.stem for path in self.run.glob("*.pid"))
        return {name: pid for name in names if (pid := self.running(name))}

    def forget(self, name: str) -> None:
        """Remove the pid file of an instance that does not run."""
        (self.run / f"{name}.pid").unlink(missing_ok=True)

    def stop(self, names: list[str], *, grace_s: float) -> list[str]:
        """End instances for good, and forget them; arguments and result are those of `end`."""
        killed = self.end(names, grace_s=grace_s)
        for name in names:
            if not self.running(name):
                self.forget(name)
        return killed

    def end(self, names: list[str], *, grace_s: float, by: signal.Signals = signal.SIGTERM) -> list[str]:
        """End processes: a signal to all, SIGKILL to those that are still there after `grace_s`.

        Returns:
            The names that had to be killed. Their pid files stay: whoever starts them again may have written new ones.
        """
        pids = {name: pid for name in names if (pid := self.running(name))}
        handles: dict[str, int] = {}
        killed: list[str] = []
        try:
            for name, pid in pids.items():
                try:
                    handles[name] = os.pidfd_open(pid)
                except ProcessLookupError:
                    continue
                if self.running(name) == pid:  # still the same process, now that the handle holds it
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(handles[name], by)
            deadline = time.monotonic() + grace_s
            for name, handle in handles.items():
                if not wait_gone(handle, deadline - time.monotonic()):
                    with contextlib.suppress(ProcessLookupError):  # it ended just now
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                    wait_gone(handle, 10.0)
                    killed.append(name)
        finally:
            for handle in handles.values():
                os.close(handle)
        return killed


def wait_gone(handle: int, timeout_s: float) -> bool:
    """Wait until the process behind a pidfd has ended; return whether it has."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def _start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if there is none (or only its remains).

    Source: proc(5), field 22 of /proc/<pid>/stat; the command in field 2 may hold spaces and parentheses.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            return 0
        raise
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
