"""The real health process over roles that do nothing: it starts, heals, is replaced, and ends them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from common.exits import EXIT_CONFIG
from joynexus import launch
from joynexus.cli._scale import scale
from joynexus.local import ClusterPlan, HealthReport, InstanceHealth, LocalCluster, RolePlan
from joynexus.scale import Range, group_of
from joynexus.wire.back import ClusterView, DemandRow, ViewCluster
from joynexus.wire.front import RoleStatus
from tests.process.fake_master import FakeMaster

ROOT = Path(__file__).resolve().parents[2]
SLEEPER = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\ntime.sleep(120)\n"
BROKEN = "raise SystemExit('the env service cannot start: there is no such renderer')\n"


IMPATIENT = """
from services.health import __main__, core

core.LOOP_PAUSE_S = 1.0
__main__.main()
"""
"""Health that tries what is in a crash loop again after a second."""


class Cluster:
    """A folder with sleeping roles, a fake master that knows whoever runs, and health processes."""

    def __init__(self, folder: Path, master: FakeMaster) -> None:
        self.local = LocalCluster(folder)
        self.local.run.mkdir()
        self.known: set[str] = {"trainer", "env"}
        self.demand: tuple[DemandRow, ...] = ()
        self._master, self._root = master, folder / "checkout"
        self._stop = threading.Event()
        self._answerer = threading.Thread(target=self._answer)
        self._answerer.start()
        self.processes: list[subprocess.Popen[bytes]] = []
        for role in ("master", "trainer", "env"):
            self.program(role, SLEEPER)
        roles = tuple(RolePlan(name=name, role=name) for name in ("master", "trainer", "env"))
        self.local.save_plan(ClusterPlan(python=sys.executable, root=str(self._root), roles=roles))

    def program(self, role: str, text: str) -> None:
        """What a role runs from its next start on."""
        package = self._root / "services" / role
        package.mkdir(parents=True, exist_ok=True)
        for init in (package.parent / "__init__.py", package / "__init__.py"):
            init.touch()
        (package / "__main__.py").write_text(text)

    def start_health(self, *words: str) -> subprocess.Popen[bytes]:
        """Start another health process; `words` are what Python is told to run, if not health as it is."""
        environment = {
            **os.environ,
            "JOYNEXUS_CLUSTER_DIR": str(self.local.folder),
            "JOYNEXUS_CLUSTER_FILE": str(self.local.keys / "health" / "client.toml"),
            "JOYNEXUS_CACHE_DIR": str(self.local.folder / "cache"),
        }
        with self.local.log_file("health").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *(words or ("-m", "services.health"))], cwd=ROOT, env=environment, stdout=log,
                stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def report(self) -> dict[str, InstanceHealth]:
        """What health wrote down last."""
        report = self.local.load_health() or HealthReport(pid=0, instances=())
        return {instance.name: instance for instance in report.instances}

    def until(self, true: Callable[[], object], seconds: float = 90.0) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + seconds
        while not true():
            log = self.local.log_file("health")
            assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
            time.sleep(0.02)

    def running(self) -> bool:
        """Everything runs and is registered."""
        states = {name: instance.state for name, instance in self.report().items()}
        return states == dict.fromkeys(("master", "trainer", "env"), "running")

    def close(self) -> None:
        """Leave nothing behind."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.local.stop(list(self.local.all_running()), grace_s=5.0)
        self._stop.set()
        self._answerer.join()

    def _answer(self) -> None:
        while not self._stop.is_set():
            try:
                asked = self._master.expect(ViewCluster, timeout_s=0.1)
            except AssertionError:
                continue
            roles = tuple(
                RoleStatus(
                    role=name,
                    worker=f"{name}-1",
                    phase="idle",
                    progress=0,
                    busy_s=0,
                    uptime_s=0,
                    pid=pid,
                    instance=f"{socket.gethostname()}/{name}",
                )
                for name, pid in self.local.all_running().items()
                if group_of(name) in self.known
            )
            status = ClusterView(at=0.0, server="s", uptime_s=1.0, roles=roles, demand=self.demand)
            self._master.give(status, re=asked.header.id)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with FakeMaster(tmp_path) as master:
        cluster = Cluster(tmp_path, master)
        try:
            yield cluster
        finally:
            cluster.close()


def test_health_starts_all_restarts_only_what_died_and_takes_all_down(cluster: Cluster) -> None:
    health = cluster.start_health()
    cluster.until(cluster.running)
    before = cluster.local.all_running()
    assert set(before) == {"health", "master", "trainer", "env"}
    os.kill(before["trainer"], signal.SIGKILL)
    cluster.until(lambda: cluster.report()["trainer"].restarts == 1 and cluster.running())
    after = cluster.local.all_running()
    assert {name for name in after if after[name] != before[name]} == {"trainer"}
    assert "SIGKILL" in cluster.report()["trainer"].reason
    health.terminate()
    assert health.wait(90) == 0
    assert cluster.local.all_running() == {}
    assert list(cluster.local.run.glob("*.pid")) == []


def test_roles_outlive_health_and_the_next_health_adopts_them(cluster: Cluster) -> None:
    first = cluster.start_health()
    cluster.until(cluster.running)
    before = {name: pid for name, pid in cluster.local.all_running().items() if name != "health"}
    first.kill()
    first.wait()
    cluster.local.health_file.unlink()
    cluster.start_health()
    cluster.until(cluster.running)
    assert {name: pid for name, pid in cluster.local.all_running().items() if name != "health"} == before
    os.kill(before["env"], signal.SIGKILL)
    cluster.until(lambda: cluster.report()["env"].restarts == 1 and cluster.running())


def test_processes_are_started_and_end_as_the_operator_says_and_the_next_health_goes_on_with_them(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="health does not run"):
        scale(["env=3"], cluster.local.folder)
    first = cluster.start_health()
    cluster.until(cluster.running)
    for words, said in ((["dashboard=2"], "there are trainer, inference, env"), (["env"], "write for example env=3")):
        with pytest.raises(ValueError, match=said):
            scale(words, cluster.local.folder)
    scale(["env=3"], cluster.local.folder, timeout=90.0)
    assert "env 1 → 3: the operator wants 3" in capsys.readouterr().out
    assert {name: i.state for name, i in cluster.report().items() if name.startswith("env")} == {
        "env": "running", "env-2": "running", "env-3": "running"
    }  # fmt: skip
    before = {name: pid for name, pid in cluster.local.all_running().items() if name != "health"}
    assert set(before) == {"master", "trainer", "env", "env-2", "env-3"}
    first.kill()
    first.wait()
    cluster.local.health_file.unlink()
    cluster.start_health()
    cluster.until(lambda: len(cluster.report()) == 5)
    assert {name: pid for name, pid in cluster.local.all_running().items() if name != "health"} == before
    scale(["env=1-2"], cluster.local.folder, timeout=90.0)
    cluster.until(lambda: set(cluster.report()) == {"master", "trainer", "env", "env-2"})
    assert not (cluster.local.run / "env-3.pid").exists()
    log = cluster.local.log_file("health").read_text()
    assert "the operator wants 3" in log
    assert "the operator's limits are 1-2" in log
    assert not [line for line in log.splitlines() if "[warning" in line and " role_" in line]


def test_a_process_is_started_for_work_that_waits_and_ends_when_none_does(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOYNEXUS_SCALE_DOWN_S", "1")
    cluster.local.save_scale({"env": Range(1, 2)})
    waits = DemandRow(
        group="env:toy", role="env", need="toy", workers=1, credit=2, running=2, waiting=7, oldest_s=9.0, cost_s=2.5
    )
    cluster.demand = (waits,)
    cluster.start_health()
    cluster.until(lambda: "env-2" in cluster.report() and cluster.report()["env-2"].state == "running")
    cluster.demand = (msgspec.structs.replace(waits, workers=2, credit=4, running=0, waiting=0, oldest_s=0.0),)
    cluster.until(lambda: set(cluster.report()) == {"master", "trainer", "env"})
    log = cluster.local.log_file("health").read_text()
    assert "7 pieces of work wait, the oldest for 9 s; 2 are done at once, each takes 2.5 s" in log
    assert "and can do what there is now (0)" in log
    report = cluster.local.load_health()
    assert report is not None
    assert [(decision.before, decision.after) for decision in report.decisions] == [(1, 2), (2, 1)]


def test_second_health_for_the_same_cluster_refuses(cluster: Cluster) -> None:
    cluster.start_health()
    cluster.until(cluster.running)
    second = cluster.start_health()
    assert second.wait(90) == EXIT_CONFIG
    assert "another health process looks after" in cluster.local.log_file("health").read_text()
    assert cluster.running()


def test_role_that_cannot_start_is_a_crash_loop_with_its_own_reason(cluster: Cluster) -> None:
    cluster.program("env", BROKEN)
    cluster.start_health()
    cluster.until(lambda: cluster.report().get("env") and cluster.report()["env"].state == "crash-loop")
    assert "there is no such renderer" in cluster.report()["env"].reason
    assert cluster.report()["trainer"].state == "running"


def test_up_that_cannot_complete_a_running_cluster_leaves_it_running_and_says_what_is_missing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "start_health", lambda *_: cluster.start_health("-c", IMPATIENT))
    health = cluster.start_health()
    cluster.until(cluster.running)
    health.kill()
    health.wait()
    before = cluster.local.all_running()
    cluster.program("env", BROKEN)
    cluster.known.discard("env")
    os.kill(before["env"], signal.SIGKILL)
    cluster.until(lambda: not cluster.local.running("env"))
    with pytest.raises(ValueError, match=r"env cannot be started: .*no such renderer.* goes on \(master, trainer\)"):
        launch.up(cluster.local.folder, launch.Options(timeout_s=60))
    after = cluster.local.all_running()
    assert (after["master"], after["trainer"]) == (before["master"], before["trainer"])
    assert "health" in after, "and it goes on trying"
    cluster.program("env", SLEEPER)
    cluster.known.add("env")
    cluster.until(cluster.running)


def test_up_that_waits_in_vain_for_a_role_it_took_over_ends_nobody(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = cluster.start_health()
    cluster.until(cluster.running)
    health.kill()
    health.wait()
    before = cluster.local.all_running()
    cluster.known.discard("env")

    def monotonic() -> float:  # time is up once only this one is missing
        states = {name: instance.state for name, instance in cluster.report().items()}
        return 1e9 if states == {"master": "running", "trainer": "running", "env": "starting"} else 0.0

    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    with pytest.raises(ValueError, match=r"not up within 15 s: env \(starting\).* goes on \(env, master, trainer\)"):
        launch.up(cluster.local.folder, launch.Options(timeout_s=15))
    assert {name: pid for name, pid in cluster.local.all_running().items() if name != "health"} == before


def test_down_ends_everything_also_when_health_is_gone(cluster: Cluster) -> None:
    health = cluster.start_health()
    cluster.until(cluster.running)
    health.kill()
    health.wait()
    ended = launch.down(cluster.local.folder)
    assert set(ended) == {"master", "trainer", "env"}
    assert cluster.local.all_running() == {}


def test_setting_that_no_role_has_is_named_by_whoever_starts_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOYNEXUS_SILNT_S", "3")
    with pytest.raises(ValueError, match=r"code 78.*no role has a setting JOYNEXUS_SILNT_S"):
        launch.up(tmp_path, launch.Options())
