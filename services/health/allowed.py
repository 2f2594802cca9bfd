"""What may be asked of the Docker Engine: the list of who holds its socket, which is as good as root on the machine.

In: an action, and the labels of the container that it is for. Out: nothing, or a refusal. Never: another project's
container, the master's, keys', or this one's own; anything to do with images, volumes, networks or commands inside a
container: there is no word for these here.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping

PROJECT = "com.docker.compose.project"
SERVICE = "com.docker.compose.service"
NUMBER = "com.docker.compose.container-number"
ONE_OFF = "com.docker.compose.oneoff"

_WORKERS = re.compile(r"(trainer|inference|env)(-[a-z0-9]+)*")


class Action(enum.Enum):
    """What is done to a container."""

    RESTART = "restart"
    COPY = "make one like"
    FINISH = "have finish its work and end"
    END = "end"
    REMOVE = "remove"


def is_ours(project: str, labels: Mapping[str, str]) -> bool:
    """Return whether a container is one that is looked after: of a worker or a dashboard of this compose project."""
    service = labels.get(SERVICE, "")
    return (
        bool(project)
        and labels.get(PROJECT) == project
        and labels.get(ONE_OFF, "False") == "False"  # `docker compose run` is somebody's own
        and bool(_WORKERS.fullmatch(service) or service == "dashboard")
        and re.fullmatch(r"[1-9]\d{0,3}", labels.get(NUMBER, "")) is not None
    )


def check(action: Action, project: str, labels: Mapping[str, str]) -> None:
    """Let an action pass, or not.

    Raises:
        PermissionError: one sentence.
    """
    service, number = labels.get(SERVICE, "?"), labels.get(NUMBER, "?")
    if not is_ours(project, labels):
        raise PermissionError(f"health may not {action.value} '{service}' of project '{labels.get(PROJECT, '?')}'")
    if action is Action.RESTART:
        return
    if service == "dashboard":
        raise PermissionError(f"health may not {action.value} the dashboard: there is one, with a published port")
    if action is not Action.COPY and int(number) == 1:
        raise PermissionError(f"health may not {action.value} the first '{service}': others are made like it")
