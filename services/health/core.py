"""Health's core: which instance is started, killed or left alone, and why. No processes, no sockets, no clock.

In: what happened to the instances' processes, and the master's picture of the cluster. Out: starts and kills. Never:
a restart of anything that did not fail, or an endless fast loop of restarts.

The rules:

- An instance whose process ended is started again, after a pause that grows with each quick failure.
- An orderly end (exit code 0, or a signal that asks for one) is no failure, nor is a SIGKILL from outside (not by the
  kernel for want of memory). An instance that goes so before it was up is not started again at once either, but it is
  in no crash loop.
- After `LOOP_FAILURES` quick failures it is in a crash loop: it is tried only every `LOOP_PAUSE_S`, and the reason is
  shown. An exit code that says that another start cannot help leads there at once.
- A live process is killed (and so started again) if the master lost it, if it does not register, or if its counter
  stands still while it works: each longer than its own watchdog would have taken.
- A silent master is killed likewise.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

import msgspec

from joynexus.local import InstanceHealth
from joynexus.wire.front import RoleStatus

PAUSES_S = (0.1, 0.5, 1.0, 2.0, 5.0)
"""Pause before a start, by the number of quick failures before it."""
ORDERLY = (0, -signal.SIGTERM, -signal.SIGINT)
"""Exit codes of an end that was asked for; a role that had not installed its handlers yet ends by the signal itself."""
NO_USE = 78
"""Exit code (EX_CONFIG of sysexits.h) of a role that only its operator can help: its journal is damaged, say."""
LOOP_FAILURES = 5
LOOP_PAUSE_S = 30.0
STABLE_S = 60.0
"""An instance that lived so long has no quick failures any more."""
LOST_S = 20.0
MASTER_SILENT_S = 30.0
REGISTER_S = 300.0
"""A worker that has not registered for so long is wedged; loading a model may take minutes."""
STALL_S = 900.0
"""A work loop whose counter stands still for so long in a phase other than idle is wedged."""


class Adopted(msgspec.Struct, frozen=True, kw_only=True):
    """These instances run already, from before this health process; the first event of all."""

    pids: dict[str, int]


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """An instance's process runs."""

    name: str
    pid: int


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """An instance's process ended (or could not be started).

    Attributes:
        how: in a clause.
        code: its exit code, or minus the signal that ended it; None if nobody knows.
        outside: somebody else ended it, or nobody can know: then its next end tells more.
    """

    name: str
    how: str
    code: int | None = None
    outside: bool = False


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The master answered: its own pid is known by its pid file, these are the workers it knows."""

    roles: tuple[RoleStatus, ...]


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """Time passed."""


Event = Adopted | Started | Ended | Seen | Tick


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Start an instance."""

    name: str


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """Kill an instance's process; `Ended` follows."""

    name: str
    why: str


Command = Start | Kill


@dataclass(slots=True)
class _Instance:
    name: str
    role: str
    pid: int = 0
    start_at: float | None = 0.0  # when to start it; None while its process runs (or is being started)
    started_at: float = 0.0
    failures: int = 0
    restarts: int = 0
    reason: str = ""
    known: bool = False  # registered with the master, in this life
    unknown_since: float | None = None
    progress: int = -1
    progress_at: float = 0.0
    doomed: str = ""


@dataclass
class HealthCore:
    """State of what health looks after.

    Args:
        roles: role by instance name, in the order in which they are started.
        lost_s: a worker that the master has lost for so long, while its process lives, is wedged.
        master_silent_s: and so is a master that has not answered for so long.
    """

    roles: dict[str, str]
    lost_s: float = LOST_S
    master_silent_s: float = MASTER_SILENT_S
    _instances: dict[str, _Instance] = field(default_factory=dict)
    _master_heard: float | None = None

    def __post_init__(self) -> None:
        self._instances = {name: _Instance(name=name, role=role) for name, role in self.roles.items()}

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; return what is to be done."""
        match event:
            case Adopted():
                for name, pid in event.pids.items():
                    self._started(self._instances[name], pid, now)
            case Started():
                self._started(self._instances[event.name], event.pid, now)
            case Ended():
                self._ended(self._instances[event.name], event, now)
            case Seen():
                self._master_heard = now
                self._seen(event.roles, now)
            case Tick():
                pass
        return [*self._kills(now), *self._starts(now)]

    def report(self) -> tuple[InstanceHealth, ...]:
        """Describe all instances."""
        return tuple(
            InstanceHealth(
                name=i.name, role=i.role, state=self._state(i), pid=i.pid, restarts=i.restarts, reason=i.reason
            )
            for i in self._instances.values()
        )

    def _state(self, instance: _Instance) -> str:
        if instance.start_at is not None and instance.failures >= LOOP_FAILURES:
            return "crash-loop"
        if instance.start_at is not None:
            return "restarting" if instance.restarts or instance.reason else "starting"
        return "running" if self._is_up(instance) else "starting"

    def _is_up(self, instance: _Instance) -> bool:
        return self._master_heard is not None if instance.role == "master" else instance.known

    def _started(self, instance: _Instance, pid: int, now: float) -> None:
        instance.pid, instance.start_at, instance.started_at = pid, None, now
        instance.known, instance.unknown_since, instance.doomed = False, None, ""
        instance.progress, instance.progress_at = -1, now
        if instance.role == "master":
            self._master_heard = None
            for other in self._instances.values():  # a new master knows nobody yet: that counts from its first answer
                other.unknown_since = None

    def _ended(self, instance: _Instance, event: Ended, now: float) -> None:
        was_up = self._is_up(instance)
        if now - instance.started_at >= STABLE_S:
            instance.failures = 0
        if (event.code in ORDERLY or event.outside) and not instance.doomed:
            pause = PAUSES_S[0] if was_up else PAUSES_S[-1]
        else:
            instance.failures = LOOP_FAILURES if event.code == NO_USE else instance.failures + 1
            loop = instance.failures >= LOOP_FAILURES
            pause = LOOP_PAUSE_S if loop else PAUSES_S[instance.failures - 1]
        instance.restarts += 1
        instance.reason = instance.doomed or event.how
        instance.pid, instance.known = 0, False
        instance.start_at = now + pause

    def _seen(self, roles: tuple[RoleStatus, ...], now: float) -> None:
        by_pid = {status.pid: status for status in roles if status.phase != "lost"}
        for instance in self._instances.values():
            if instance.role == "master" or not instance.pid:
                continue
            status = by_pid.get(instance.pid)
            if status is None:
                if instance.unknown_since is None:
                    instance.unknown_since = now
                continue
            instance.known, instance.unknown_since = True, None
            if status.progress != instance.progress or status.phase in ("idle", "quarantined"):
                instance.progress, instance.progress_at = status.progress, now

    def _kills(self, now: float) -> list[Command]:
        kills: list[Command] = []
        for instance in self._instances.values():
            if instance.pid and not instance.doomed and (why := self._wedged(instance, now)):
                instance.doomed = why
                kills.append(Kill(name=instance.name, why=why))
        return kills

    def _wedged(self, instance: _Instance, now: float) -> str:
        """Say why a live process is of no use any more; empty if it is (or if that cannot be told now)."""
        if instance.role == "master":
            silent = now - max(instance.started_at, self._master_heard or 0.0)
            return f"it did not answer for {silent:.0f} s" if silent >= self.master_silent_s else ""
        if self._master_heard is None or now - self._master_heard > 5.0:
            return ""  # without a master nobody can register: judge when it is back
        if instance.unknown_since is not None:
            unknown = now - max(instance.unknown_since, instance.started_at)
            if instance.known and unknown >= self.lost_s:
                return f"the master has not heard it for {unknown:.0f} s"
            if not instance.known and unknown >= REGISTER_S:
                return f"it did not register within {REGISTER_S:.0f} s"
        stalled = now - instance.progress_at
        if instance.known and stalled >= STALL_S:
            return f"its work made no progress for {stalled:.0f} s"
        return ""

    def _starts(self, now: float) -> list[Command]:
        starts: list[Command] = []
        for instance in self._instances.values():
            if instance.start_at is not None and now >= instance.start_at:
                instance.start_at = None
                instance.started_at = now
                starts.append(Start(name=instance.name))
        return starts
