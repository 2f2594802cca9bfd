"""`joynexus scale`: how many processes of a kind a cluster on this machine runs, and from how many to how many it may;
`joynexus drain`: have one of any cluster finish and end.

In: words like `env=3` or `env=1-4`, a worker. Out: what health is to see to, written into the cluster's folder; how it
is now. Never: a process started or ended here.
"""

from __future__ import annotations

import time
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from joynexus.cli._common import FOLDER, Config, Folder, client, print_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from joynexus.local import LocalCluster
    from joynexus.scale import Range

LAST = 10
"""Decisions that are shown."""


def scale(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="env=3: three. env=1-4: as many as there is work for, within these. None: show.", metavar="GROUP=N"
        ),
    ] = None,
    state_dir: Folder = FOLDER,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait until it is so.")] = 300.0,
) -> None:
    """Say how many processes of a kind there should be, or may be; a cluster goes on serving meanwhile."""
    from joynexus.local import LocalCluster
    from joynexus.scale import parse_scale

    cluster = LocalCluster(state_dir)
    cluster.load_plan()
    if not cluster.running("health"):
        raise ValueError(f"health does not run in {state_dir}, and it starts processes: run `joynexus up` first")
    asked = parse_scale(",".join(words or ()), families=False)
    if asked:
        cluster.save_scale({**cluster.load_scale(), **asked})
        _wait(cluster, asked, timeout)
    _show(cluster)


def drain(
    worker: Annotated[str, typer.Argument(help="Its name, or its process's, in `joynexus status`, e.g. env-2.")],
    config: Config = None,
) -> None:
    """Give a worker nothing new, and have it end when it has finished what it has; it is started anew then."""
    with client(config) as connected:
        connected.drain_worker(worker)
    typer.echo(f"{worker} gets no more work, and ends when it has finished what it has")


def _wait(cluster: LocalCluster, asked: Mapping[str, Range], timeout_s: float) -> None:
    """Wait until as many run as may; those that are to leave may take as long as their work does."""
    from joynexus.scale import group_of

    deadline = time.monotonic() + timeout_s
    while True:
        report = cluster.load_health()
        stay = [i for i in report.instances if i.state != "leaving"] if report else []
        ready = Counter(group_of(i.name) for i in stay if i.state == "running")
        wanted = Counter(group_of(i.name) for i in stay)
        if all(limit.least <= ready[group] and wanted[group] <= limit.most for group, limit in asked.items()):
            return
        if looping := [i for i in stay if i.state == "crash-loop" and group_of(i.name) in asked]:
            raise ValueError(f"{looping[0].name} cannot be started: {looping[0].reason}")
        if time.monotonic() > deadline:
            now = ", ".join(f"{group} {ready[group]}" for group in asked)
            raise ValueError(
                f"not so within {timeout_s:g} s, it goes on: ready are {now} (see the logs in {cluster.run})"
            )
        time.sleep(0.05)


def _show(cluster: LocalCluster) -> None:
    from joynexus.scale import WORKERS, group_of

    report, limits = cluster.load_health(), cluster.load_scale()
    states: dict[str, Counter[str]] = {group: Counter() for group in WORKERS}
    for instance in report.instances if report else ():
        states.setdefault(group_of(instance.name), Counter())[instance.state] += 1
    rows: list[tuple[object, ...]] = []
    for group in WORKERS:
        found = states[group]
        now = ", ".join(f"{count} {state}" for state, count in sorted(found.items()))
        rows.append((group, sum(found.values()) - found["leaving"], limits.get(group, "-"), now))
    print_table(("group", "wanted", "limits", "now"), rows)
    for decision in report.decisions[-LAST:] if report else ():
        at = datetime.fromtimestamp(decision.at, UTC).strftime("%H:%M:%S")  # as logs and the dashboard say it
        typer.echo(f"{at} {decision.group} {decision.before} → {decision.after}: {decision.reason}")
