"""One project of Docker Compose: what a person would type, and what the Engine says of its containers.

In: the checkout, variables that go before those of .env. Out: the output of commands, what runs. Never: another
project than its own; a container, network or volume left when it was taken down.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "joynexus-test"


def missing() -> str:
    """Return why there is nothing to test with, in one sentence; empty if there is an Engine with Compose."""
    if shutil.which("docker") is None:
        return "no docker command was found"
    for command, what in ((["compose", "version"], "docker has no compose plugin"), (["info"], "no Engine answers")):
        if subprocess.run(["docker", *command], capture_output=True, check=False).returncode:
            return what
    if os.geteuid() != 0:
        return "processes of containers are killed, which only root may"
    return ""


@dataclass(frozen=True)
class Container:
    """What the Engine says of a container.

    Attributes:
        state: `running`, `exited`, `restarting`, …
        health: `healthy`, `starting`, `unhealthy`; empty for one that is not asked.
        pid: of its first process, 0 if it does not run.
        started: when it was started, as the Engine writes it.
    """

    id: str
    name: str
    service: str
    state: str
    health: str
    pid: int
    started: str
    exit_code: int
    restarts: int

    @property
    def ready(self) -> bool:
        """Whether it runs and says that it serves."""
        return self.state == "running" and self.health == "healthy"


class Compose:
    """The project.

    Args:
        settings: variables, e.g. the ports that it publishes.
    """

    def __init__(self, settings: dict[str, str]) -> None:
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("JOYNEXUS_", "COMPOSE_"))},
            **settings,
        }

    def __call__(self, *arguments: str, timeout_s: float = 900.0, check: bool = True) -> str:
        """Run `docker compose …`; return its standard output. AssertionError with what it said if it fails."""
        ran = subprocess.run(
            ["docker", "compose", "--progress", "quiet", "-p", PROJECT, *arguments],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        said = ran.stdout + ran.stderr
        assert not check or ran.returncode == 0, f"docker compose {' '.join(arguments)}: {said[-2000:]}"
        return ran.stdout

    def admin(self, *command: str) -> str:
        """Run a command in the operator's container."""
        return self("run", "--rm", "-T", "admin", *command)

    def containers(self, service: str = "") -> list[Container]:
        """Return all containers of the project, or of one of its services, by name."""
        chosen = [f"label=com.docker.compose.project={PROJECT}", "label=com.docker.compose.oneoff=False"]
        if service:
            chosen.append(f"label=com.docker.compose.service={service}")
        ids = _docker("ps", "-aq", *(word for filter in chosen for word in ("--filter", filter))).split()
        found = json.loads(_docker("inspect", *ids)) if ids else []
        return sorted((_container(each) for each in found), key=lambda container: container.name)

    def left(self) -> list[str]:
        """Return the names of all containers, networks and volumes that the Engine still has of this project."""
        label = f"label=com.docker.compose.project={PROJECT}"
        found = _docker("ps", "-a", "--filter", label, "--format", "{{.Names}}").split()
        for kind in ("network", "volume"):
            found += _docker(kind, "ls", "--filter", label, "--format", "{{.Name}}").split()
        return found

    def down(self) -> None:
        """Take everything of the project down, with its volumes."""
        self("--profile", "*", "down", "-v", "--remove-orphans", "-t", "60")


def kill(container: Container) -> None:
    """Kill a container's first process, and with it all others: to the Engine that is a death, not a command."""
    assert container.pid, container
    os.kill(container.pid, signal.SIGKILL)


def _docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout


def _container(found: dict[str, Any]) -> Container:
    state = found["State"]
    return Container(
        id=found["Id"],
        name=found["Name"].lstrip("/"),
        service=found["Config"]["Labels"]["com.docker.compose.service"],
        state=state["Status"],
        health=state.get("Health", {}).get("Status", ""),
        pid=state["Pid"],
        started=state["StartedAt"],
        exit_code=state["ExitCode"],
        restarts=found["RestartCount"],
    )
