"""Entry point: commands, and what a user sees when one fails.

In: arguments. Out: exit code 0, 1 (it failed, one sentence says why) or 2 (wrong usage). Never: a traceback for
anything a user can put right.
"""

from __future__ import annotations

import os
import sys

import typer

from joynexus.cli import _admin, _cluster, _dashboard, _datasets, _env, _jobs, _policies, _run, _scale, _status, _usage

commands = typer.Typer(
    name="joynexus",
    help="Post-train robot policies on shared machines: push data, train, evaluate, act.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
_cluster.add_to(commands)
commands.command()(_scale.scale)
commands.command()(_scale.drain)
commands.command()(_status.status)
commands.command()(_usage.usage)
commands.command()(_dashboard.dashboard)
_run.add_to(commands)
_policies.add_to(commands)
commands.add_typer(_jobs.commands, name="jobs")
commands.add_typer(_datasets.commands, name="datasets")
commands.add_typer(_env.commands, name="env")
commands.add_typer(_admin.commands, name="admin")


def app() -> None:
    """Run the command line and exit."""
    try:
        commands()
    except KeyboardInterrupt:
        fail("interrupted; jobs that were started go on in the cluster", 130)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (ValueError, OSError) as error:
        fail(str(error), 1)
    except Exception as error:
        from joynexus.wire.errors import JoyNexusError

        if not isinstance(error, JoyNexusError):
            raise
        request = f" (request {error.request_id})" if error.failure.category == "server" and error.request_id else ""
        fail(str(error) + request, 1)


def fail(sentence: str, code: int) -> None:
    """Say what is wrong and exit."""
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(sentence, err=True)
    sys.exit(code)
