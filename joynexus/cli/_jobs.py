"""`joynexus jobs list | show | wait | cancel | resume`: jobs that were started."""

from __future__ import annotations

from typing import Annotated

import typer

from joynexus.cli._common import Config, Json, client, human_seconds, print_json, print_table
from joynexus.cli._results import describe_job

commands = typer.Typer(help="Jobs: list them, watch, cancel and resume one.", no_args_is_help=True)
JobId = Annotated[str, typer.Argument(help="Id of the job.")]


@commands.command("list")
def list_(config: Config = None, json: Json = False) -> None:
    """List jobs, newest first."""
    from joynexus.client._jobs import describe

    with client(config) as connected:
        infos = connected.jobs()
    if json:
        print_json(infos)
        return
    rows = [(i.job, i.state, f"{i.done}/{i.total}", human_seconds(i.seconds), describe(i.spec)) for i in infos]
    print_table(("job", "state", "done", "time", "what"), rows)
    for info in infos:
        if info.message and info.state in ("waiting", "parked", "paused"):
            typer.echo(f"{info.job} {info.state}: {info.message}")


@commands.command()
def show(job: JobId, config: Config = None, json: Json = False) -> None:
    """Show a job."""
    with client(config) as connected:
        info = connected.job(job).info()
    describe_job(info, json)


@commands.command()
def wait(job: JobId, config: Config = None, json: Json = False) -> None:
    """Wait for a job."""
    with client(config) as connected:
        info = connected.job(job).wait()
    describe_job(info, json)


@commands.command()
def cancel(job: JobId, config: Config = None, json: Json = False) -> None:
    """Stop a job; what it published stays."""
    with client(config) as connected:
        info = connected.job(job).cancel()
    describe_job(info, json)


@commands.command()
def resume(job: JobId, config: Config = None, json: Json = False) -> None:
    """Have a parked job go on where it stopped."""
    with client(config) as connected:
        info = connected.job(job).resume()
    describe_job(info, json)
