"""Health's shell: asks the master for its picture, watches processes, runs what the core and scaling decide.

In: settings, what there is to look after. Out: roles started, stopped and killed; what health knows of them, for the
master and so for whoever looks. Never: a role taken down because health goes away unasked, a port that it listens on,
or a decision without its reason in the log.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from common.runtime import WorkerRuntime
from common.settings import HealthSettings
from common.telemetry import get_logger
from joynexus.local import HealthReport, LocalCluster
from joynexus.scale import Range, group_of, parse_scale
from joynexus.wire import JoyNexusError, Packet
from joynexus.wire.back import ClusterView, Decision, InstanceRow, Register, Supervised, ViewCluster
from services.health.core import Command, Ended, Event, HealthCore, Kill, Leaves, Scale, Seen, Start, Stop, Tick
from services.health.scaling import Change, Scaler
from services.health.supervisor import LocalSupervisor, Supervisor

log = get_logger(__name__)

TURN_S = 0.1
LOOK_S = 1.0
"""How often the master is asked, and the limits are read."""
LOOK_STARTING_S = 0.2
"""And while something is starting."""
OLD_S = 3.0
"""A picture older than this says nothing of now."""
GRACE_S = 10.0
"""How long a role may take for an orderly end."""
DECISIONS = 50
"""The last ones that are told."""

Limits = Mapping[str, Range]


class Health:
    """Looks after one cluster.

    Args:
        core: decides on instances.
        scaler: decides on how many there are.
        supervisor: acts.
        runtime: asks the master.
        limits: says how many there may be, now; ValueError if that cannot be read.
        keep: keeps what health knows, for who does not ask the master.
    """

    def __init__(
        self,
        core: HealthCore,
        scaler: Scaler,
        supervisor: Supervisor,
        runtime: WorkerRuntime,
        *,
        limits: Callable[[], Limits],
        keep: Callable[[HealthReport], object] = lambda _: None,
    ) -> None:
        self._core, self._scaler, self._supervisor, self._runtime = core, scaler, supervisor, runtime
        self._limits, self._keep = limits, keep
        self._picture: Future[Packet] | None = None
        self._look_at = 0.0
        self._view: ClusterView | None = None
        self._seen_at = 0.0
        self._reported: HealthReport | None = None
        self._decisions: deque[Decision] = deque(maxlen=DECISIONS)
        self._not_taken_over = ""

    def run(self) -> None:
        """Adopt what runs, then look after it until told to leave."""
        adopted = self._supervisor.adopt()
        if adopted.running:
            log.info("adopted", instances={started.name: started.pid for started in adopted.running})
        self._happened(adopted)
        while not self._runtime.leaving:
            self.turn()
            self._runtime.next_work(TURN_S)  # there is none for health: a pause that the order to leave cuts short

    def turn(self) -> None:
        """Take in what happened since the last turn."""
        for event in self._supervisor.changes():
            if isinstance(event, Ended):
                if self._state(event.name) == "leaving":
                    log.info("role_left", instance=event.name, how=event.how)
                elif event.code == 0:  # somebody asked for it
                    log.info("role_ended", instance=event.name, how=event.how)
                else:
                    log.warning("role_ended", instance=event.name, how=event.how)
            self._happened(event)
        self._look()
        self._happened(Tick())
        self._runtime.progress.advance()
        report = HealthReport(pid=os.getpid(), instances=self._core.report(), decisions=tuple(self._decisions))
        if report != self._reported:
            with suppress(OSError):  # a full disk: the next turn tries again, and roles are looked after meanwhile
                self._keep(report)
                self._reported = report

    def _state(self, name: str) -> str:
        return next((instance.state for instance in self._core.report() if instance.name == name), "")

    def _look(self) -> None:
        now = time.monotonic()
        if self._picture is not None and self._picture.done():
            try:
                view = self._picture.result().message
            except JoyNexusError:
                pass  # the core hears nothing, which is what there is to hear
            else:
                if isinstance(view, ClusterView):
                    if self._view is None:
                        self._take_over(view)
                    self._view, self._seen_at = view, now
                    self._happened(Seen(roles=view.roles))
                    self._tell(view)
            self._picture = None
        if self._picture is None and now >= self._look_at:
            settled = all(instance.state == "running" for instance in self._core.report())
            self._look_at = now + (LOOK_S if settled else LOOK_STARTING_S)
            self._picture = self._runtime.ask(ViewCluster(), timeout_s=10.0)
            self._scale(now)

    def _take_over(self, view: ClusterView) -> None:
        """Let those leave that were told to by the health process before this one: the master still knows them."""
        for row in view.instances:
            if row.state == "leaving":
                self._happened(Leaves(name=row.name, pid=row.pid))

    def _scale(self, now: float) -> None:
        """Have as many of each group as its load asks for, and its limits allow."""
        wanted = self._core.wanted()
        why = ""
        try:
            self._scaler.limits = self._limits()
        except ValueError as error:
            why = str(error)
        if not why and (unknown := sorted(self._scaler.limits.keys() - wanted.keys())):
            why = f"there is no '{unknown[0]}' here that could be scaled: there are {', '.join(wanted)}"
        if why and why != self._not_taken_over:
            log.warning("scale_not_taken_over", why=why)
        self._not_taken_over = why
        rows = self._view.demand if self._view is not None and now - self._seen_at <= OLD_S else None
        looping = {group_of(each.name) for each in self._core.report() if each.state == "crash-loop"}
        for change in self._scaler.decide(wanted, rows, now, looping=looping):
            if self._view is None:
                change = self._for_now(change)
            if change.after == change.before:
                continue
            log.info("scaled", group=change.group, before=change.before, after=change.after, reason=change.reason)
            self._decisions.append(Decision(at=time.time(), **msgspec.structs.asdict(change)))
            self._happened(Scale(group=change.group, count=change.after))

    def _for_now(self, change: Change) -> Change:
        """Return what may be done before it is known who leaves already: nobody that runs is told to."""
        running = sum(bool(each.pid) and group_of(each.name) == change.group for each in self._core.report())
        return msgspec.structs.replace(change, after=max(change.after, min(change.before, running)))

    def _tell(self, view: ClusterView) -> None:
        """Tell the master what health knows, if it knows anything else (it may have been started anew)."""
        instances = tuple(InstanceRow(**msgspec.structs.asdict(instance)) for instance in self._core.report())
        known = Supervised(instances=view.instances, decisions=view.decisions, desired=view.desired)
        told = Supervised(instances=instances, decisions=tuple(self._decisions), desired=self._core.wanted())
        if told != known:
            self._runtime.ask(told, timeout_s=10.0)

    def _happened(self, event: Event) -> None:
        for command in self._core.handle(event, time.monotonic()):
            self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case Start(name=name):
                try:
                    started = self._supervisor.start(name)
                except OSError as error:
                    log.warning("role_not_started", instance=name, why=str(error))
                    self._happened(Ended(name=name, how=f"it could not be started: {error}"))
                else:
                    log.info("started", instance=name, pid=started.pid)
                    self._happened(started)
            case Stop(name=name):
                log.info("stopping", instance=name)
                self._supervisor.stop(name)
            case Kill(name=name, why=why):
                log.warning("role_killed", instance=name, why=why)
                self._supervisor.kill(name)


def run(settings: HealthSettings) -> None:
    """Run health until SIGTERM. A cluster of local processes is then taken down; containers run on.

    Raises:
        ValueError: if there is nothing to look after, or another health process looks after it.
    """
    if settings.engine and settings.metrics:
        raise ValueError(
            "health holds the Docker Engine's socket, and so listens on nothing: leave JOYNEXUS_METRICS out"
        )
    if settings.cluster_dir is None and not settings.engine:
        raise ValueError(
            "health has nothing to look after: name the folder of a local cluster (JOYNEXUS_CLUSTER_DIR) "
            "or the Docker Engine's socket (JOYNEXUS_ENGINE)"
        )
    asked = parse_scale(settings.scale)
    scaler = Scaler({}, down_s=settings.scale_down_s)
    with ExitStack() as stack:
        runtime = WorkerRuntime(settings)
        register = Register(role="health", incarnation=runtime.incarnation, pid=os.getpid(), credit={})
        if settings.cluster_dir is None:
            from services.health.docker_supervisor import DockerSupervisor  # a local cluster does without the SDK

            engine = DockerSupervisor.connect(settings.engine)
            core = HealthCore({}, starts_again=False, lost_s=settings.lost_s)
            with runtime:
                runtime.register(register)
                Health(core, scaler, engine, runtime, limits=lambda: asked).run()
            return
        cluster = LocalCluster(settings.cluster_dir)
        stack.enter_context(_only_one(cluster.run / "health.lock"))
        cluster.write_pid("health", os.getpid())
        stack.callback(cluster.forget, "health")
        plan = cluster.load_plan()
        supervisor = LocalSupervisor(cluster, plan)
        roles = {role.name: role.role for role in plan.roles}
        core = HealthCore(roles, lost_s=settings.lost_s, master_silent_s=settings.master_silent_s)
        with runtime:
            runtime.register(register)
            limits = cluster.load_scale
            Health(core, scaler, supervisor, runtime, limits=limits, keep=cluster.save_health).run()
        log.info("taking the cluster down")
        killed = supervisor.stop_all(GRACE_S)
        if killed:
            log.warning("roles_killed_at_end", instances=killed)
        cluster.health_file.unlink(missing_ok=True)


def _only_one(path: Path) -> ExitStack:
    """Hold a lock file until the returned stack is closed."""
    stack = ExitStack()
    file = stack.enter_context(path.open("w"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        stack.close()
        raise ValueError(f"another health process looks after {path.parent.parent}: stop it first") from error
    return stack
