"""The real health process over a Docker Engine that runs nothing, and a fake master."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from joynexus.wire.back import ClusterView, DemandRow, Supervised, ViewCluster
from joynexus.wire.front import RoleStatus
from tests.process.fake_master import FakeMaster
from tests.unit.health.fake_engine import FakeContainer, FakeEngine
from tests.waiting import meanwhile, until

ROOT = Path(__file__).resolve().parents[2]
LISTENING = "0A"


def listening(pid: int) -> list[str]:
    """The TCP addresses that a process listens on.

    Source: proc(5), /proc/<pid>/net/tcp: local address, state and inode are the fields 1, 3 and 9.
    """
    inodes: set[str] = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it was closed just now
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return [fields[1] for fields in lines if fields[3] == LISTENING and fields[9] in inodes]


@contextmanager
def health(engine: FakeEngine, master: FakeMaster, folder: Path, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "JOYNEXUS_ENGINE": engine.url,
        "JOYNEXUS_CLUSTER_FILE": str(master.keyring.cluster_file("health")),
        "JOYNEXUS_CACHE_DIR": str(folder / "cache"),
        **settings,
    }
    with (folder / "health.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.health"], cwd=ROOT, env=environment, stdout=log, stderr=log,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_what_hangs_is_restarted_what_waits_gets_a_copy_and_nothing_is_listened_on(tmp_path: Path) -> None:
    lost: set[str] = set()
    waiting = 0

    def status(container: FakeContainer) -> RoleStatus:
        instance = container.id[:12]
        return RoleStatus(
            role="env", worker=container.name, phase="lost" if instance in lost else "idle", progress=0, busy_s=0,
            uptime_s=0, instance=instance,
        )  # fmt: skip

    with FakeMaster(tmp_path) as master, FakeEngine(tmp_path) as engine:
        env, own = engine.add("env"), engine.add("health")
        own.name = socket.gethostname()
        told: list[Supervised] = []

        def answer(over: threading.Event) -> None:
            while not over.is_set():
                with suppress(AssertionError):
                    told.append(master.expect(Supervised, timeout_s=0.01).message)  # type: ignore[arg-type]  # it is one
                with suppress(AssertionError):
                    asked = master.expect(ViewCluster, timeout_s=0.1)
                    up = [
                        each
                        for each in list(engine.containers.values())
                        if each.status == "running" and each is not own
                    ]
                    demand = DemandRow(
                        group="env:toy", role="env", need="toy", workers=len(up), credit=2 * len(up), waiting=waiting,
                        oldest_s=9.0,
                    )  # fmt: skip
                    view = ClusterView(
                        at=0.0, server="s", uptime_s=1.0, roles=tuple(status(each) for each in up), demand=(demand,)
                    )
                    master.give(view, re=asked.header.id)

        with (
            meanwhile(answer),
            health(engine, master, tmp_path, JOYNEXUS_LOST_S="1", JOYNEXUS_SCALE="env=1-2") as process,
        ):
            until(lambda: told and [row.state for row in told[-1].instances] == ["running"])
            lost.add(env.id[:12])
            until(lambda: engine.asked == ["POST shop-env-1 restart t=2"])
            lost.clear()
            waiting = 7
            until(lambda: engine.asked[1:] == ["POST create shop-env-2", "POST shop-env-2 start"])
            until(lambda: [row.state for row in told[-1].instances] == ["running", "running"])
            assert told[-1].desired == {"env": 2}
            assert told[-1].instances[0].reason.startswith("the master has not heard it for")
            assert listening(process.pid) == []
            assert listening(os.getpid()), "the fake master's ports are here, so it would be seen"
            asked = list(engine.asked)
            process.send_signal(signal.SIGTERM)
            assert process.wait(90) == 0
            assert engine.asked == asked, "containers run on without it"
