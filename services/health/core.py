"""Health's core: which instance is started, stopped, killed or left alone, and why. No processes, sockets or clock.

In: what happened to the instances' processes, the master's picture of the cluster, how many there should be. Out:
starts, stops and kills. Never: a restart of anything that did not fail or that was to leave, or an endless fast loop
of restarts.

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
- Of a group that is to have fewer processes, those leave that are of no use now, then those that are idle, the last to
  come first. The first of a group stays if it is of use; a first container always, as others are made like it. Who
  leaves finishes what it has (`LEAVE_S` at most), and is no more, also where another health process told it to.
- A first container that is quarantined is none of those that there should be: another one takes its place.
"""

from __future__ import annotations

import math
import signal
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from joynexus.local import InstanceHealth
from joynexus.scale import WORKERS, group_of, instance_name, number_of, role_of
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
REGISTER_S = 960.0
"""A worker that has not registered for so long is wedged; its own watchdog lets a model load for 900 s."""
STALL_S = 900.0
"""A work loop whose counter stands still for so long in a phase other than idle is wedged."""
QUARANTINED = "quarantined"
"""Phase of a worker that the master gives no work any more."""
NONE = 1
"""Rank of a worker that is there, and of no use."""
LEAVE_S = {"env": 1800.0, "trainer": 120.0}
"""How long a role may take to finish when it is to leave (else 60 s): an episode of a slow simulator takes minutes."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """An instance's process runs.

    Attributes:
        instance: what it registers with at the master; empty if only its pid is known.
    """

    name: str
    pid: int
    instance: str = ""


class Adopted(msgspec.Struct, frozen=True, kw_only=True):
    """These instances run that this health process did not start; the first event of all, and possibly a later one."""

    running: tuple[Started, ...]


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody took an instance away, and it is to stay away."""

    name: str


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


class Leaves(msgspec.Struct, frozen=True, kw_only=True):
    """An instance's process was told to leave by the health process before this one."""

    name: str
    pid: int


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The master answered: these are the workers it knows."""

    roles: tuple[RoleStatus, ...]


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """A group is to have so many instances, one at least; those that are missing are started with the next event."""

    group: str
    count: int


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """Time passed."""


Event = Adopted | Started | Ended | Removed | Leaves | Seen | Scale | Tick


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Start an instance."""

    name: str


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """Have an instance finish what it has and end for good; `Ended` or `Removed` follows."""

    name: str


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """Kill an instance's process; `Ended` follows."""

    name: str
    why: str


Command = Start | Stop | Kill


@dataclass(slots=True)
class _Instance:
    name: str
    role: str
    pid: int = 0
    instance: str = ""
    start_at: float | None = 0.0  # when to start it; None while its process runs (or somebody else starts it)
    started_at: float = 0.0
    born: float = -math.inf  # its process registered later than this
    leaving_since: float | None = None
    phase: str = ""
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
        starts_again: start what ended; otherwise somebody else does, and `Started` says when.
        lost_s: a worker that the master has lost for so long, while its process lives, is wedged.
        master_silent_s: and so is a master that has not answered for so long.
    """

    roles: dict[str, str]
    starts_again: bool = True
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
                for started in event.running:
                    if started.name not in self._instances:
                        self._add(started.name)
                    self._started(started, now, adopted=True)
                return self._kills(now)  # what is missing is not started before it is said how many there should be
            case Started():
                self._started(event, now)
            case Ended():
                self._ended(self._instances[event.name], event, now)
            case Removed():
                self._instances.pop(event.name, None)
            case Leaves():
                return self._leaves(event, now)
            case Seen():
                self._master_heard = now
                self._seen(event.roles, now)
            case Scale():
                return self._scale(event, now)
            case Tick():
                pass
        return [*self._kills(now), *self._starts(now)]

    def report(self) -> tuple[InstanceHealth, ...]:
        """Describe all instances."""
        return tuple(
            InstanceHealth(
                name=i.name,
                role=i.role,
                state=self._state(i),
                pid=i.pid,
                instance=i.instance,
                restarts=i.restarts,
                reason=i.reason,
            )
            for i in self._instances.values()
        )

    def wanted(self) -> dict[str, int]:
        """Return how many instances each group that can be scaled is to have, without one that is set aside."""
        wanted: Counter[str] = Counter()
        for i in self._instances.values():
            if _stays(i) and i.role in WORKERS:
                wanted[group_of(i.name)] += 1
        for group in wanted:
            wanted[group] -= self._set_aside(self._staying(group)) is not None
        return wanted

    def _state(self, instance: _Instance) -> str:
        if instance.leaving_since is not None:
            return "leaving"
        if not instance.pid and instance.failures >= LOOP_FAILURES:
            return "crash-loop"
        if not instance.pid:
            return "restarting" if instance.restarts or instance.reason else "starting"
        return "running" if self._is_up(instance) else "starting"

    def _is_up(self, instance: _Instance) -> bool:
        return self._master_heard is not None if instance.role == "master" else instance.known

    def _add(self, name: str) -> _Instance:
        role = self.roles.get(group_of(name), role_of(group_of(name)))
        self._instances[name] = instance = _Instance(name=name, role=role)
        return instance

    def _staying(self, group: str) -> list[_Instance]:
        """Return who is to stay of a group, by number."""
        stay = (i for i in self._instances.values() if group_of(i.name) == group and _stays(i))
        return sorted(stay, key=lambda i: number_of(i.name))

    def _set_aside(self, stay: list[_Instance]) -> _Instance | None:
        """Return who of a group is of no use and stays all the same."""
        return stay[0] if not self.starts_again and stay and stay[0].phase == QUARANTINED else None

    def _scale(self, event: Scale, now: float) -> list[Command]:
        stay = self._staying(event.group)
        if (aside := self._set_aside(stay)) is not None:
            stay.remove(aside)
        taken = {number_of(i.name) for i in self._instances.values() if group_of(i.name) == event.group}
        free = (number for number in range(1, len(taken) + event.count + 1) if number not in taken)
        for number, _ in zip(free, range(event.count - len(stay)), strict=False):
            self._add(instance_name(event.group, number)).start_at = now
        stops: list[Command] = []
        first = stay[0] if stay and aside is None and (not self.starts_again or _use(stay[0]) > NONE) else None
        others = [i for i in stay if i is not first]
        others.sort(key=lambda i: (_use(i), -number_of(i.name)))
        for instance in others[: max(0, len(stay) - event.count)]:
            if self.starts_again and not instance.pid:  # nothing of it runs, and nothing will
                del self._instances[instance.name]
                continue
            instance.leaving_since = now
            stops.append(Stop(name=instance.name))
        return stops

    def _leaves(self, event: Leaves, now: float) -> list[Command]:
        instance = self._instances.get(event.name)
        if instance is None or not instance.pid or instance.pid != event.pid or not _stays(instance):
            return []
        instance.leaving_since = now
        return [Stop(name=instance.name)]

    def _started(self, started: Started, now: float, *, adopted: bool = False) -> None:
        instance = self._instances[started.name]
        instance.pid, instance.instance = started.pid, started.instance
        instance.start_at, instance.started_at, instance.born = None, now, -math.inf if adopted else now
        instance.known, instance.unknown_since, instance.doomed, instance.phase = False, None, "", ""
        instance.progress, instance.progress_at = -1, now
        if instance.role == "master":
            self._master_heard = None
            for other in self._instances.values():  # a new master knows nobody yet: that counts from its first answer
                other.unknown_since = None

    def _ended(self, instance: _Instance, event: Ended, now: float) -> None:
        if not _stays(instance) if self.starts_again else not instance.pid:  # it has left; or it never was there
            del self._instances[instance.name]
            return
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
        instance.pid, instance.known, instance.phase = 0, False, ""
        instance.start_at = now + pause if self.starts_again else None

    def _seen(self, roles: tuple[RoleStatus, ...], now: float) -> None:
        living = [status for status in roles if status.phase != "lost"]
        by_instance = {status.instance: status for status in living if status.instance}
        by_pid = {status.pid: status for status in living if not status.instance}  # a worker that does not say it
        for instance in self._instances.values():
            if instance.role == "master" or not instance.pid:
                continue
            status = by_instance.get(instance.instance) or by_pid.get(instance.pid)
            if status is not None and now - status.uptime_s < instance.born:
                status = None  # the process before this one, which the master does not know to be dead yet
            if status is None:
                if instance.unknown_since is None:
                    instance.unknown_since = now
                continue
            instance.known, instance.unknown_since, instance.phase = True, None, status.phase
            if status.progress != instance.progress or status.phase in ("idle", QUARANTINED):
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
        if instance.leaving_since is not None:
            leaves, may = now - instance.leaving_since, LEAVE_S.get(instance.role, 60.0)
            return f"it was to leave, and had not finished after {may:.0f} s" if leaves >= may else ""
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


def _stays(instance: _Instance) -> bool:
    return instance.leaving_since is None


def _use(instance: _Instance) -> int:
    """Rank what a worker is good for: it is not there, nothing (set aside, or ends already), more work, or its own."""
    if not instance.pid:
        return 0
    if not instance.known or instance.phase in (QUARANTINED, "draining"):
        return NONE
    return 2 if instance.phase == "idle" else 3
