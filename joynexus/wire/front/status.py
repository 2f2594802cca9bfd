"""How the cluster is, and what was used."""

from __future__ import annotations

from joynexus.bounds import Short
from joynexus.wire.base import Wire


class Status(Wire, frozen=True, kw_only=True):
    """How is the cluster? Answer: `ClusterStatus`."""


class RoleStatus(Wire, frozen=True, kw_only=True):
    """One worker process. Figures (0 otherwise) and all of `detail` are shown to operators.

    Attributes:
        phase: `starting`, `loading`, `idle`, `working`, `draining`, `lost`.
        progress: counter of the work loop.
        busy_s, uptime_s: CPU time of the work loop (CUDA events on a GPU), and time, since the process started.
        restarts: how often this role was restarted since the cluster came up.
        instance: what stays the same when its process is started anew, as it registered; empty if nobody knows.
        reason: why it was last restarted, as health told; empty if health says nothing of it.
        detail: backbone, device and numerics verdict, or simulators; to operators also what its work adds.
    """

    role: str
    worker: str
    phase: str
    progress: int
    busy_s: float
    uptime_s: float
    restarts: int = 0
    pid: int = 0
    instance: str = ""
    reason: str = ""
    detail: dict[str, str] = {}


class LaneStatus(Wire, frozen=True, kw_only=True):
    """One tenant's lane in one queue.

    Attributes:
        queue: `training`, `inference` or `env`.
        waiting, running: pieces of work that wait, and that are with a worker.
        weight, priority: as the operator set them.
        used_s: device seconds charged to it in this queue since the master started.
        oldest_s: how long its oldest piece has waited.
    """

    queue: str
    tenant: str
    waiting: int
    running: int
    weight: float = 1.0
    priority: int = 0
    used_s: float = 0.0
    oldest_s: float = 0.0


class ClusterStatus(Wire, frozen=True, kw_only=True):
    """Roles (all), and of queues, policies and jobs those that the key may see.

    Attributes:
        policies, policies_resident: registered, and of these in a trainer's memory.
        counts: to operators: what was refused or failed since the master started, by kind: `handshake` (keys that
            were not let in), `key`, `scope`, `role`, `malformed`, `rate` (messages), `silent`, `connections`,
            `backlog` (connections that were ended), `undeliverable` (answers), `disk`, `bug`
    """

    server: str
    uptime_s: float
    roles: tuple[RoleStatus, ...]
    lanes: tuple[LaneStatus, ...]
    policies: int
    jobs_running: int
    versions_in_service: int
    policies_resident: int = 0
    counts: dict[str, int] = {}


class GetUsage(Wire, frozen=True, kw_only=True):
    """What did I use (an operator: what did all tenants use)? Answer: `UsageReport`.

    Attributes:
        since_month: only lines of this month and later ones, e.g. `2026-11`; empty for all.
        after: only lines behind the one with this tenant, policy, job and month: the next page.
    """

    since_month: Short = ""
    after: tuple[Short, Short, Short, Short] | None = None


class UsageLine(Wire, frozen=True, kw_only=True):
    """Metered use of one policy by one job in one month, and what belongs to none of these.

    The tenant `""` is the service itself: there `policy` says what for: `loading`, `replay`, `lost` or `failed`.

    Attributes:
        job: job whose work it was; empty for a tenant's own ops and requests.
        month: by the calendar of UTC, e.g. `2026-11`; empty for what was metered before months were.
        trainer_s, inference_s: the metered share of busy device time.
        samples: samples trained on or acted on.
        backbone_forwards: samples that went through the backbone.
        env_s: busy seconds of simulators and data preparation.
        bytes_in, bytes_out: payload moved for the tenant.
        bytes_stored: blobs kept now; in the newest line of a tenant that has neither policy nor job.
        stored_byte_s: blobs kept, in bytes times seconds.
    """

    tenant: str
    policy: str
    trainer_s: float = 0.0
    inference_s: float = 0.0
    samples: int = 0
    backbone_forwards: int = 0
    env_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_stored: int = 0
    job: str = ""
    month: str = ""
    stored_byte_s: float = 0.0


class UsageReport(Wire, frozen=True, kw_only=True):
    """Use by tenant, policy, job and month, in that order; `more` tells that further lines follow (`GetUsage.after`).

    A line with an empty policy holds what belongs to none of the tenant's. `prices` are the operator's, as text: the
    `currency`, and the price of each field that has one; empty if there are none.
    """

    lines: tuple[UsageLine, ...]
    more: bool = False
    prices: dict[str, str] = {}
