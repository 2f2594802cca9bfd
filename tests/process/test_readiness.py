"""Whether a role serves, as its own port says, and what Prometheus reads there."""

from __future__ import annotations

import http.client
import os
import socket
from pathlib import Path

import pytest

from common.runtime import WorkerRuntime
from common.settings import EnvSettings
from joynexus.wire.back import Register
from joynexus.wire.front import Ping, Pong
from tests.process.clusters import own_addresses
from tests.process.fake_master import FakeMaster
from tests.process.master_process import MasterProcess, short_folder
from tests.waiting import until


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


def test_worker_is_alive_while_it_loads_and_ready_while_it_is_given_work(tmp_path: Path) -> None:
    with FakeMaster(tmp_path) as master:
        settings = master.settings(EnvSettings, "env").model_copy(update={"metrics": "127.0.0.1:0"})
        with WorkerRuntime(settings, signals=False, exit=pytest.fail) as runtime:
            port = runtime.metrics_port
            assert get(port, "/healthz") == (200, "ok\n")
            assert get(port, "/readyz")[0] == 503
            assert 'joynexus_ready{role="env"} 0.0' in get(port, "/metrics")[1]
            runtime.register(Register(role="env", incarnation=runtime.incarnation, pid=os.getpid(), credit={}))
            assert runtime.wait_registered(60)
            assert get(port, "/readyz") == (200, "ok\n")
            runtime.leave()
            assert get(port, "/readyz") == (503, "told to end: it gets no more work\n")
            assert get(port, "/healthz") == (200, "ok\n")


def test_role_whose_port_is_taken_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, FakeMaster(tmp_path) as master:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = master.settings(EnvSettings, "env").model_copy(update={"metrics": listen})
        with pytest.raises(SystemExit, match=f"cannot listen on '{listen}'"):
            WorkerRuntime(settings, signals=False, exit=pytest.fail)


def test_master_is_ready_when_its_doors_are_open_and_tells_what_it_answered() -> None:
    listen = own_addresses().front_control.removeprefix("tcp://")
    port = int(listen.rpartition(":")[2])
    with short_folder() as folder, MasterProcess(Path(folder), metrics=listen) as master, master.tenant() as tenant:
        assert isinstance(tenant.ask(Ping()).message, Pong)
        until(lambda: get(port, "/readyz") == (200, "ok\n"))
        text = get(port, "/metrics")[1]
        assert 'joynexus_ops_total{op="ping",outcome="ok"} 1.0' in text
        assert 'joynexus_workers{phase="idle",role="env"} 0.0' in text
        assert 'joynexus_disk_free_bytes{folder="blobs"}' in text
        assert "process_resident_memory_bytes" in text
        assert master.terminate() == 0
