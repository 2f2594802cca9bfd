"""`joynexus status`: roles, what they run on, lanes of the queues, and what health knows.

In: the master's picture, and health's report where the cluster runs on this machine. Out: tables that fit a terminal of
80 columns, or JSON. Never: a change to anything.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from joynexus.cli._common import Config, Json, client, human_seconds, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from joynexus.local import InstanceHealth
    from joynexus.wire.front import ClusterStatus, LaneStatus, RoleStatus


def status(config: Config = None, json: Json = False) -> None:
    """Show roles, lanes of the queues, and what health knows of them."""
    with client(config) as connected:
        cluster = connected.status()
    instances = _health(config)
    if json:
        print_json({"cluster": cluster, "instances": instances})
        return
    typer.echo(f"cluster {cluster.server}, up {human_seconds(cluster.uptime_s)}")
    _show_roles(cluster.roles, instances)
    found = [*_found("numerics", cluster.roles), *_found("grouping", cluster.roles)]
    apart = [f"{r.worker} is quarantined: {why}" for r in cluster.roles if (why := r.detail.get("quarantined"))]
    for sentence in [*found, *apart, *_restarts(cluster.roles, instances)]:
        typer.echo(sentence)
    _show_lanes(cluster.lanes)
    typer.echo(_counts(cluster))
    if cluster.counts:
        counted = ", ".join(f"{what} {count}" for what, count in sorted(cluster.counts.items()))
        typer.echo(f"refused or failed since the master started: {counted}")


def _show_roles(roles: Sequence[RoleStatus], instances: Sequence[InstanceHealth]) -> None:
    processes = list(instances)
    here = f"{socket.gethostname()}/" if instances else ""  # all processes of a cluster in a folder are on this host
    rows: list[tuple[object, ...]] = []
    for role in roles:
        process = next((process for process in processes if _is(role, process)), None)
        if process is not None:
            processes.remove(process)
        name = process.name if process else role.instance.removeprefix(here)
        busy = f"{100 * role.busy_s / role.uptime_s:.0f} %" if role.uptime_s > 0 else "-"
        rows.append((role.worker, name, role.phase, busy, role.pid or "-", _what(role.detail)))
    for left in processes:
        state = "ready" if left.role == "master" and left.state == "running" else left.state
        rows.append((left.role if left.role == "master" else "-", left.name, state, "-", left.pid, ""))
    print_table(("worker", "process", "phase", "busy", "pid", "runs"), rows)


def _is(role: RoleStatus, process: InstanceHealth) -> bool:
    """Tell whether a worker is this process; by its pid alone if nobody knows which instance it is."""
    if role.instance and process.instance:
        return role.instance == process.instance
    return bool(role.pid) and role.pid == process.pid


def _what(detail: Mapping[str, str]) -> str:
    """Say what a role works with."""
    if "backbone" in detail:
        exact = {"exact": "exact", "not exact": "not exact"}.get(detail.get("numerics", "").partition(":")[0], "")
        return ", ".join(filter(None, (detail["backbone"], f"{detail.get('device')} {detail.get('dtype')}", exact)))
    return detail.get("simulators", "")


def _found(what: str, roles: Iterable[RoleStatus]) -> list[str]:
    """Say once for each finding of a start-up trial, `numerics` or `grouping`, whose it is."""
    workers: defaultdict[str, list[str]] = defaultdict(list)
    for role in roles:
        if finding := role.detail.get(what):
            workers[finding].append(role.worker)
    return [f"{what} of {', '.join(names)}: {finding}" for finding, names in workers.items()]


def _restarts(roles: Iterable[RoleStatus], instances: Iterable[InstanceHealth]) -> list[str]:
    """Say who was restarted, and why if health knows it; else what the master counted."""
    known = [(i.name, i.restarts, i.reason) for i in instances] or [(r.worker, r.restarts, r.reason) for r in roles]
    return [
        f"{name} was restarted {'once' if restarts == 1 else f'{restarts} times'}" + (f": {reason}" if reason else "")
        for name, restarts, reason in known
        if restarts
    ]


def _show_lanes(lanes: Sequence[LaneStatus]) -> None:
    if not lanes:
        return
    rows = [
        (lane.queue, lane.tenant, lane.weight, lane.priority, lane.waiting, lane.running, human_seconds(lane.used_s),
         human_seconds(lane.oldest_s) if lane.waiting else "-")
        for lane in lanes
    ]  # fmt: skip
    print_table(("queue", "tenant", "weight", "priority", "waiting", "running", "device", "oldest"), rows)


def _counts(cluster: ClusterStatus) -> str:
    return (
        f"policies {cluster.policies}, in a trainer's memory {cluster.policies_resident}; "
        f"jobs not ended {cluster.jobs_running}; versions served {cluster.versions_in_service}"
    )


def _health(config: Path | None) -> tuple[InstanceHealth, ...]:
    """Return what health wrote down, if the cluster runs in the folder of the client file."""
    from joynexus.keys import find_cluster_file
    from joynexus.local import LocalCluster

    report = LocalCluster((config or find_cluster_file()).parent).load_health()
    return report.instances if report else ()
