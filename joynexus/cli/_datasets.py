"""`joynexus datasets push | check | list | delete`: data sets by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from joynexus.cli._common import Config, Json, client, human_bytes, print_json, print_table

if TYPE_CHECKING:
    from joynexus.wire.front import DatasetInfo

commands = typer.Typer(help="Push, check and delete data sets.", no_args_is_help=True)


@commands.command()
def push(
    name: Annotated[str, typer.Argument(help="Name of the data set from here on.")],
    folder: Annotated[
        Path, typer.Argument(help="LeRobot data set (v2.0, v2.1, v3.0), or HDF5 files as LIBERO has them.")
    ],
    image_side: Annotated[int, typer.Option(help="Resize pictures to this many pixels a side; 0 keeps them.")] = 0,
    config: Config = None,
    json: Json = False,
) -> None:
    """Upload a data set and have it checked; files that the service has are not sent again."""
    with client(config) as connected:
        info = connected.datasets.push(name, folder, image_side=image_side)
    _show(info, json)


@commands.command()
def check(
    name: Annotated[str, typer.Argument(help="Name of the data set.")], config: Config = None, json: Json = False
) -> None:
    """Say what a data set is and what is wrong with it."""
    with client(config) as connected:
        info = connected.datasets.check(name)
    _show(info, json)


@commands.command()
def delete(name: Annotated[str, typer.Argument(help="Name of the data set.")], config: Config = None) -> None:
    """Delete a data set of your own that no job needs any more."""
    with client(config) as connected:
        connected.datasets.delete(name)
    typer.echo(f"deleted data set '{name}'")


@commands.command("list")
def list_(config: Config = None, json: Json = False) -> None:
    """List the data sets that jobs can name."""
    with client(config) as connected:
        infos = connected.datasets.list()
    if json:
        print_json(infos)
        return
    rows = [
        (i.dataset, i.state, i.episodes, i.steps, i.source_format, "shared" if i.shared else "", len(i.faults))
        for i in infos
    ]
    print_table(("data set", "state", "episodes", "steps", "format", "", "faults"), rows)


def _show(info: DatasetInfo, json: bool) -> None:
    if json:
        print_json(info)
    else:
        _describe(info)
    if info.state == "faulty":
        errors = [fault for fault in info.faults if fault.severity == "error"]
        first = f": {errors[0].where}: {errors[0].what}" if errors else ""
        raise ValueError(f"data set '{info.dataset}' cannot be used{first}")


def _describe(info: DatasetInfo) -> None:
    typer.echo(
        f"{info.dataset}: {info.state}, {info.episodes} episodes, {info.steps} steps at {info.fps:g} Hz, "
        f"{info.source_format or 'unknown format'}, {human_bytes(info.nbytes)}"
    )
    if info.contract is not None:
        cameras = ", ".join(f"{c.name} {c.height}x{c.width}" for c in info.contract.cameras) or "none"
        typer.echo(f"state {info.contract.state_dim}, action {info.contract.action_dim}, cameras {cameras}")
    for fault in info.faults:
        typer.secho(f"  {fault.severity}: ", fg="red" if fault.severity == "error" else "yellow", nl=False)
        typer.echo(f"{fault.where}: {fault.what}")
