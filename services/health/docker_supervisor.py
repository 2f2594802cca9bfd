"""Containers of a compose project: the supervisor over the Docker Engine's socket.

In: names of instances, `env-2` being the second container of the service `env`. Out: containers restarted in place, and
copies of the first one of a service made, stopped and removed. Never: anything that `allowed` does not let pass, or a
restart of what ended: the engine does that itself, by the container's restart policy.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import docker
from docker.errors import APIError, DockerException

from common.telemetry import get_logger
from joynexus.scale import group_of, instance_name, number_of
from services.health.allowed import NUMBER, PROJECT, SERVICE, Action, check, is_ours
from services.health.core import Adopted, Ended, Removed, Started

log = get_logger(__name__)

LOOK_S = 1.0
"""How often the engine is asked."""
TIMEOUT_S = 30.0
RESTART_S = 2
"""A wedged process has so long to end by itself."""
INSTANCE = "JOYNEXUS_INSTANCE={host}"
"""In a container's environment: it registers with its host name, by which it is known here."""

Answer = dict[str, Any]  # the engine's JSON


class Container(NamedTuple):
    """A container that lives.

    Attributes:
        started: when its process was started, as the engine writes it.
    """

    id: str
    started: str
    pid: int
    host: str


class Engine:
    """The few requests that are made of the engine, each for a container whose labels are looked at right before.

    Args:
        api: the SDK's client.
        project: the compose project whose containers may be touched.
    """

    def __init__(self, api: docker.APIClient, project: str) -> None:
        self._api, self.project = api, project

    def containers(self) -> list[Answer]:
        """Describe all containers of the project that are looked after, those that do not run too."""
        found = self._api.containers(all=True, filters={"label": [f"{PROJECT}={self.project}"]})
        ours = [each["Id"] for each in found if is_ours(self.project, each.get("Labels") or {})]
        return [described for id in ours if (described := self._described(id)) is not None]

    def do(self, action: Action, id: str) -> None:
        """Do something to a container. One that is to finish, or is ended, is not started again by the engine."""
        check(action, self.project, _labels(self.described(id)))
        match action:
            case Action.RESTART:
                self._api.restart(id, timeout=RESTART_S)
            case Action.FINISH:
                self._api.kill(id, "SIGTERM")
            case Action.END:
                self._api.kill(id, "SIGKILL")
            case Action.REMOVE:
                self._api.remove_container(id)
            case Action.COPY:
                raise ValueError("a copy has a number: see `copy`")

    def copy(self, id: str, number: int) -> str:
        """Make and start another container of a service; return its id."""
        sibling = self.described(id)
        check(Action.COPY, self.project, _labels(sibling))
        made = self._api.create_container_from_config(like(sibling, number), name=_name(sibling, number))["Id"]
        try:
            self._api.start(made)
        except DockerException:
            self.do(Action.REMOVE, made)
            raise
        return str(made)

    def described(self, id: str) -> Answer:
        """Describe a container."""
        answer: Answer = self._api.inspect_container(id)
        return answer

    def _described(self, id: str) -> Answer | None:
        try:
            return self.described(id)
        except APIError as error:
            if error.status_code == 404:  # it was removed just now
                return None
            raise


class DockerSupervisor:
    """Roles as containers.

    Args:
        engine: what may be asked.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._alive: dict[str, Container] = {}
        self._dead: set[str] = set()  # the engine is starting them again
        self._due: dict[str, Action] = {}
        self._leaving: dict[str, str] = {}
        self._left: list[str] = []
        self._strange: set[str] = set()
        self._look_at = 0.0
        self._silent = ""

    @classmethod
    def connect(cls, url: str) -> DockerSupervisor:
        """Look after the compose project that this process's own container belongs to.

        Raises:
            ValueError: if there is no engine, or this is no container of a project.
        """
        try:
            api = docker.APIClient(base_url=url, version="auto", timeout=TIMEOUT_S)
            own = api.inspect_container(socket.gethostname())
        except (DockerException, OSError) as error:
            raise ValueError(f"the Docker Engine at {url} does not answer about this container: {error}") from error
        project = _labels(own).get(PROJECT, "")
        if not project:
            raise ValueError("this container belongs to no compose project, and health looks after no other one")
        return cls(Engine(api, project))

    def adopt(self) -> Adopted:
        """Take over what runs already."""
        with self._asking():
            return Adopted(running=tuple(self._look()[0]))
        return Adopted(running=())

    def start(self, name: str) -> Started:
        """Make a container like the first one of its service, or start the one that there is.

        Raises:
            OSError: if that is not possible.
        """
        first = min((n for n in self._alive if group_of(n) == group_of(name)), key=number_of, default="")
        if not first:
            raise OSError(f"no container of '{group_of(name)}' runs that it could be like")
        try:
            stopped = next((each["Id"] for each in self._engine.containers() if _instance(each) == name), "")
            if stopped:
                self._engine.do(Action.RESTART, stopped)
            id = stopped or self._engine.copy(self._alive[first].id, number_of(name))
            self._alive[name] = _living(self._engine.described(id))
        except DockerException as error:
            raise OSError(str(error)) from error
        return self._started(name)

    def stop(self, name: str) -> None:
        """Have a container finish and end; it is removed then."""
        self._due[name] = Action.FINISH

    def kill(self, name: str) -> None:
        """Start a container's process anew, or end it if it was to leave; tried until the engine has done it."""
        leaves = name in self._leaving or self._due.get(name) is Action.FINISH
        self._due[name] = Action.END if leaves else Action.RESTART

    def changes(self) -> list[Adopted | Started | Ended | Removed]:
        """Return what happened since the last call."""
        now = time.monotonic()
        if now < self._look_at and not self._due:
            return []
        self._look_at = now + LOOK_S
        changes: list[Adopted | Started | Ended | Removed] = []
        with self._asking():
            self._act()
            new, changes = self._look()
            changes = [Adopted(running=tuple(new)), *changes] if new else changes
            self._tidy()
        return changes

    # Inside

    def _act(self) -> None:
        """Do what is due; what the engine is not able to do just now stays due."""
        for name, action in list(self._due.items()):
            container = self._alive.get(name)
            if container is None and name in self._dead:
                continue  # the engine is starting it again
            if container is not None:
                try:
                    self._engine.do(action, container.id)
                    if action is not Action.RESTART:
                        self._leaving[name] = container.id
                except PermissionError as error:
                    log.error("container_left_alone", instance=name, why=str(error))
                except APIError as error:
                    if error.status_code == 409:  # it ended just now: the next look says whether it comes back
                        continue
                    if error.status_code != 404:
                        raise
            del self._due[name]

    def _tidy(self) -> None:
        """Remove those that were to leave and have ended."""
        while self._left:
            try:
                self._engine.do(Action.REMOVE, self._left[-1])
            except APIError as error:
                if error.status_code not in (404, 409):  # somebody removes it, or has started it again
                    raise
            self._left.pop()

    def _look(self) -> tuple[list[Started], list[Adopted | Started | Ended | Removed]]:
        """Compare what the engine says with what is known: those that are new, and what became of the others."""
        new: list[Started] = []
        changes: list[Adopted | Started | Ended | Removed] = []
        seen: set[str] = set()
        for described in self._engine.containers():
            name, state = _instance(described), described["State"]
            known, up = name in self._alive or name in self._dead, state["Status"] == "running"
            if self._leaving.get(name) == described["Id"] and state["Status"] == "exited":
                self._left.append(described["Id"])
            elif not up and state["Status"] != "restarting":
                continue  # somebody stopped or paused it, and it is theirs
            elif INSTANCE not in (described["Config"].get("Env") or ()):
                self._leave_alone(name)
            elif not up:
                seen.add(name)
                if name in self._alive:
                    changes.append(self._ended(name, state))
            else:
                seen.add(name)
                container = _living(described)
                if known and self._alive.get(name) != container:
                    if name in self._alive:  # it ended and was started again since the last look
                        changes.append(self._ended(name, {}))
                    self._dead.discard(name)
                    self._alive[name] = container
                    changes.append(self._started(name))
                elif not known:
                    self._alive[name] = container
                    new.append(self._started(name))
        for name in sorted((self._alive.keys() | self._dead) - seen):
            self._alive.pop(name, None)
            self._leaving.pop(name, None)
            self._dead.discard(name)
            changes.append(Removed(name=name))
        return new, changes

    def _started(self, name: str) -> Started:
        container = self._alive[name]
        return Started(name=name, pid=container.pid, instance=container.host)

    def _ended(self, name: str, state: Mapping[str, Any]) -> Ended:
        del self._alive[name]
        self._dead.add(name)
        if not state:
            return Ended(name=name, how="it ended, and the engine started it again", outside=True)
        code = int(state.get("ExitCode") or 0)
        memory = " for want of memory" if state.get("OOMKilled") else ""
        outside = code == 137 and not memory
        how = f"it exited with code {code}{memory}" if code else "it was asked to end"
        return Ended(name=name, how=how, code=code, outside=outside)

    def _leave_alone(self, name: str) -> None:
        if name not in self._strange:
            self._strange.add(name)
            log.warning("container_left_alone", instance=name, why=f"its environment has no {INSTANCE}")

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Let the engine be silent: nothing is known then, and nothing done."""
        try:
            yield
        except (DockerException, OSError) as error:
            if not self._silent:
                log.warning("engine_does_not_do_it", why=str(error))
            self._silent = str(error)
        else:
            self._silent = ""


def like(sibling: Answer, number: int) -> Answer:
    """Say what the engine is to make, so that it is like a container in all but name, number and address."""
    config = dict(sibling["Config"])
    for own in ("Hostname", "MacAddress"):  # the engine gives each its own; by its host name it registers
        config.pop(own, None)
    config["Image"] = sibling["Image"]  # by its digest: what runs, whatever was built since
    config["Labels"] = {**_labels(sibling), NUMBER: str(number)}
    service = config["Labels"][SERVICE]
    networks = sibling["NetworkSettings"]["Networks"]
    names = {"Aliases": [_name(sibling, number), service]}
    return {
        **config,
        "HostConfig": sibling["HostConfig"],
        "NetworkingConfig": {
            "EndpointsConfig": {network: names if its.get("Aliases") else {} for network, its in networks.items()}
        },
    }


def _name(sibling: Answer, number: int) -> str:
    """Return a container's name, after the pattern of its sibling's, which is compose's."""
    return re.sub(r"\d+$", str(number), str(sibling["Name"]).removeprefix("/"))


def _instance(described: Answer) -> str:
    labels = _labels(described)
    return instance_name(labels[SERVICE], int(labels[NUMBER]))


def _living(described: Answer) -> Container:
    state = described["State"]
    return Container(described["Id"], state["StartedAt"], state["Pid"], described["Config"]["Hostname"])


def _labels(described: Answer) -> dict[str, str]:
    labels: dict[str, str] = described["Config"].get("Labels") or {}
    return labels
