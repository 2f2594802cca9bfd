"""`joynexus up | down | restart`: the cluster as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from joynexus.cli._common import (
    FOLDER,
    Folder,
)


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (up, down, restart):
        app.command()(command)


def up(
    state_dir: Folder = FOLDER,
    backbone: Annotated[str, typer.Option(help="lite, tiny-qwen3vl, a hub name or a directory.")] = "lite",
    image_side: Annotated[int, typer.Option(help="Side of the pictures the backbone sees; 0: its own.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16.")] = "float32",
    threads: Annotated[int, typer.Option(help="Threads of a role's mathematics.")] = 1,
    trainers: Annotated[int, typer.Option(min=1, help="Trainers.")] = 1,
    inference: Annotated[int, typer.Option(min=1, help="Inference services.")] = 1,
    env_workers: Annotated[int, typer.Option(min=1, help="Env services.")] = 1,
    scale: Annotated[
        str,
        typer.Option(
            help="As many as there is work for: env=1-4,inference=1-2. Later: joynexus scale.", envvar="JOYNEXUS_SCALE"
        ),
    ] = "",
    simulator_processes: Annotated[int, typer.Option(min=1, help="Simulator processes of each env service.")] = 2,
    max_slots: Annotated[int, typer.Option(min=1, help="Policies in memory at once, of each trainer.")] = 16,
    dashboard: Annotated[bool, typer.Option(help="Show the cluster to browsers on this machine.")] = True,
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
        trainers=trainers,
        inference=inference,
        env_workers=env_workers,
        scale=scale,
        simulator_processes=simulator_processes,
        max_slots=max_slots,
        dashboard=dashboard,
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


def restart(
    roles: Annotated[list[str] | None, typer.Argument(help="Roles, or processes like trainer-2; none: all.")] = None,
    state_dir: Folder = FOLDER,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that a role may take to end.")] = 60.0,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for each to be back.")] = 300.0,
) -> None:
    """Start roles anew, one after another, while the cluster goes on serving."""
    from joynexus import rolling

    names = rolling.restart(
        state_dir, roles or (), grace_s=grace, timeout_s=timeout, say=lambda line: typer.echo(line, err=True)
    )
    typer.echo(f"restarted: {', '.join(names)}")
