"""Containers by the engine's real SDK, over a socket behind which nothing runs; and what is never asked of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from structlog.testing import capture_logs

from services.health import docker_supervisor
from services.health.allowed import Action, check, is_ours
from services.health.core import Adopted, Ended, Removed, Started
from services.health.docker_supervisor import DockerSupervisor, Engine
from tests.unit.health.fake_engine import PROJECT, FakeContainer, FakeEngine


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    monkeypatch.setattr(docker_supervisor, "LOOK_S", 0.0)
    with FakeEngine(tmp_path) as engine:
        for service in ("master", "env", "inference", "dashboard", "postgres"):
            engine.add(service)
        engine.add("env", project="neighbour")
        engine.add("health", id=socket.gethostname().ljust(12, "0"))
        yield engine


@pytest.fixture
def supervisor(engine: FakeEngine) -> Iterator[DockerSupervisor]:
    api = docker.APIClient(base_url=engine.url, version="auto", timeout=20)
    yield DockerSupervisor(Engine(api, PROJECT))
    api.close()


def container(engine: FakeEngine, name: str) -> FakeContainer:
    return next(c for c in engine.containers.values() if c.name == f"{PROJECT}-{name}")


def test_what_compose_runs_is_adopted_also_what_it_scaled_later(
    engine: FakeEngine, supervisor: DockerSupervisor
) -> None:
    found = {started.name: started.instance for started in supervisor.adopt().running}
    assert found == {name: container(engine, f"{name}-1").id[:12] for name in ("env", "inference", "dashboard")}, (
        "by its host name; not the master, not what is no role, not the neighbour's"
    )
    engine.add("env-maniskill", 2)
    later = Started(name="env-maniskill-2", pid=1001, instance=container(engine, "env-maniskill-2").id[:12])
    assert supervisor.changes() == [Adopted(running=(later,))]
    assert supervisor.changes() == []
    assert engine.asked == []


def test_its_own_project_is_that_of_its_own_container(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: container(engine, "health-1").id)
    found = DockerSupervisor.connect(engine.url)
    assert {started.name for started in found.adopt().running} == {"env", "inference", "dashboard"}
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    with pytest.raises(ValueError, match="does not answer about this container"):
        DockerSupervisor.connect(engine.url)
    with pytest.raises(ValueError, match="does not answer about this container"):
        DockerSupervisor.connect("unix:///nowhere.sock")


def test_the_engine_restarts_what_ends_and_health_only_tells(engine: FakeEngine, supervisor: DockerSupervisor) -> None:
    supervisor.adopt()
    env = container(engine, "env-1")
    env.status, env.code = "restarting", 70
    assert supervisor.changes() == [Ended(name="env", how="it exited with code 70", code=70)]
    assert supervisor.changes() == []
    env.status, env.started = "running", 5
    assert supervisor.changes() == [Started(name="env", pid=1005, instance=env.id[:12])]
    env.started = 6  # once more, between two looks
    assert [type(event) for event in supervisor.changes()] == [Ended, Started]
    env.status, env.code = "restarting", 0
    assert supervisor.changes() == [Ended(name="env", how="it was asked to end", code=0)]
    assert engine.asked == []


def test_a_wedged_container_is_restarted_in_place(engine: FakeEngine, supervisor: DockerSupervisor) -> None:
    supervisor.adopt()
    supervisor.kill("inference")
    assert [type(event) for event in supervisor.changes()] == [Ended, Started]
    assert engine.asked == ["POST shop-inference-1 restart t=2"]


def test_a_copy_is_like_the_first_of_its_service_but_for_name_number_and_host(
    engine: FakeEngine, supervisor: DockerSupervisor
) -> None:
    supervisor.adopt()
    started = supervisor.start("env-2")
    made, first = container(engine, "env-2"), container(engine, "env-1").describe()
    assert engine.asked == ["POST create shop-env-2", "POST shop-env-2 start"]
    assert (started.name, started.instance, made.status) == ("env-2", made.id[:12], "running")
    assert made.body["HostConfig"] == first["HostConfig"]
    assert made.body["Image"] == first["Image"]
    assert "Hostname" not in made.body
    assert made.body["NetworkingConfig"] == {"EndpointsConfig": {"shop_backplane": {"Aliases": ["shop-env-2", "env"]}}}
    same = {**first["Config"]["Labels"], "com.docker.compose.container-number": "2"}
    assert made.labels == same
    assert supervisor.changes() == []


def test_one_that_is_to_leave_finishes_and_is_removed(engine: FakeEngine, supervisor: DockerSupervisor) -> None:
    supervisor.adopt()
    supervisor.start("env-2")
    container(engine, "env-2").heeds = False
    supervisor.stop("env-2")
    assert supervisor.changes() == []
    container(engine, "env-2").status = "exited"
    assert supervisor.changes() == [Removed(name="env-2")]
    assert engine.asked[2:] == [
        "POST shop-env-2 kill signal=SIGTERM",
        "DELETE shop-env-2  v=False&link=False&force=False",
    ]


def test_what_happened_is_told_also_when_one_that_left_cannot_be_removed_yet(
    engine: FakeEngine, supervisor: DockerSupervisor
) -> None:
    supervisor.adopt()
    supervisor.start("env-2")
    supervisor.stop("env-2")
    engine.refuses["DELETE"] = 500
    later, env = engine.add("trainer"), container(engine, "env-1")
    env.started = 7
    changes = supervisor.changes()
    assert [type(event) for event in changes] == [Adopted, Ended, Started, Removed]
    assert container(engine, "env-2").status == "exited"
    engine.refuses.clear()
    assert supervisor.changes() == []
    assert "shop-env-2" not in {c.name for c in engine.containers.values()}
    assert later.status == "running"


def test_one_that_ends_just_as_it_is_told_to_leave_is_told_again_when_it_is_back(
    engine: FakeEngine, supervisor: DockerSupervisor
) -> None:
    supervisor.adopt()
    supervisor.start("env-2")
    env = container(engine, "env-2")
    supervisor.stop("env-2")
    engine.refuses["POST"] = 409
    env.status = "restarting"
    assert [type(event) for event in supervisor.changes()] == [Ended]
    engine.refuses.clear()
    env.status, env.started = "running", 20
    assert [type(event) for event in supervisor.changes()] == [Started]
    assert supervisor.changes() == [Removed(name="env-2")]


def test_one_that_does_not_finish_is_ended(engine: FakeEngine, supervisor: DockerSupervisor) -> None:
    supervisor.adopt()
    supervisor.start("env-2")
    container(engine, "env-2").heeds = False
    supervisor.stop("env-2")
    supervisor.changes()
    supervisor.kill("env-2")
    assert supervisor.changes() == [Removed(name="env-2")]
    assert "POST shop-env-2 kill signal=SIGKILL" in engine.asked


def test_one_that_just_ended_is_told_to_leave_when_the_engine_has_started_it_again(
    engine: FakeEngine, supervisor: DockerSupervisor
) -> None:
    supervisor.adopt()
    supervisor.start("env-2")
    env = container(engine, "env-2")
    env.status, env.code = "restarting", 1
    assert [type(event) for event in supervisor.changes()] == [Ended]
    supervisor.stop("env-2")
    assert supervisor.changes() == []
    env.status, env.started = "running", 20
    assert [type(event) for event in supervisor.changes()] == [Started]
    assert supervisor.changes() == [Removed(name="env-2")]
    assert "POST shop-env-2 kill signal=SIGTERM" in engine.asked


def test_what_somebody_stopped_or_removed_is_left_to_them(engine: FakeEngine, supervisor: DockerSupervisor) -> None:
    supervisor.adopt()
    container(engine, "env-1").status = "exited"
    del engine.containers[container(engine, "inference-1").id]
    assert supervisor.changes() == [Removed(name="env"), Removed(name="inference")]
    with pytest.raises(OSError, match="no container of 'env' runs"):
        supervisor.start("env-2")
    assert engine.asked == []


def test_a_stopped_container_of_the_number_is_started_and_not_made_twice(
    engine: FakeEngine, supervisor: DockerSupervisor
) -> None:
    engine.add("env", 2, status="exited")
    supervisor.adopt()
    assert supervisor.start("env-2").name == "env-2"
    assert engine.asked == ["POST shop-env-2 restart t=2"]


def test_a_container_that_could_not_be_told_apart_is_left_alone(
    engine: FakeEngine, supervisor: DockerSupervisor
) -> None:
    engine.add("trainer", env=["PATH=/bin"])
    with capture_logs() as logs:
        supervisor.adopt()
        supervisor.changes()
    assert [(line["event"], line["instance"]) for line in logs] == [("container_left_alone", "trainer")]


def test_an_engine_that_fails_is_asked_again_and_nobody_is_taken_for_dead(
    engine: FakeEngine, supervisor: DockerSupervisor
) -> None:
    supervisor.adopt()
    engine.broken = "the disk is full"
    supervisor.kill("env")
    with capture_logs() as logs:
        assert [supervisor.changes(), supervisor.changes()] == [[], []]
        with pytest.raises(OSError, match="the disk is full"):
            supervisor.start("env-2")
    assert [line["event"] for line in logs] == ["engine_does_not_do_it"]
    engine.broken = ""
    assert [type(event) for event in supervisor.changes()] == [Ended, Started]
    assert engine.asked == ["POST shop-env-1 restart t=2"]


def labels(service: str = "env", number: str = "2", project: str = PROJECT, one_off: str = "False") -> dict[str, str]:
    keys = ("project", "service", "container-number", "oneoff")
    return {f"com.docker.compose.{k}": v for k, v in zip(keys, (project, service, number, one_off), strict=True)}


@pytest.mark.parametrize(
    "foreign",
    [
        labels(project="neighbour"),
        labels(project=""),
        labels("master", "1"),
        labels("keygen", "1"),
        labels("health", "1"),
        labels("postgres", "1"),
        labels("envoy", "1"),
        labels("env-", "1"),
        labels("env/../master", "1"),
        labels("trainer\n"),
        labels(number="0"),
        labels(number="x"),
        labels(one_off="True"),
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("action", Action)
def test_nothing_is_done_to_a_container_that_is_no_worker_of_its_own_project(
    action: Action, foreign: dict[str, str]
) -> None:
    assert not is_ours(PROJECT, foreign)
    with pytest.raises(PermissionError):
        check(action, PROJECT, foreign)
    with pytest.raises(PermissionError):
        check(action, "", {**foreign, "com.docker.compose.project": ""})


def test_the_list_of_what_may_be_done_is_this() -> None:
    def may(action: Action, service: str, number: str) -> bool:
        try:
            check(action, PROJECT, labels(service, number))
        except PermissionError:
            return False
        return True

    found = {
        (service, number): {action.name for action in Action if may(action, service, number)}
        for service in ("trainer", "inference-gpu", "env", "env-maniskill", "dashboard")
        for number in ("1", "2")
    }
    every = {action.name for action in Action}
    assert every == {"RESTART", "COPY", "FINISH", "END", "REMOVE"}
    for service in ("trainer", "inference-gpu", "env", "env-maniskill"):
        assert found[service, "1"] == {"RESTART", "COPY"}, "others are made like the first, and it stays"
        assert found[service, "2"] == every
    assert found["dashboard", "1"] == found["dashboard", "2"] == {"RESTART"}


def test_labels_are_looked_at_again_right_before_each_action(engine: FakeEngine, supervisor: DockerSupervisor) -> None:
    supervisor.adopt()
    container(engine, "env-1").labels = labels("master", "1")
    supervisor.kill("env")
    with capture_logs() as logs:
        supervisor.changes()
    assert [line["event"] for line in logs] == ["container_left_alone"]
    assert engine.asked == []
