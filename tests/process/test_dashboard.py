"""A real dashboard beside a real master: in by a code, kept up to date, out with the key, back after the master."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import joynexus
from joynexus.cli._dashboard import address_of
from tests.process.master_process import PATIENCE_S, MasterProcess

pytestmark = pytest.mark.slow


class Dashboard:
    """The process, and a browser of the plainest kind with the cookie it was given."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self._port, self.cookie = process, port, ""

    def get(self, path: str, *, method: str = "GET", host: str = "") -> tuple[int, str]:
        """Ask for a page."""
        with closing(self.connection()) as connection:
            headers = {"cookie": self.cookie, "sec-fetch-site": "same-origin", **({"host": host} if host else {})}
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            if cookie := answer.getheader("set-cookie"):
                self.cookie = cookie.partition(";")[0]
            return answer.status, answer.read().decode()

    def connection(self) -> http.client.HTTPConnection:
        """Connect to it."""
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)

    def until(self, path: str, status: int, text: str = "") -> str:
        """Ask until the answer is as it should be."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                answer = self.get(path)
            except OSError as error:
                answer = (0, str(error))
            if answer[0] == status and text in answer[1]:
                return answer[1]
            assert time.monotonic() < deadline, answer
            time.sleep(0.05)


@contextmanager
def dashboard(master: MasterProcess) -> Iterator[Dashboard]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JOYNEXUS_")}
    environment |= {
        "JOYNEXUS_CLUSTER_FILE": str(master.keyring.cluster_file("dashboard")),
        "JOYNEXUS_CACHE_DIR": str(master.folder / "cache"),
        "JOYNEXUS_LISTEN": f"127.0.0.1:{port}",
    }
    with (master.folder / "dashboard.log").open("wb") as log:
        command = [sys.executable, "-m", "services.health.dashboard"]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield Dashboard(process, port)
    finally:
        process.kill()
        process.wait()


def test_viewer_comes_in_by_a_code_sees_its_own_and_is_out_with_its_key(tmp_path: Path) -> None:
    with MasterProcess(tmp_path) as master, dashboard(master) as shown:
        shown.until("/readyz", 200)
        keys = {name: master.keyring.issue(name, tenant=name) for name in ("arm-lab", "kitchen")}
        with joynexus.connect(keys["arm-lab"]) as client:
            entry = client.open_dashboard()
        assert address_of(entry) == f"http://127.0.0.1:{shown._port}/login?code={entry.code}"
        assert shown.get("/")[1].count("joynexus dashboard") == 1
        assert shown.get(f"/login?code={entry.code}")[0] == 200
        page = shown.until("/", 200, "arm-lab")
        assert "kitchen" not in page
        cookie = shown.cookie
        assert shown.get(f"/login?code={entry.code}")[0] == 403  # good once

        connection = shown.connection()
        connection.request("GET", "/events?page=overview", headers={"cookie": cookie})
        stream = connection.getresponse()
        first = b"".join(stream.readline() for _ in range(40)).decode()
        assert re.search(r"event: section\ndata: <div id=\"s-banner\">", first)
        master.keyring.registry.revoke("arm-lab")
        shown.cookie = cookie
        rest = stream.read().decode()  # ends by itself
        assert "event: ended" in rest
        assert "You are no longer in" in shown.get("/")[1]
        connection.close()

        shown.process.send_signal(signal.SIGTERM)
        assert shown.process.wait(PATIENCE_S) == 0


def test_absent_master_is_told_with_the_last_picture_and_a_new_one_asks_for_another_code(tmp_path: Path) -> None:
    with MasterProcess(tmp_path) as master, dashboard(master) as shown:
        shown.until("/readyz", 200)
        with joynexus.connect(master.keyring.issue("boss", tenant="boss", operator=True)) as client:
            shown.get(f"/login?code={client.open_dashboard().code}")
        shown.until("/", 200, "Operator")
        master.kill()
        assert "What stands below is its picture of" in shown.until("/", 200, "The master does not answer.")
        master.start()
        shown.until("/readyz", 200)
        shown.until("/", 403, "the master was started anew")
