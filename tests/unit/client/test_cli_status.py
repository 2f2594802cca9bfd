"""`joynexus status` puts workers and their processes together by instance, and says why a process was restarted."""

from __future__ import annotations

import pytest

from joynexus.cli._status import _restarts, _show_roles
from joynexus.local import InstanceHealth
from joynexus.wire.front import RoleStatus


def worker(name: str, *, pid: int = 7, **more: object) -> RoleStatus:
    fields = {"role": "env", "worker": name, "phase": "idle", "progress": 0, "busy_s": 0.0, "uptime_s": 0.0, "pid": pid}
    return RoleStatus(**{**fields, **more})  # type: ignore[arg-type]  # mixed values


def process(name: str, *, pid: int = 7, **more: object) -> InstanceHealth:
    return InstanceHealth(name=name, role="env", state="running", pid=pid, **more)  # type: ignore[arg-type]  # mixed values


def rows(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_workers_of_one_pid_in_different_containers_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    roles = [worker("env-1", instance="c2"), worker("env-2", instance="c1")]
    _show_roles(roles, [process("first", instance="c1"), process("second", instance="c2")])
    assert [row[:2] for row in rows(capsys)[-2:]] == [["env-1", "second"], ["env-2", "first"]]


def test_a_worker_that_names_no_instance_is_found_by_its_pid(capsys: pytest.CaptureFixture[str]) -> None:
    _show_roles([worker("env-1", pid=9)], [process("other", pid=8), process("mine", pid=9, instance="host/mine")])
    found = {row[0]: row[1] for row in rows(capsys)[-2:]}
    assert found == {"env-1": "mine", "-": "other"}


def test_health_itself_is_a_process_of_this_host_like_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    roles = [worker("env-1", instance="here/env"), worker("health-1", pid=8, instance="here/health")]
    _show_roles(roles, [process("env", instance="here/env")])
    assert [row[:2] for row in rows(capsys)[-2:]] == [["env-1", "env"], ["health-1", "health"]]


def test_without_health_a_worker_is_shown_with_its_instance_and_the_reason_that_the_master_was_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    roles = [worker("env-1", instance="f0e1d2", restarts=2, reason="it was wedged")]
    _show_roles(roles, [])
    assert rows(capsys)[-1][:2] == ["env-1", "f0e1d2"]
    assert _restarts(roles, []) == ["env-1 was restarted 2 times: it was wedged"]
