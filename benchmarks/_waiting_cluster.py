"""A cluster whose master and workers are those that ship, on devices that wait.

In: how many devices of each role, a pace. Out: keys of tenants to dial it, and at the end how late its devices were.
Never: a process or a file left behind.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import joynexus
from benchmarks._cluster import Master, running_master
from benchmarks._paced_master import PACE
from benchmarks._waiting_device import BACKBONE
from benchmarks._waiting_roles import Kind, Role, serve

_READY_S = 180.0
_ENDS_S = 20.0
_BATCH_WAIT_MS = 50.0


class Holds:
    """Devices that a cluster holds.

    Args:
        trainers, inference, envs: processes of each role, with a device each.
        parallel: devices of a trainer.
        reuse: whether features are kept.
    """

    def __init__(
        self, *, trainers: int = 1, parallel: int = 1, inference: int = 0, envs: int = 1, reuse: bool = True
    ) -> None:
        self.workers: dict[Kind, int] = {"trainer": trainers, "inference": inference, "env": envs}
        self.parallel = parallel
        self.reuse = reuse


class WaitingCluster:
    """A running cluster.

    Attributes:
        held_s, late_s: of all its devices, real seconds; known when it has ended.
        cpu_s: of its processes until then.
    """

    def __init__(self, master: Master) -> None:
        self.master = master
        self.held_s = self.late_s = self.cpu_s = 0.0

    def key(self, tenant: str) -> Path:
        """Make a tenant's key."""
        return self.master.keyring.issue(tenant, tenant=tenant)


@contextmanager
def running(holds: Holds, pace: float, micro: dict[int, int]) -> Iterator[WaitingCluster]:
    """Run a cluster until the block ends; all its workers have registered."""
    os.environ[PACE] = str(pace)
    with running_master(
        "benchmarks._paced_master",
        batch_rows=32,
        batch_wait_ms=_BATCH_WAIT_MS / pace,
        silent_s=30.0,  # two cores are shared by many processes
        max_inflight_ops=64,
    ) as master:
        cluster = WaitingCluster(master)
        roles = [
            _role(master, kind, number, holds, pace, micro)
            for kind, count in holds.workers.items()
            for number in range(count)
        ]
        started = mp.get_context("forkserver")
        started.set_forkserver_preload(["benchmarks._waiting_roles"])
        processes = [started.Process(target=serve, args=(role,)) for role in roles]
        try:
            for process in processes:
                process.start()
            _wait_for(master, len(processes))
            yield cluster
            cluster.cpu_s = master.cpu_s() + sum(_cpu_s(process.pid or 0) for process in processes)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(_ENDS_S)
                process.kill()
        for role in roles:
            said = json.loads(role.report.read_text())
            cluster.held_s += said["planned_s"]
            cluster.late_s += said["late_s"]


def _role(master: Master, kind: Kind, number: int, holds: Holds, pace: float, micro: dict[int, int]) -> Role:
    folder = master.folder
    settings = {
        "cluster_file": str(master.keyring.cluster_file(kind)),
        "cache_dir": str(folder / "cache"),
        "blobs_dir": str(folder / "state" / "blobs"),
        "log_level": "warning",
    }
    if kind != "env":
        settings |= {"backbone": BACKBONE, "device": "cuda"}  # busy time is the device's, not the CPU's
        settings |= {} if holds.reuse else {"feature_budget_bytes": "0"}
    parallel = holds.parallel if kind == "trainer" else 1
    report = folder / f"{kind}-{number}.json"
    return Role(kind=kind, pace=pace, parallel=parallel, micro=micro, settings=settings, report=report)


def _wait_for(master: Master, workers: int) -> None:
    deadline = time.monotonic() + _READY_S
    with joynexus.connect(master.keyring.cluster_file("bench"), timeout_s=_READY_S) as client:
        while len(client.status().roles) < workers:
            assert time.monotonic() < deadline, f"only these came up: {client.status().roles}"
            time.sleep(0.1)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
