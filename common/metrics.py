"""What a role counts, and how Prometheus reads it: the names of all metrics, their values, the text.

In: values, as they come up, from any thread. Out: the text format of Prometheus. Never: a label that a tenant can
choose without bound (a policy, a job, a request), or a name that is not in the tables below: dashboards, alert rules
and docs/operating.md are compared with them.

Base units throughout: seconds, bytes, and counts of things; counters end in `_total`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from common.telemetry import noted
from joynexus import __version__

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

MOST_TENANTS = 100
"""Tenants with lines of their own; those that come later are `others` together."""
OTHERS = "others"
SERVICE = "(service)"
"""Who is charged with what no tenant is: loading, replays, work that was lost."""

ALERTED = (
    "checkpoint_failed",
    "disk_failed",
    "limits_unreadable",
    "manifest_unreadable",
    "op_failed",
    "payload_lost",
    "payload_unread",
    "policy_not_opened",
    "prices_unreadable",
    "registration_refused",
    "registry_unreadable",
    "replay_differs",
    "slot_failed",
    "task_failed",
    "version_not_loaded",
    "version_refused",
    "weights_refused",
    "worker_quarantined",
    "worker_refused",
)
"""Events that have a line from the start: Prometheus sees no increase in a line that begins with 1."""

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_LONG = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0)
_COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


@dataclass(frozen=True)
class Metric:
    """A metric's name, kind, and what it says.

    Attributes:
        labels: names of its labels; each has few values.
        buckets: upper bounds, of a histogram.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _table(*metrics: Metric) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


EVERY_ROLE = _table(
    Metric("joynexus_build_info", "gauge", "Release of the role, always 1.", ("role", "version")),
    Metric("joynexus_ready", "gauge", "Whether the role serves: what /readyz says.", ("role",)),
    Metric("joynexus_uptime_seconds", "gauge", "Time since the process began to serve.", ("role",)),
    Metric("joynexus_progress_total", "counter", "Pieces of work that the work loop got done.", ("role",)),
    Metric(
        "joynexus_log_events_total",
        "counter",
        "Lines in the log at warning or above, by the event that docs/runbook.md explains.",
        ("role", "event"),
    ),
)
"""What each process has; `process_*` of the Prometheus client comes beside it."""

WORKERS = _table(
    Metric(
        "joynexus_busy_seconds_total", "counter", "Busy time: CPU of the work loop, on a GPU of the device.", ("role",)
    ),
    Metric("joynexus_work_total", "counter", "Pieces of work answered.", ("role", "kind", "outcome")),
    Metric(
        "joynexus_work_seconds",
        "histogram",
        "What a piece of work took: busy time at trainer and inference, clock time at env.",
        ("role", "kind"),
        _LONG,
    ),
    Metric("joynexus_group_policies", "histogram", "Policies that shared a group's forward.", ("role",), _COUNTS),
    Metric("joynexus_group_items", "histogram", "Ops, or requests to act, in a group.", ("role",), _COUNTS),
    Metric("joynexus_backbone_forwards_total", "counter", "Samples that went through the backbone.", ("role",)),
    Metric("joynexus_features_total", "counter", "Features looked up in the store.", ("role", "result")),
    Metric("joynexus_episodes_total", "counter", "Episodes answered.", ("outcome",)),
)

MASTER = _table(
    Metric("joynexus_workers", "gauge", "Workers, by phase (`lost`: silent for too long).", ("role", "phase")),
    Metric("joynexus_desired_workers", "gauge", "Workers that scaling aims at.", ("group",)),
    Metric("joynexus_restarts_total", "counter", "Restarts of roles since the cluster came up.", ("role",)),
    Metric("joynexus_queue_waiting", "gauge", "Pieces of work that wait.", ("queue", "need")),
    Metric("joynexus_queue_running", "gauge", "Pieces of work with a worker.", ("queue", "need")),
    Metric("joynexus_queue_oldest_seconds", "gauge", "How long the oldest that waits has waited.", ("queue", "need")),
    Metric("joynexus_queue_starved", "gauge", "Whether trainers wait for this (1) or not (0).", ("queue", "need")),
    Metric("joynexus_queue_seconds", "histogram", "How long a piece of work waited for a worker.", ("queue",), _LONG),
    Metric("joynexus_tenant_waiting", "gauge", "Pieces of work of a tenant that wait.", ("tenant", "queue")),
    Metric("joynexus_tenant_device_seconds_total", "counter", "Metered device time.", ("tenant", "role")),
    Metric("joynexus_jobs", "gauge", "Jobs, by state (of the newest 500).", ("state",)),
    Metric("joynexus_policies", "gauge", "Policies.", ()),
    Metric("joynexus_ops_total", "counter", "Requests of tenants that were answered.", ("op", "outcome")),
    Metric(
        "joynexus_op_seconds", "histogram", "From a tenant's request to its answer, waiting included.", ("op",), _LONG
    ),
    Metric("joynexus_refused_total", "counter", "Messages and connections refused, and faults, by kind.", ("reason",)),
    Metric("joynexus_journal_commit_seconds", "histogram", "Time to have records on the disk.", (), _SHORT),
    Metric("joynexus_journal_failures_total", "counter", "Commits that the journal's disk did not take.", ()),
    Metric("joynexus_journal_writable", "gauge", "Whether the last commit went well.", ()),
    Metric("joynexus_disk_free_bytes", "gauge", "Room left for the journal, and for blobs.", ("folder",)),
    Metric("joynexus_disk_size_bytes", "gauge", "Size of those file systems.", ("folder",)),
)

ALL_METRICS = {**EVERY_ROLE, **WORKERS, **MASTER}


@dataclass
class Distribution:
    """Values of a histogram: how many fell between each two bounds (the last: above all of them), and their sum."""

    counts: list[int]
    sum: float = 0.0


Values = dict[tuple[str, ...], float]


@dataclass
class Figures:
    """Values of metrics by name and labels. Every method may be called by any thread."""

    _values: dict[str, Values] = field(default_factory=dict)
    _distributions: dict[str, dict[tuple[str, ...], Distribution]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Count; also a gauge that is summed up."""
        with self._lock:
            values = self._values.setdefault(name, {})
            values[labels] = values.get(labels, 0.0) + by

    def put(self, name: str, *labels: str, value: float) -> None:
        """Say what a gauge is now, or a counter that somebody else counts."""
        with self._lock:
            self._values.setdefault(name, {})[labels] = value

    def observe(self, name: str, *labels: str, value: float) -> None:
        """Take a value into a histogram."""
        bounds = ALL_METRICS[name].buckets
        with self._lock:
            distributions = self._distributions.setdefault(name, {})
            distribution = distributions.get(labels)
            if distribution is None:
                distribution = distributions[labels] = Distribution([0] * (len(bounds) + 1))
            distribution.counts[bisect_left(bounds, value)] += 1
            distribution.sum += value

    def values(self, name: str) -> Values:
        """Return a counter's or gauge's values."""
        with self._lock:
            return dict(self._values.get(name, {}))

    def distributions(self, name: str) -> dict[tuple[str, ...], Distribution]:
        """Return a histogram's values."""
        with self._lock:
            held = self._distributions.get(name, {})
            return {labels: Distribution(list(each.counts), each.sum) for labels, each in held.items()}

    def names(self) -> set[str]:
        """Return the names of metrics that have a value."""
        with self._lock:
            return {*self._values, *self._distributions}


class Tenants:
    """Names that tenants have as labels: their own for the first `MOST_TENANTS`, and `others`.

    Who has a line keeps it: sums that moved from one line to another would look like use.
    """

    def __init__(self, most: int = MOST_TENANTS) -> None:
        self._most = most
        self._known: set[str] = set()

    def label(self, tenant: str) -> str:
        """Return what a tenant is called; the empty name is the service's own."""
        if not tenant:
            return SERVICE
        if tenant not in self._known:
            if len(self._known) >= self._most:
                return OTHERS
            self._known.add(tenant)
        return tenant


class Page:
    """The text of figures that change, made at most once a second however often it is asked for.

    Args:
        gather: puts into its argument what is to be said now.
        kept: what was counted since the start.
    """

    def __init__(self, gather: Callable[[Figures], None], kept: Figures, clock: Callable[[], float]) -> None:
        self._gather = gather
        self._kept = kept
        self._clock = clock
        self._text = b""
        self._until = float("-inf")

    def text(self) -> bytes:
        """Return the text; whatever `gather` raises is raised."""
        if self._clock() >= self._until:
            now = Figures()
            self._gather(now)
            self._text = render(self._kept, now, process=True)
            self._until = self._clock() + 1.0
        return self._text


def say_role(figures: Figures, role: str, *, ready: bool, uptime_s: float) -> None:
    """Put what each process has, whatever its role; its progress beside it."""
    figures.put("joynexus_build_info", role, __version__, value=1.0)
    figures.put("joynexus_ready", role, value=float(ready))
    figures.put("joynexus_uptime_seconds", role, value=uptime_s)
    for event, count in {**dict.fromkeys(ALERTED, 0), **noted()}.items():
        figures.put("joynexus_log_events_total", role, event, value=count)


def render(*figures: Figures, process: bool = False) -> bytes:
    """Write values in the text format of Prometheus, in the order of the tables above, lines in that of their labels.

    Args:
        figures: all values of a metric are in one of them.
        process: add memory, CPU time and open files of this process, under the usual names (`process_*`).
    """
    # Here, so that a role whose metrics nobody reads does not pay for the import.
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

    text = generate_latest(_Families(figures))
    if process:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        text += generate_latest(registry)
    return text


class _Families:
    """Values as the Prometheus client wants them; a `Collector` of it."""

    def __init__(self, figures: Iterable[Figures]) -> None:
        self._figures = list(figures)

    def collect(self) -> Iterator[Family]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for metric in ALL_METRICS.values():
            for figures in self._figures:
                if metric.kind == "histogram":
                    distributions = sorted(figures.distributions(metric.name).items())
                    histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
                    for labels, each in distributions:
                        bounds = [*(f"{bound:g}" for bound in metric.buckets), "+Inf"]
                        buckets = list(zip(bounds, accumulate(each.counts), strict=True))
                        histogram.add_metric(labels, buckets, each.sum)
                    if distributions:
                        yield histogram
                    continue
                make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = make(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
                values = sorted(figures.values(metric.name).items())
                for labels, value in values:
                    family.add_metric(labels, value)
                if values:
                    yield family
