"""`joynexus up | down | status | usage`: the cluster as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from joynexus.cli._common import FOLDER, Config, Folder, Json, client, human_bytes, print_json, print_table

if TYPE_CHECKING:
    from joynexus.local import InstanceHealth


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (up, down, status, usage):
        app.command()(command)


def up(
    state_dir: Folder = FOLDER,
    backbone: Annotated[str, typer.Option(help="lite, tiny-qwen3vl, a hub name or a directory.")] = "lite",
    image_side: Annotated[int, typer.Option(help="Side of the pictures the backbone sees; 0: its own.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16.")] = "float32",
    threads: Annotated[int, typer.Option(help="Threads of a role's mathematics.")] = 1,
    env_workers: Annotated[int, typer.Option(help="Env services.")] = 1,
    simulator_processes: Annotated[int, typer.Option(help="Simulator processes of each env service.")] = 2,
    datasets_dir: Annotated[Path | None, typer.Option(help="Folder with data sets to mount.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="What may be deleted; otherwise in the state folder.")] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning, error.")] = "info",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for all roles.")] = 300.0,
) -> None:
    """Start a cluster of local processes and wait until it works."""
    import time

    from rich.console import Console

    from joynexus import launch

    options = launch.Options(
        backbone=backbone,
        image_side=image_side,
        device=device,
        dtype=dtype,
        threads=threads,
        env_workers=env_workers,
        simulator_processes=simulator_processes,
        datasets_dir=datasets_dir,
        cache_dir=cache_dir,
        log_level=log_level,
        timeout_s=timeout,
    )
    console, start = Console(stderr=True), time.monotonic()
    if console.is_terminal:
        with console.status("starting") as spinner:
            cluster = launch.up(state_dir, options, spinner.update)
    else:
        cluster = launch.up(state_dir, options, lambda line: typer.echo(line, err=True))
    typer.echo(f"up after {time.monotonic() - start:.1f} s. Connect with {cluster.client_file}, logs in {cluster.run}")


def down(state_dir: Folder = FOLDER) -> None:
    """End the cluster; what was acknowledged is kept."""
    from joynexus import launch

    ended = launch.down(state_dir)
    typer.echo(f"down: {', '.join(ended)}" if ended else f"nothing runs in {state_dir}")


def status(config: Config = None, json: Json = False) -> None:
    """Show roles, queues and what health knows of them."""
    with client(config) as connected:
        cluster = connected.status()
    instances = _health(config)
    if json:
        print_json({"cluster": cluster, "instances": instances})
        return
    by_pid = {instance.pid: instance for instance in instances}
    rows = []
    for role in cluster.roles:
        instance = by_pid.pop(role.pid, None)
        restarts = instance.restarts if instance else role.restarts
        detail = ", ".join(f"{name} {value}" for name, value in sorted(role.detail.items()))
        busy = f"{100 * role.busy_s / role.uptime_s:.0f} %" if role.uptime_s > 0 else "-"
        note = f"restarted: {instance.reason}" if instance and instance.reason else detail
        rows.append((role.worker, role.phase, busy, restarts, role.pid, note))
    rows += [
        (instance.name, "ready" if instance.role == "master" and instance.state == "running" else instance.state,
         "-", instance.restarts, instance.pid, instance.reason)
        for instance in by_pid.values()
    ]  # fmt: skip
    print_table(("worker", "phase", "busy", "restarts", "pid", "detail"), rows, title=f"cluster {cluster.server}")
    if cluster.lanes:
        lanes = [(lane.queue, lane.tenant, lane.waiting, lane.running) for lane in cluster.lanes]
        print_table(("queue", "tenant", "waiting", "running"), lanes)
    typer.echo(
        f"up {cluster.uptime_s:.0f} s, {cluster.policies} policies, {cluster.jobs_running} jobs running, "
        f"{cluster.versions_in_service} versions in service"
    )


def usage(config: Config = None, json: Json = False) -> None:
    """Show what this tenant used."""
    with client(config) as connected:
        report = connected.usage()
    if json:
        print_json(report)
        return
    columns = ("policy", "trainer s", "inference s", "env s", "samples", "backbone forwards", "in", "out", "stored")
    rows = [
        (
            line.policy or "(none)", line.trainer_s, line.inference_s, line.env_s, line.samples,
            line.backbone_forwards, human_bytes(line.bytes_in), human_bytes(line.bytes_out),
            human_bytes(line.bytes_stored),
        )
        for line in report.lines
    ]  # fmt: skip
    print_table(columns, rows)


def _health(config: Path | None) -> tuple[InstanceHealth, ...]:
    """Return what health wrote down, if the cluster runs in the folder of the client file."""
    from joynexus.keys import find_cluster_file
    from joynexus.local import LocalCluster

    report = LocalCluster((config or find_cluster_file()).parent).load_health()
    return report.instances if report else ()
