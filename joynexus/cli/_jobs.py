"""`joynexus jobs list | show | wait | cancel | resume`: jobs that were started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from joynexus.cli._common import Config, Json, client, human_seconds, print_json, print_table

if TYPE_CHECKING:
    from joynexus.wire.front import JobInfo

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
        if info.message and info.state in ("waiting", "parked"):
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


def describe_job(info: JobInfo, json: bool) -> None:
    """Print what is known of a job."""
    if json:
        print_json(info)
        return
    typer.echo(f"job {info.job}: {info.state}, {info.done} of {info.total}, {info.seconds:.1f} s")
    if info.losses:
        typer.echo(f"loss {info.losses[0]:.4f} → {info.losses[-1]:.4f}, version {info.version or '-'}")
    if info.samples:
        typer.echo(f"{info.backbone_forwards} backbone forwards for {info.samples} samples")
    if (found := info.evaluation) is not None:
        typer.echo(
            f"version {found.version}: success {found.successes}/{found.episodes} = {found.success:.0%} "
            f"(95 % interval {found.low:.0%} to {found.high:.0%}), mean {found.mean_steps:.0f} steps"
        )
    if (error := info.action_error) is not None:
        typer.echo(
            f"version {error.version} on {error.samples} samples: action error {error.policy:.4f}; "
            f"mean action {error.mean_action:.4f}, repeated state {error.repeat_state:.4f}"
        )
    why = info.error.message if info.error is not None else info.message
    if why:
        typer.echo(f"why: {why}")
    if info.state == "parked":
        typer.echo(f"`joynexus jobs resume {info.job}` has it go on, `joynexus jobs cancel {info.job}` ends it")
