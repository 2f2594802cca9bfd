"""Processes by pid file, and the supervisor over them; the processes are tiny."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from joynexus import launch
from joynexus.local import ClusterPlan, HealthReport, InstanceHealth, LocalCluster, ProcessRecord, RolePlan
from joynexus.scale import Range
from services.health.core import Ended
from services.health.supervisor import LocalSupervisor
from tests.waiting import until

ROLE = (
    "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    "print('ready', flush=True)\ntime.sleep(60)\n"
)
STUBBORN = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(60)\n"
)
BROKEN = "print('first')\nraise SystemExit('there is no backbone of that name')\n"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path / "cluster")
    cluster.run.mkdir(parents=True)
    yield cluster
    cluster.stop(list(cluster.all_running()), grace_s=0.0)


def supervise(cluster: LocalCluster, tmp_path: Path, **roles: str) -> LocalSupervisor:
    """A supervisor whose roles run the given programs."""
    for role, program in roles.items():
        folder = tmp_path / "services" / role
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__main__.py").write_text(program)
        (folder / "__init__.py").touch()
    (tmp_path / "services" / "__init__.py").touch()
    plans = tuple(RolePlan(name=role, role=role) for role in roles)
    return LocalSupervisor(cluster, ClusterPlan(python=sys.executable, root=str(tmp_path), roles=plans))


def test_pid_file_of_another_process_does_not_count(cluster: LocalCluster) -> None:
    cluster.write_pid("env", os.getpid())
    assert cluster.running("env") == os.getpid()
    record = cluster.run / "env.pid"
    import msgspec

    fields = msgspec.json.decode(record.read_bytes(), type=ProcessRecord)
    record.write_bytes(msgspec.json.encode(msgspec.structs.replace(fields, started=fields.started - 1)))
    assert cluster.running("env") == 0  # the pid was given to somebody else since
    record.write_bytes(msgspec.json.encode(msgspec.structs.replace(fields, boot="another")))
    assert cluster.running("env") == 0
    record.write_bytes(b"{")
    assert cluster.running("env") == 0
    record.unlink()


def test_zombie_does_not_run(cluster: LocalCluster) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    cluster.write_pid("env", child.pid)
    until(lambda: not cluster.running("env"))
    child.wait()


def test_killed_instance_is_noticed_with_its_signal_and_no_line_of_a_log_that_knows_nothing_of_it(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    supervisor = supervise(cluster, tmp_path, env=STUBBORN)
    pid = supervisor.start("env").pid
    assert cluster.running("env") == pid
    until(lambda: "ready" in cluster.log_file("env").read_text())
    assert supervisor.changes() == []
    supervisor.kill("env")
    gone: list[Ended] = []
    until(lambda: gone.extend(supervisor.changes()) or gone)
    assert gone == [Ended(name="env", how="it was ended by SIGKILL", code=-signal.SIGKILL, outside=True)]


def test_who_ended_in_order_was_asked_to_and_no_line_of_its_log_is_the_reason(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    supervisor = supervise(cluster, tmp_path, env=ROLE)
    supervisor.start("env")
    until(lambda: "ready" in cluster.log_file("env").read_text())
    supervisor.stop("env")
    gone: list[Ended] = []
    until(lambda: gone.extend(supervisor.changes()) or gone)
    assert gone == [Ended(name="env", how="it was asked to end", code=0)]


@pytest.mark.parametrize(("before", "after"), [(3, 4), (None, None)], ids=["it killed", "it does not say"])
def test_who_may_have_been_killed_for_want_of_memory_was_not_killed_from_outside(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int | None, after: int | None
) -> None:
    supervisor = supervise(cluster, tmp_path, env=ROLE)
    monkeypatch.setattr("services.health.supervisor._out_of_memory", lambda: before)
    supervisor.start("env")
    monkeypatch.setattr("services.health.supervisor._out_of_memory", lambda: after)
    supervisor.kill("env")
    gone: list[Ended] = []
    until(lambda: gone.extend(supervisor.changes()) or gone)
    said = "it was ended by SIGKILL, perhaps by the kernel, for want of memory"
    assert gone == [Ended(name="env", how=said, code=-signal.SIGKILL, outside=False)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("2026-11-30T15:39:10Z [info     ] registered    role=env worker=env-1", ""),
        ('{"level": "debug", "event": "asked"}', ""),
        ("2026-11-30T15:39:10Z [error    ] disk_failed    why=full", "; its log ends: 2026-11-30T15:39:10Z [error"),
        ("ValueError: no {info} here", "; its log ends: ValueError: no {info} here"),
        ("", ""),
    ],
)
def test_a_line_of_everyday_work_is_no_reason(cluster: LocalCluster, line: str, said: str) -> None:
    cluster.log_file("env").write_text(f"ready\n{line}\n" if line else "")
    words = cluster.last_words("env")
    assert words.startswith(said) if said else not words


def test_failed_start_says_why(cluster: LocalCluster, tmp_path: Path) -> None:
    supervisor = supervise(cluster, tmp_path, env=BROKEN)
    supervisor.start("env")
    gone: list[Ended] = []
    until(lambda: gone.extend(supervisor.changes()) or gone)
    how = "it exited with code 1; its log ends: there is no backbone of that name"
    assert gone == [Ended(name="env", how=how, code=1)]


def test_roles_outlive_their_supervisor_and_the_next_adopts_them(cluster: LocalCluster, tmp_path: Path) -> None:
    first = supervise(cluster, tmp_path, env=ROLE, master=ROLE)
    pids = {name: first.start(name).pid for name in ("env", "master")}
    second = supervise(cluster, tmp_path, env=ROLE, master=ROLE)
    assert {started.name: started.pid for started in second.adopt().running} == pids
    assert second.changes() == []
    os.kill(pids["env"], signal.SIGKILL)
    gone: list[Ended] = []
    until(lambda: first.changes() or not cluster.running("env"))
    until(lambda: gone.extend(second.changes()) or gone)
    assert [(event.name, event.code) for event in gone] == [("env", None)]
    assert second.stop_all(10.0) == []
    assert cluster.all_running() == {}


def test_a_live_role_whose_pid_file_is_lost_has_not_ended_and_is_written_down_again(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    first = supervise(cluster, tmp_path, env=ROLE)
    pid = first.start("env").pid
    second = supervise(cluster, tmp_path, env=ROLE)
    assert [(started.name, started.pid) for started in second.adopt().running] == [("env", pid)]
    for _ in range(2):
        (cluster.run / "env.pid").unlink()
        assert second.changes() == []
        assert cluster.running("env") == pid
    os.kill(pid, signal.SIGKILL)
    until(second.changes)


def test_process_that_cannot_be_written_down_is_not_left_running(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = supervise(cluster, tmp_path, env=ROLE)
    pids: list[int] = []

    def full(name: str, pid: int) -> None:
        pids.append(pid)
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(cluster, "write_pid", full)
    with pytest.raises(OSError, match="the disk is full"):
        supervisor.start("env")
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    monkeypatch.undo()
    assert cluster.running("env") == 0
    assert supervisor.start("env").pid == cluster.running("env")


def test_stopping_kills_what_does_not_listen_and_leaves_nothing(cluster: LocalCluster, tmp_path: Path) -> None:
    supervisor = supervise(cluster, tmp_path, env=STUBBORN, master=ROLE)
    supervisor.start("env")
    supervisor.start("master")
    until(lambda: "ready" in cluster.log_file("env").read_text())
    assert supervisor.stop_all(0.3) == ["env"]
    assert cluster.all_running() == {}
    assert list(cluster.run.glob("*.pid")) == []


def test_large_log_is_put_aside(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.health.supervisor.LOG_BYTES", 10)
    cluster.log_file("env").write_text("x" * 100)
    supervise(cluster, tmp_path, env=BROKEN).start("env")
    assert cluster.log_file("env").with_suffix(".log.old").read_text() == "x" * 100


SAYS_WHO = "import os\nprint(os.environ['JOYNEXUS_INSTANCE'], flush=True)\n" + ROLE


def test_a_new_one_is_like_the_first_of_its_group_but_for_its_instance_and_goes_without_a_trace(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    supervisor = supervise(cluster, tmp_path, env=SAYS_WHO)
    started = [supervisor.start(name) for name in ("env", "env-2")]
    assert [each.instance for each in started] == [f"{socket.gethostname()}/{name}" for name in ("env", "env-2")]
    for each in started:
        until(lambda each=each: each.instance in cluster.log_file(each.name).read_text())
    supervisor.stop("env-2")
    gone: list[Ended] = []
    until(lambda: gone.extend(supervisor.changes()) or gone)
    assert [end.name for end in gone] == ["env-2"]
    assert [path.name for path in cluster.run.glob("*.pid")] == ["env.pid"]


def test_the_next_health_adopts_also_those_that_the_plan_does_not_name(cluster: LocalCluster, tmp_path: Path) -> None:
    first = supervise(cluster, tmp_path, env=ROLE)
    pids = {name: first.start(name).pid for name in ("env", "env-7")}
    cluster.write_pid("health", os.getpid())
    second = supervise(cluster, tmp_path, env=ROLE)
    assert {started.name: started.pid for started in second.adopt().running} == pids
    cluster.forget("health")
    assert second.stop_all(10.0) == []
    assert cluster.all_running() == {}


def test_a_role_may_be_run_by_another_module_than_its_own(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.py").write_text("print('here')\n")
    roles = (RolePlan(name="dashboard", role="dashboard", module="elsewhere"),)
    supervisor = LocalSupervisor(cluster, ClusterPlan(python=sys.executable, root=str(tmp_path), roles=roles))
    supervisor.start("dashboard")
    until(lambda: "here" in cluster.log_file("dashboard").read_text())
    until(supervisor.changes)


@pytest.mark.parametrize(("words", "said"), [("envy=2", "no 'envy' that could be scaled"), ("env=0", "at least 1")])
def test_up_that_is_to_scale_what_cannot_be_starts_nothing(tmp_path: Path, words: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        launch.up(tmp_path, launch.Options(scale=words))
    assert LocalCluster(tmp_path).all_running() == {}
    assert not LocalCluster(tmp_path).plan_file.exists()


@pytest.mark.parametrize("text", ["", "[1]", '{"env": "4-1"}', '{"env": 3}', '{"dashboard": "2"}', "\xff"])
def test_limits_that_cannot_be_read_are_refused_with_the_way_out(cluster: LocalCluster, text: str) -> None:
    assert cluster.load_scale() == {}
    cluster.scale_file.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"scale\.json cannot be read .* delete it"):
        cluster.load_scale()
    cluster.scale_file.unlink()
    cluster.save_scale({"env": Range(1, 4)})
    assert cluster.load_scale() == {"env": Range(1, 4)}


def test_up_does_not_wait_for_who_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that health tells to leave may have half an hour of work to finish."""
    cluster = LocalCluster(tmp_path)
    cluster.run.mkdir()

    def taking_over(*_: object) -> MagicMock:
        states = {"master": "running", "env": "running", "env-2": "leaving"}
        instances = (InstanceHealth(name=name, role=name, state=state, pid=1) for name, state in states.items())
        cluster.save_health(HealthReport(pid=1, instances=tuple(instances)))
        return MagicMock(**{"poll.return_value": None})

    monkeypatch.setattr(launch, "start_health", taking_over)
    monkeypatch.setattr(launch, "connect", MagicMock())
    said: list[str] = []
    launch.up(tmp_path, launch.Options(timeout_s=0.5), said.append)
    assert said[-1] == "master ready  env ready  env-2 leaving"
