"""Health's shell: asks the master for its picture, watches processes, runs what the core decides.

In: settings, the plan of a local cluster. Out: roles started and killed, `run/health.json` for `joynexus status`.
Never: a role taken down because health goes away unasked: only an orderly end (SIGTERM) ends the cluster.
"""

from __future__ import annotations

import fcntl
import os
import time
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path

from common.runtime import WorkerRuntime
from common.settings import HealthSettings
from common.telemetry import get_logger
from joynexus.local import HealthReport, LocalCluster
from joynexus.wire import JoyNexusError, Packet
from joynexus.wire.back import Register
from joynexus.wire.front import ClusterStatus, Status
from services.health.core import Adopted, Command, Ended, Event, HealthCore, Kill, Seen, Start, Started, Tick
from services.health.supervisor import LocalSupervisor, Supervisor

log = get_logger(__name__)

TURN_S = 0.1
LOOK_S = 1.0
"""How often the master is asked."""
LOOK_STARTING_S = 0.2
"""And while something is starting."""
GRACE_S = 10.0
"""How long a role may take for an orderly end."""


class Health:
    """Looks after one local cluster.

    Args:
        cluster: its folder.
        core: decides.
        supervisor: acts.
        runtime: asks the master.
    """

    def __init__(self, cluster: LocalCluster, core: HealthCore, supervisor: Supervisor, runtime: WorkerRuntime) -> None:
        self._cluster, self._core, self._supervisor, self._runtime = cluster, core, supervisor, runtime
        self._picture: Future[Packet] | None = None
        self._look_at = 0.0
        self._reported: HealthReport | None = None

    def run(self) -> None:
        """Adopt what runs, then look after it until told to leave."""
        running = self._supervisor.adopt()
        if running:
            log.info("adopted", instances=running)
        self._happened(Adopted(pids=running))
        while not self._runtime.leaving:
            self.turn()
            self._runtime.next_work(TURN_S)  # there is none for health: a pause that the order to leave cuts short

    def turn(self) -> None:
        """Take in what happened since the last turn."""
        for event in self._supervisor.ended():
            log.warning("role_ended", instance=event.name, how=event.how)
            self._happened(event)
        self._look()
        self._happened(Tick())
        self._runtime.progress.advance()
        report = HealthReport(pid=os.getpid(), instances=self._core.report())
        if report != self._reported:
            with suppress(OSError):  # a full disk: the next turn tries again, and roles are looked after meanwhile
                self._cluster.save_health(report)
                self._reported = report

    def _look(self) -> None:
        if self._picture is not None and self._picture.done():
            try:
                status = self._picture.result().message
            except JoyNexusError:
                pass  # the core hears nothing, which is what there is to hear
            else:
                if isinstance(status, ClusterStatus):
                    self._happened(Seen(roles=status.roles))
            self._picture = None
        now = time.monotonic()
        if self._picture is None and now >= self._look_at:
            settled = all(instance.state == "running" for instance in self._core.report())
            self._look_at = now + (LOOK_S if settled else LOOK_STARTING_S)
            self._picture = self._runtime.ask(Status(), timeout_s=10.0)

    def _happened(self, event: Event) -> None:
        for command in self._core.handle(event, time.monotonic()):
            self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case Start(name=name):
                try:
                    pid = self._supervisor.start(name)
                except OSError as error:
                    self._happened(Ended(name=name, how=f"it could not be started: {error}"))
                else:
                    log.info("started", instance=name, pid=pid)
                    self._happened(Started(name=name, pid=pid))
            case Kill(name=name, why=why):
                log.warning("role_killed", instance=name, why=why)
                self._supervisor.kill(name)


def run(settings: HealthSettings) -> None:
    """Run health until SIGTERM; then take its cluster down.

    Raises:
        ValueError: if another health process looks after the same cluster.
    """
    with ExitStack() as stack:
        runtime = WorkerRuntime(settings)
        register = Register(role="health", incarnation=runtime.incarnation, pid=os.getpid(), credit={})
        if settings.cluster_dir is None:
            with runtime:
                runtime.register(register)
                runtime.serve(lambda packet: None)
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
            Health(cluster, core, supervisor, runtime).run()
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
