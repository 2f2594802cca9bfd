"""What Prometheus is told of the cluster, and the port where it asks.

In: a picture of the cluster (`ClusterView` of the whole), what the shell has counted. Out: figures with few labels.
Never: a policy's, job's or worker's name, or a sum that falls because a worker has gone or a tenant was given another
line.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from common.http_port import probe_port
from common.metrics import Figures, Page, Tenants, say_role
from common.progress import Progress
from joynexus.wire.back import ClusterView

ROLES = ("trainer", "inference", "env")
REASONS = (
    *("handshake", "key", "scope", "role", "malformed", "rate", "silent", "connections", "backlog"),
    *("undeliverable", "disk", "bug"),
)
"""What `ClusterStatus.counts` counts. What has not come up is 0: only then is the first time seen as an increase."""


class ClusterFigures:
    """Puts pictures of one cluster, one after another, into figures."""

    def __init__(self) -> None:
        self._tenants = Tenants()
        self._seen: dict[tuple[str, str], int] = {}  # restarts that a process was last said to have had
        self._restarts = Counter(dict.fromkeys(ROLES, 0))

    def put(self, view: ClusterView, figures: Figures) -> None:
        """Say how the cluster is."""
        for name in ROLES:
            figures.put("joynexus_workers", name, "idle", value=0.0)  # so that one can see that there is none
        for role in view.roles:
            figures.add("joynexus_workers", role.role, role.phase)
        for role_name, restarts in self._restarted(view).items():
            figures.put("joynexus_restarts_total", role_name, value=restarts)
        for group, wanted in view.desired.items():
            figures.put("joynexus_desired_workers", group, value=wanted)
        for row in view.demand:
            queue = row.group.partition(":")[0], row.need
            figures.put("joynexus_queue_waiting", *queue, value=row.waiting)
            figures.put("joynexus_queue_running", *queue, value=row.running)
            figures.put("joynexus_queue_oldest_seconds", *queue, value=row.oldest_s)
            figures.put("joynexus_queue_starved", *queue, value=float(row.starved))
        for lane in view.lanes:
            figures.add("joynexus_tenant_waiting", self._tenants.label(lane.tenant), lane.queue, by=lane.waiting)
        for use in view.use:
            tenant = self._tenants.label(use.tenant)
            for of, seconds in (("trainer", use.trainer_s), ("inference", use.inference_s), ("env", use.env_s)):
                figures.add("joynexus_tenant_device_seconds_total", tenant, of, by=seconds)
        for state, jobs in Counter(job.state for job in view.jobs).items():
            figures.put("joynexus_jobs", state, value=jobs)
        figures.put("joynexus_policies", value=view.policies_total)
        for reason, count in {**dict.fromkeys(REASONS, 0), **view.counts}.items():
            figures.put("joynexus_refused_total", reason, value=count)

    def _restarted(self, view: ClusterView) -> Mapping[str, int]:
        """Count restarts by role, of processes that have gone too."""
        said = {("health", row.name): (row.role, row.restarts) for row in view.instances}
        if not said:  # nobody supervises: the master's own count
            said = {("master", row.worker): (row.role, row.restarts) for row in view.roles}
        for key, (role, restarts) in said.items():
            self._restarts[role] += max(0, restarts - self._seen.get(key, 0))
        self._seen = {key: restarts for key, (_, restarts) in said.items()}
        return self._restarts


def put_disks(figures: Figures, folders: Mapping[str, Path]) -> None:
    """Say how full the disks are that the service writes to; one that cannot be asked is left out."""
    for name, folder in folders.items():
        try:
            disk = os.statvfs(folder)
        except OSError:
            continue
        figures.put("joynexus_disk_free_bytes", name, value=disk.f_bavail * disk.f_frsize)
        figures.put("joynexus_disk_size_bytes", name, value=disk.f_blocks * disk.f_frsize)


class Shell(Protocol):
    """What of the master's shell the port asks, in a thread of its own."""

    @property
    def writable(self) -> bool:
        """Return whether the journal takes records."""

    def unready(self) -> str:
        """Return why nothing can be acknowledged; empty if it can."""

    def view(self) -> ClusterView:
        """Return a picture of the cluster; TimeoutError if there is no time for it."""


class MetricsPort:
    """The master's `/healthz`, `/readyz` and `/metrics`, if an address is given.

    Args:
        listen: `host:port`; empty: none of this.
        progress: of the master's loop.
        figures: what has been counted since the start.
        disks: folders that are written to, by what is in them.

    Raises:
        ValueError: if the address cannot be listened on.
    """

    def __init__(
        self, listen: str, progress: Progress, figures: Figures, shell: Shell, disks: Mapping[str, Path]
    ) -> None:
        self._progress = progress
        self._shell = shell
        self._disks = disks
        self._cluster = ClusterFigures()
        self._started = time.monotonic()
        page = Page(self._gather, figures, time.monotonic)
        self._port = (
            probe_port(listen, alive=progress.overdue, ready=shell.unready, metrics=page.text) if listen else None
        )

    def start(self) -> None:
        """Start answering."""
        if self._port is not None:
            self._port.start()

    def stop(self) -> None:
        """Hang up."""
        if self._port is not None:
            self._port.stop()

    def _gather(self, figures: Figures) -> None:
        with suppress(TimeoutError):  # the loop has no time: what is known without it is told all the same
            self._cluster.put(self._shell.view(), figures)
        ready = not self._shell.unready()
        say_role(figures, "master", ready=ready, uptime_s=time.monotonic() - self._started)
        figures.put("joynexus_progress_total", "master", value=self._progress.report()[0])
        figures.put("joynexus_journal_writable", value=float(self._shell.writable))
        put_disks(figures, self._disks)
