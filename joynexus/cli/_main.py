"""Entry point: commands, and what a user sees when one fails.

In: arguments. Out: exit code 0, 1 (it failed, one sentence says why) or 2 (wrong usage). Never: a traceback for
anything a user can put right.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

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


_WRONG_USAGE = typer.BadParameter.__mro__[1]
"""click's `UsageError`; some releases of typer have a click of their own, so it is not imported by name."""
_INTERRUPTED = 130


def app() -> None:
    """Run the command line and exit."""
    try:
        code = commands(standalone_mode=False)  # else typer draws a box around what is wrong
        if code == _INTERRUPTED:  # what typer makes of a KeyboardInterrupt
            raise typer.Abort
        sys.exit(code if isinstance(code, int) else 0)
    except (KeyboardInterrupt, typer.Abort):
        fail("interrupted; jobs that were started go on in the cluster", _INTERRUPTED)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (ValueError, OSError) as error:
        fail(str(error), 1)
    except Exception as error:
        if isinstance(error, _WRONG_USAGE):
            _fail_usage(error)
        from joynexus.wire.errors import JoyNexusError

        if not isinstance(error, JoyNexusError):
            raise
        request = f" (request {error.request_id})" if error.failure.category == "server" and error.request_id else ""
        fail(str(error) + request, 1)


def _fail_usage(error: Any) -> NoReturn:  # Any: click's, whichever it is
    if not (sentence := error.format_message()):  # nothing was said, and the help is shown already
        sys.exit(2)
    whose = f" (`{error.ctx.command_path} --help` says what there is)" if error.ctx else ""
    fail(sentence.rstrip(".") + whose, 2)


def fail(sentence: str, code: int) -> NoReturn:
    """Say what is wrong and exit."""
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(sentence, err=True)
    sys.exit(code)
