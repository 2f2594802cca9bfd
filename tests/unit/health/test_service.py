"""Health's shell, without processes or a master."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from common.settings import HealthSettings
from joynexus.local import LocalCluster
from joynexus.scale import Range
from joynexus.wire import Header, Message, Packet
from joynexus.wire.back import ClusterView, Decision, InstanceRow, Supervised, ViewCluster
from joynexus.wire.front import RoleStatus
from services.health import service
from services.health.core import Adopted, Ended, HealthCore, Started
from services.health.scaling import Scaler
from services.health.service import Health


class Supervisor:
    """Starts nothing."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.happened: list[Adopted | Ended] = []

    def start(self, name: str) -> Started:
        self.started.append(name)
        return Started(name=name, pid=len(self.started), instance=name)

    def stop(self, name: str) -> None:
        self.stopped.append(name)

    def changes(self) -> list[Adopted | Ended]:
        happened, self.happened = self.happened, []
        return happened


class Master:
    """Answers with a view that a test may change, and keeps what it is told."""

    def __init__(self) -> None:
        self.view = ClusterView(at=0.0, server="s", uptime_s=1.0)
        self.told: list[Supervised] = []

    def ask(self, message: Message, *, timeout_s: float) -> Future[Packet]:
        answer: Future[Packet] = Future()
        if isinstance(message, Supervised):
            self.told.append(message)
        elif isinstance(message, ViewCluster):
            answer.set_result(Packet(header=Header(kind="cluster_view", id="1"), message=self.view))
        return answer


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1_000_000.0 + self.now


def health_of(
    roles: dict[str, str], master: Master, limits: Callable[[], Mapping[str, Range]] = dict, **more: Any
) -> tuple[Health, Supervisor]:
    runtime: Any = SimpleNamespace(progress=SimpleNamespace(advance=lambda: None), ask=master.ask)
    supervisor: Any = Supervisor()
    return Health(HealthCore(roles), Scaler({}), supervisor, runtime, limits=limits, **more), supervisor


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(service, "time", clock)
    return clock


def test_full_disk_does_not_end_who_looks_after_the_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = LocalCluster(tmp_path)
    cluster.run.mkdir()
    full = True

    def keep(report: Any) -> None:
        if full:
            raise OSError(errno.ENOSPC, "the disk is full")
        cluster.save_health(report)

    health, supervisor = health_of({"master": "master"}, Master(), keep=keep)
    health.turn()
    assert supervisor.started == ["master"]
    full = False
    health.turn()
    report = cluster.load_health()
    assert report is not None
    assert [instance.name for instance in report.instances] == ["master"]


def test_what_the_operator_wants_is_done_logged_and_told_to_the_master(clock: Clock) -> None:
    master, limits = Master(), {"env": Range(3, 3)}
    health, supervisor = health_of({"master": "master", "env": "env"}, master, lambda: limits)
    with capture_logs() as logs:
        for _ in range(3):
            health.turn()
            clock.now += 1.0
    assert supervisor.started == ["master", "env", "env-2", "env-3"]
    (line,) = [line for line in logs if line["event"] == "scaled"]
    assert (line["group"], line["before"], line["after"], line["reason"]) == ("env", 1, 3, "the operator wants 3")
    told = master.told[-1]
    assert told.decisions == (Decision(at=1_000_100.0, group="env", before=1, after=3, reason="the operator wants 3"),)
    assert told.desired == {"env": 3}
    assert [row.instance for row in told.instances] == ["master", "env", "env-2", "env-3"]


def test_who_was_told_to_leave_and_ended_is_no_warning(clock: Clock) -> None:
    master, limits = Master(), {"env": Range(2, 2)}
    health, supervisor = health_of({"env": "env"}, master, lambda: limits)
    health.turn()
    limits = {"env": Range(1, 1)}
    clock.now += 60.0
    with capture_logs() as logs:
        health.turn()
        assert supervisor.stopped == ["env-2"]
        supervisor.happened = [Ended(name="env-2", how="it exited with code 0", code=0)]
        clock.now += 60.0
        health.turn()
    assert [line["event"] for line in logs if line["log_level"] != "info"] == []
    assert [line["instance"] for line in logs if line["event"] == "role_left"] == ["env-2"]


def test_the_master_is_told_again_when_it_knows_something_else(clock: Clock) -> None:
    master = Master()
    health, _ = health_of({"master": "master"}, master)
    for _ in range(2):
        health.turn()
        clock.now += 1.0
    first = len(master.told)
    known = master.told[-1]
    master.view = ClusterView(
        at=0.0, server="s", uptime_s=1.0, instances=known.instances, decisions=known.decisions, desired=known.desired,
        roles=(RoleStatus(role="health", worker="health-1", phase="idle", progress=0, busy_s=0, uptime_s=1),),
    )  # fmt: skip
    for _ in range(5):
        health.turn()
        clock.now += 1.0
    assert len(master.told) <= first + 1, "one look was under way"
    before = len(master.told)
    master.view = ClusterView(at=0.0, server="s", uptime_s=0.1)  # it was started anew
    for _ in range(3):
        health.turn()
        clock.now += 1.0
    assert len(master.told) > before


def test_limits_that_cannot_be_read_or_are_for_nobody_are_told_once_and_the_rest_holds(clock: Clock) -> None:
    master = Master()
    limits: dict[str, Range] | str = {"env": Range(2, 2), "envy": Range(1, 2)}

    def read() -> dict[str, Range]:
        if isinstance(limits, str):
            raise ValueError(limits)
        return limits

    health, supervisor = health_of({"env": "env"}, master, read)
    with capture_logs() as logs:
        for number in range(6):
            limits = "run/scale.json cannot be read" if number > 2 else limits
            health.turn()
            clock.now += 1.0
    assert supervisor.started == ["env", "env-2"]
    assert [line["why"] for line in logs if line["event"] == "scale_not_taken_over"] == [
        "there is no 'envy' here that could be scaled: there are env",
        "run/scale.json cannot be read",
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "nothing to look after"),
        ({"engine": "unix:///nowhere.sock", "metrics": "127.0.0.1:5720"}, "listens on nothing"),
        ({"engine": "unix:///nowhere.sock", "scale": "env"}, "write for example env=3"),
    ],
)
def test_health_that_cannot_do_its_work_says_why_in_one_sentence(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        service.run(HealthSettings(**settings))


def test_who_was_leaving_when_health_was_killed_goes_on_leaving(clock: Clock) -> None:
    master = Master()
    leaving = InstanceRow(name="env-2", role="env", state="leaving", pid=2)
    master.view = msgspec.structs.replace(master.view, instances=(leaving,))
    health, supervisor = health_of({"env": "env", "env-2": "env"}, master, lambda: {"env": Range(1, 4)})
    for _ in range(3):
        health.turn()
        clock.now += 1.0
    assert supervisor.stopped == ["env-2"]
    assert master.told[-1].desired == {"env": 1}


def test_nobody_that_runs_is_told_to_leave_before_it_is_known_who_leaves_already(clock: Clock) -> None:
    master = Master()
    leaving = InstanceRow(name="env", role="env", state="leaving", pid=1)
    master.view = msgspec.structs.replace(master.view, instances=(leaving,))
    plan = dict.fromkeys(("env", "env-2", "env-3", "env-4"), "env")
    health, supervisor = health_of(plan, master, lambda: {"env": Range(1, 1)})
    supervisor.happened.append(
        Adopted(running=tuple(Started(name=name, pid=pid) for pid, name in enumerate(("env", "env-2", "env-3"), 1)))
    )
    for _ in range(3):
        health.turn()
        clock.now += 1.0
    assert (supervisor.stopped, supervisor.started) == (["env", "env-3"], [])
    assert master.told[-1].desired == {"env": 1}
