"""Past one machine: each role on a host of its own, with nothing in common but the network between them.

A host is a network namespace with an address of its own; `tests/chaos/internet.py` is the network, with its latency.
Each role has its own folder with what the operator gives it (a cluster file and a key), and no folder of blobs: all
bulk travels. One host is cut off in the midst of its work, and comes back.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from joynexus import launch
from joynexus.keyring import Addresses, Keyring
from tests.chaos import faulty_simulator as faulty
from tests.chaos.cluster import BACKBONE
from tests.chaos.internet import Internet, why_not
from tests.chaos.verdict import Verdict
from tests.process.clusters import running
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
ROLES = ("master", "trainer", "inference", "env")
LATENCY_S = 0.02

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.fixture(autouse=True)
def _can_be_made() -> None:
    if why := why_not():
        pytest.skip(f"no network of namespaces can be made here: {why}")


class Tenant:
    """`tests/chaos/abroad.py` in a process, and what it has said."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.said: list[dict[str, Any]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(json.loads(line))

    def ask(self, *words: object) -> None:
        assert self._process.stdin is not None
        self.said.clear()
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        self._process.stdin.flush()

    def heard(self, key: str) -> list[Any]:
        assert self._process.poll() is None, "the tenant has ended"
        return [line[key] for line in list(self.said) if key in line]

    def found(self, *words: object) -> Any:
        """What comes of it in the end."""
        if words:
            self.ask(*words)
        until(lambda: self.heard("found"), 240)
        return self.heard("found")[0]


class Abroad:
    """A cluster whose roles, and whose tenant, are on hosts of their own."""

    def __init__(self, net: Internet, folder: Path) -> None:
        self.net, self._folder, self.fault = net, folder, folder / "fault"
        self.address = dict(zip((*ROLES, "tenant"), net.addresses, strict=True))
        self.processes: list[subprocess.Popen[bytes]] = []
        master = self.address["master"]
        ports = zip(Addresses.__struct_fields__, range(5710, 5714), strict=True)
        self._addresses = Addresses(**{name: f"tcp://{master}:{port}" for name, port in ports})
        keyring = Keyring(self._home("master") / "keys")
        keyring.prepare(self._addresses)
        keyring.issue("lab", tenant="lab")
        for role in (*ROLES[1:], "lab"):  # what an operator carries to the host
            shutil.copytree(keyring.folder / role, self._home(role) / "keys")

    def _home(self, role: str) -> Path:
        home = self._folder / role
        home.mkdir(exist_ok=True)
        return home

    def start(self, role: str) -> None:
        home = self._home(role)
        own = {f"JOYNEXUS_{name.upper()}": getattr(self._addresses, name) for name in Addresses.__struct_fields__}
        if role == "master":
            own |= {"JOYNEXUS_KEYS_DIR": str(home / "keys"), "JOYNEXUS_BEAT_MS": "300", "JOYNEXUS_SILENT_S": "4"}
        else:
            own = {
                "JOYNEXUS_CLUSTER_FILE": str(home / "keys" / "client.toml"),
                "JOYNEXUS_CACHE_DIR": str(home / "cache"),
            }
        own |= {"JOYNEXUS_STATE_DIR": str(home / "state"), "JOYNEXUS_GYMNASIUM_MODULES": faulty.__name__}
        own |= {"JOYNEXUS_BACKBONE": BACKBONE, faulty.VARIABLE: str(self.fault)}
        with self.log_file(role).open("ab") as log:
            command = [sys.executable, "-m", f"services.{role}"]
            process = self.net.start(self.address[role], command, cwd=ROOT, environment=clean() | own, output=log)
        self.processes.append(process)

    def tenant(self) -> Tenant:
        home = self._home("lab")
        process = self.net.start(
            self.address["tenant"],
            [sys.executable, "-m", "tests.chaos.abroad", str(home / "keys" / "client.toml"), str(home)],
            cwd=ROOT,
            environment=clean(),
            output=subprocess.PIPE,
        )
        self.processes.append(process)
        return Tenant(process)

    def log_file(self, role: str) -> Path:
        return self._folder / f"{role}.log"

    def lines(self, event: str, role: str = "master") -> list[str]:
        """What a role has logged of that name."""
        return [line for line in self.log_file(role).read_text(errors="replace").splitlines() if event in line]


def clean() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("JOYNEXUS_")}
    return own | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MKL_CBWR": launch.reproducible_kernels()}


@contextmanager
def abroad(folder: Path) -> Iterator[tuple[Abroad, Tenant]]:
    with Internet(len(ROLES) + 1, latency_s=LATENCY_S) as net:
        cluster = Abroad(net, folder)
        try:
            for role in ROLES:
                cluster.start(role)
            until(lambda: all(cluster.lines("registered", role) for role in ROLES[1:]), 240)
            tenant = cluster.tenant()
            until(lambda: tenant.heard("connected"), 120)
            yield cluster, tenant
        finally:
            for process in cluster.processes:
                process.kill()
                process.wait()


def cut_off(cluster: Abroad, tenant: Tenant, host: str, seconds: float, *words: object) -> Any:
    """Have something done, and a host cut off in the midst of it until it is taken for lost, then for a while more."""
    cluster.fault.write_text(faulty.SLOW)  # so that a page has a midst
    before = len(cluster.lines("worker_lost"))
    tenant.ask(*words)
    until(lambda: tenant.heard("done") and tenant.heard("done")[-1] >= 1, 240)
    cluster.net.cut(cluster.address[host])
    until(lambda: len(cluster.lines("worker_lost")) > before, 120)
    threading.Event().wait(seconds)  # how long it stays away is what is tested
    cluster.net.mend(cluster.address[host])
    cluster.fault.unlink()
    return tenant.found()


@pytest.mark.case(39, "roles on four hosts; one is cut off and comes back")
def test_host_that_is_cut_off_and_comes_back_changes_no_number(tmp_path: Path, verdict: Verdict) -> None:
    with abroad(tmp_path) as (cluster, tenant):
        with verdict("I3"):
            undisturbed = tenant.found("learn", "undisturbed", 2)
            found = cut_off(cluster, tenant, "env", 0.0, "learn", "disturbed", 2)
        with verdict("I1"):
            assert found == undisturbed
        with verdict("I6"):
            assert len(cluster.lines("worker_lost")) == 1
            assert "env" in cluster.lines("worker_lost")[0]
        assert cluster.net.carried > 1000, "who talked to whom?"


@pytest.mark.thorough
@pytest.mark.case(39, "roles on four hosts; the numbers of one machine")
def test_hosts_apart_give_the_numbers_of_one_machine_also_if_one_is_away_for_ten_seconds(
    tmp_path: Path, verdict: Verdict
) -> None:
    work = [("imitate", "apart", 30), ("learn", "rl", 3), ("evaluate", "rl", 8)]
    (tmp_path / "apart").mkdir()
    with abroad(tmp_path / "apart") as (cluster, tenant), verdict("I3"):
        found = [
            tenant.found(*work[0]),
            cut_off(cluster, tenant, "env", 10.0, *work[1]),
            tenant.found(*work[2]),
        ]
        lost = cluster.lines("worker_lost")
        again = cut_off(cluster, tenant, "trainer", 10.0, "learn", "again", 3)
    options = launch.Options(backbone=BACKBONE, simulator_processes=2, timeout_s=300)
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("JOYNEXUS_GYMNASIUM_MODULES", faulty.__name__)
        with running(tmp_path / "one", options) as local:
            command = [sys.executable, "-m", "tests.chaos.abroad", str(local.client_file), str(tmp_path)]
            process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=clean())
            one = Tenant(process)
            try:
                expected = [one.found(*each) for each in work]
            finally:
                process.kill()
                process.wait()
    with verdict("I1"):
        assert found == expected
        assert again == expected[1]
    with verdict("I6"):
        assert len(lost) == 1
        assert "env" in lost[0]
