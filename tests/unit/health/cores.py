"""Health's core for tests: roles, what a master says of them, and time that passes."""

from __future__ import annotations

from joynexus.local import InstanceHealth
from joynexus.wire.front import RoleStatus
from services.health.core import Adopted, Command, HealthCore, Scale, Seen, Started, Tick

ROLES = {"master": "master", "trainer": "trainer", "env": "env"}
PIDS = {"master": 1, "trainer": 2, "env": 3}


def role(
    name: str, *, progress: int = 0, phase: str = "idle", pid: int = 0, instance: str = "", uptime_s: float = 0.0
) -> RoleStatus:
    return RoleStatus(
        role=ROLES.get(name, name), worker=f"{name}-1", phase=phase, progress=progress, busy_s=0.0, uptime_s=uptime_s,
        pid=0 if instance else pid or PIDS[name], instance=instance,
    )  # fmt: skip


def adopted(*names: str) -> Adopted:
    return Adopted(running=tuple(Started(name=name, pid=PIDS[name]) for name in names))


def all_seen() -> Seen:
    return Seen(roles=(role("trainer"), role("env")))


def up_core() -> HealthCore:
    """Everything runs and is registered at time 1."""
    health = HealthCore(dict(ROLES))
    health.handle(Tick(), 0.0)
    for name, pid in PIDS.items():
        health.handle(Started(name=name, pid=pid), 0.0)
    health.handle(all_seen(), 1.0)
    return health


def advance(health: HealthCore, until: float, *, start: float, seen: Seen | None, step: float = 1.0) -> list[Command]:
    commands: list[Command] = []
    now = start
    while now < until:
        now += step
        commands += health.handle(seen or Tick(), now)
    return commands


def scale(health: HealthCore, count: int, now: float) -> list[Command]:
    return [*health.handle(Scale(group="env", count=count), now), *health.handle(Tick(), now)]


def state(health: HealthCore, name: str) -> InstanceHealth:
    return next(instance for instance in health.report() if instance.name == name)
