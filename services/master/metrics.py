"""What Prometheus is told of the cluster.

In: a picture of it (`ClusterView` of the whole). Out: figures with few labels. Never: a policy's, job's or worker's
name, or a sum that falls because a worker has gone or a tenant was given another line.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from common.metrics import Figures, Tenants
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
