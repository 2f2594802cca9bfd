"""`joynexus env serve`: a tenant's own environment, from its own machine."""

from __future__ import annotations

from typing import Annotated

import typer

from joynexus.cli._common import Config

commands = typer.Typer(help="Your own environments.", no_args_is_help=True)


@commands.callback()
def _group() -> None:
    """Your own environments."""  # without this, typer takes the only command for the group


@commands.command()
def serve(
    target: Annotated[str, typer.Argument(help="module:function that returns a Simulator or a gymnasium.Env.")],
    name: Annotated[str, typer.Option(help="The task is own/NAME in specs; otherwise the module's name.")] = "",
    processes: Annotated[int, typer.Option(min=1, max=64, help="Processes; each runs some episodes at a time.")] = 1,
    environments: Annotated[
        int, typer.Option(min=1, max=64, help="Environments in each process; 1 if it cannot have two.")
    ] = 8,
    instruction: Annotated[str, typer.Option(help="Task text in place of the environment's own.")] = "",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a reset or a step may take.")] = 60.0,
    config: Config = None,
) -> None:
    """Serve an environment to the cluster until Ctrl-C: evaluation and RL run in it as `own/NAME`.

    It is found as Python finds modules, and in the current folder first.
    """
    import os
    import signal
    import sys

    from joynexus.client._client import dial, greet
    from joynexus.client._flow import run
    from joynexus.simulation.interface import SimulatorError
    from joynexus.simulation.pool import Deadlines
    from joynexus.simulation.serve import EnvironmentHost, Serving
    from joynexus.specs import check_name

    sys.path.insert(0, os.getcwd())
    serving = Serving(
        target=target,
        name=check_name("task", name or target.partition(":")[0].rpartition(".")[2].lower()),
        processes=processes,
        environments=environments,
        instruction=instruction,
        deadlines=Deadlines(reset_s=timeout, step_s=timeout),
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    connection = dial(config)
    try:
        run(greet(connection, 5.0))
        EnvironmentHost(connection, serving, lambda line: typer.echo(line, err=True)).serve()
    except KeyboardInterrupt:
        typer.echo(f"{serving.env} is served no more from here", err=True)
    except SimulatorError as error:
        raise ValueError(str(error)) from error
    finally:
        connection.close()
