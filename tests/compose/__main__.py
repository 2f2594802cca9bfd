"""`python -m tests.compose`: a cluster of containers, from its images to its end, as operator and tenants see it.

In: a Docker Engine. Out: a log with times; exit code 1 if something was not as it should be. Never: a container left.

It builds the images and brings the cluster up; a newcomer with nothing but the client and a key runs the README's
example; a tenant imitates, reinforces and measures, once in calm, once while env is scaled 1 → 4 → 1, once while the
processes of all containers are killed one after another, once while health scales by what there is to do: the numbers
are the same, bit for bit. It is backed up, lost, and brought back. Then the key is revoked, and everything taken down.
`--keep` leaves it up; `--parts scale,kill` does only these.
"""

from __future__ import annotations

import argparse
import http.cookiejar
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

import joynexus
from joynexus.client import Client
from joynexus.wire.front import EvaluationResult
from tests.compose import engine
from tests.compose.engine import ROOT, Compose, Container
from tests.compose.log import Log
from tests.compose.newcomer import Newcomer, data_set
from tests.compose.work import Numbers, Rounds, reach, work
from tests.waiting import meanwhile, until

BUILT = ("master", "trainer", "inference", "env", "health")
ONE_OF_EACH = {"master": 1, "trainer": 1, "inference": 1, "env": 1, "dashboard": 1}
MANY = 4
BURST = 24
USER = 10001
"""Of all roles, in their containers."""
READY_S, BUSY_S = 600.0, 600.0
SOCKET = Path("/var/run/docker.sock")
PARTS = ("newcomer", "scale", "kill", "supervise", "restore", "revoke")


class Test:
    """One run.

    Args:
        folder: for what does not stay.
        log: what happens.
    """

    def __init__(self, folder: Path, log: Log) -> None:
        self.folder, self.log = folder, log
        ports = _free_ports(3)
        names = ("JOYNEXUS_PORT", "JOYNEXUS_BULK_PORT", "JOYNEXUS_DASHBOARD_PORT")
        settings = {name: str(port) for name, port in zip(names, ports, strict=True)}
        settings |= {"JOYNEXUS_SCALE": "env=1-3", "DOCKER_GID": str(SOCKET.stat().st_gid)}
        self.compose = Compose(settings)

    def run(self, parts: tuple[str, ...]) -> None:
        """Do all of it."""
        self.compose.down()  # one that was killed may have left something
        self.build()
        self.log("docker compose up -d")
        self.compose("up", "-d", timeout_s=1800)
        self.ready(ONE_OF_EACH)
        config = self.let_in("lab-a")
        if "newcomer" in parts:
            self.newcomer(config)
        with joynexus.connect(config) as tenant, joynexus.connect(self.given("default")) as operator:
            tenant.datasets.push("press", data_set(), progress=False)
            self.look(operator)
            calm = work(tenant, "calm")
            self.log(f"calm: {_told(calm)}")
            if "scale" in parts:
                self.scale(tenant, operator, calm)
            if "kill" in parts:
                self.kill(tenant, calm)
            if "supervise" in parts:
                self.supervise(tenant, calm)
            if "restore" in parts:
                self.restore(tenant, calm)
            if "revoke" in parts:
                self.revoke(tenant)
        self.log(f"usage: {self.compose.admin('joynexus', 'usage').strip()}")

    def build(self) -> None:
        """Build each image; how long that takes depends on what the Engine has in its cache."""
        for service in BUILT:
            before = self.log.seconds
            self.compose("--profile", "*", "build", "-q", service, timeout_s=1800)
            self.log(f"built {service} in {self.log.seconds - before:.0f} s")

    def ready(self, wanted: dict[str, int]) -> None:
        """Wait until so many containers of each service say that they serve, and no more are there."""

        def so_many() -> bool:
            found = self.roles()
            count = {service: sum(c.service == service for c in found) for service in wanted}
            return count == wanted and all(container.ready for container in found if container.service in wanted)

        until(so_many, READY_S)
        self.log(f"ready: {', '.join(f'{count} {service}' for service, count in wanted.items())}")

    def roles(self) -> list[Container]:
        """Return the containers that should go on running."""
        return [container for container in self.compose.containers() if container.service != "keygen"]

    def given(self, key: str) -> Path:
        """Take a key's folder out of the volume, as the operator does to give it away; return its cluster file."""
        folder = self.folder / key
        folder.mkdir(mode=0o700, exist_ok=True)
        self.compose("cp", f"keygen:/keys/{key}/.", str(folder))
        return folder / "client.toml"

    def let_in(self, tenant: str) -> Path:
        """Let a tenant in."""
        said = self.compose.admin("joynexus", "admin", "tenants", "add", tenant).strip()
        self.log(f"admin: {said}")
        return self.given(tenant)

    def newcomer(self, config: Path) -> None:
        """Somebody with the client and a key runs the README's example."""
        newcomer = Newcomer(self.folder / "newcomer")
        newcomer.install()
        self.log("newcomer: pip install . (the client alone)")
        printed = newcomer.run_example(config)
        for line in printed.strip().splitlines():
            self.log(f"newcomer: {line}")
        assert "%" in printed

    def look(self, operator: Client) -> None:
        """Open the dashboard with a key, as a browser does."""
        entry = operator.open_dashboard()
        cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        browser = urllib.request.build_opener(cookies)
        home = entry.url.rstrip("/")
        browser.open(f"{home}/login?code={entry.code}", timeout=60).close()
        until(lambda: "trainer-1" in browser.open(f"{home}/", timeout=60).read().decode())
        self.log("the operator's key opens the dashboard, which shows the roles")

    def scale(self, tenant: Client, operator: Client, calm: Numbers) -> None:
        """Scale env up and down while a tenant works: all take part, nothing is lost, no number changes."""

        def env_busy() -> list[float]:
            return [role.busy_s for role in operator.status().roles if role.role == "env" and role.phase != "lost"]

        with Rounds(tenant, "scaled") as rounds:
            self.log(f"docker compose up -d --scale env={MANY}, while the tenant works")
            self.compose("up", "-d", "--scale", f"env={MANY}")
            self.ready({"env": MANY})
            until(lambda: len(env_busy()) == MANY)
            before = env_busy()

            def all_worked() -> bool:
                now = env_busy()
                return len(now) == MANY and all(later > earlier for later, earlier in zip(now, before, strict=True))

            until(all_worked, BUSY_S)
            self.log(f"all {MANY} env workers work; {len(rounds.numbers)} rounds are done")
            self.log("docker compose up -d --scale env=1")
            self.compose("up", "-d", "--scale", "env=1")
            self.ready({"env": 1})
            until(lambda: len(env_busy()) == 1)
            self.log(f"one env worker is left, none is lost; {len(rounds.numbers)} rounds are done")
        self.same("scaled", rounds, calm)

    def kill(self, tenant: Client, calm: Numbers) -> None:
        """Kill the process of each container, one after another, while a tenant works."""
        with Rounds(tenant, "killed") as rounds:
            for container in self.roles():
                self.log(f"kill -9 the process of {container.service}")
                at = self.log.seconds
                engine.kill(container)
                until(lambda was=container: self.came_back(was), READY_S)
                self.log(f"{container.service} serves again after {self.log.seconds - at:.1f} s")
        self.same("killed", rounds, calm)

    def came_back(self, was: Container) -> bool:
        """Whether the Engine has started this container again, and it serves."""
        (now,) = [container for container in self.compose.containers(was.service) if container.id == was.id]
        return now.ready and now.started != was.started and now.restarts > was.restarts

    def supervise(self, tenant: Client, calm: Numbers) -> None:
        """Have health scale env: more while there is work for them, one when there is none."""
        self.log("docker compose up -d --no-deps health, with JOYNEXUS_SCALE=env=1-3")
        self.compose("up", "-d", "--no-deps", "health")
        self.ready({"health": 1})
        found: list[EvaluationResult] = []

        def burst(_: threading.Event) -> None:
            found.extend(reach(tenant, "calm", times=BURST))

        self.log(f"{BURST} evaluations at once")
        with meanwhile(burst, seconds=BUSY_S):
            until(lambda: sum(container.ready for container in self.compose.containers("env")) > 1, BUSY_S)
            self.log(f"health has {len(self.compose.containers('env'))} env workers")
        assert found == BURST * [calm.reached]
        self.log(f"each of the {BURST} evaluations is bit for bit as in calm")
        self.ready({"env": 1})
        logs = self.compose("--profile", "supervisor", "logs", "--no-color", "--no-log-prefix", "health")
        said = [json.loads(line[line.index("{") :]) for line in logs.splitlines() if "{" in line]  # after an escape
        decisions = [each for each in said if each["event"] == "scaled"]
        for each in decisions:
            self.log(f"health: {each['group']} {each['before']} → {each['after']}: {each['reason']}")
        assert decisions, "it does not say why"

    def same(self, what: str, rounds: Rounds, calm: Numbers) -> None:
        """Compare with the run that nothing happened to."""
        for number, found in enumerate(rounds.numbers):
            assert found == calm, f"round {number} while {what} has other numbers: {_told(found)}"
        self.log(f"{what}: {len(rounds.numbers)} rounds of work, each bit for bit as in calm")

    def restore(self, tenant: Client, calm: Numbers) -> None:
        """Back the cluster up, lose it with all volumes, and go on from the backup."""
        folder = self.folder / "backup"
        folder.mkdir()
        os.chown(folder, USER, USER)
        mount = ("-v", f"{folder}:/backup", "admin", "joynexus", "admin")
        for line in self.compose("run", "--rm", "-T", *mount, "backup", "/backup/today").strip().splitlines():
            self.log(f"admin: {line}")
        self.down()
        self.log("docker compose run --no-deps admin joynexus admin restore, docker compose up -d")
        self.compose("run", "--rm", "-T", "--no-deps", *mount, "restore", "/backup/today")
        self.compose("up", "-d")
        self.ready(ONE_OF_EACH)
        assert reach(tenant, "calm") == [calm.reached]
        self.log("the same client, key and policy have the same numbers")

    def revoke(self, tenant: Client) -> None:
        """Shut the tenant out: its open connection is refused at its next message."""
        self.log(f"admin: {self.compose.admin('joynexus', 'admin', 'tenants', 'revoke', 'lab-a').strip()}")
        try:
            tenant.policies()
        except joynexus.JoyNexusError as error:
            self.log(f"the tenant is told: {error}")
        else:
            raise AssertionError("a revoked key was served")

    def down(self) -> None:
        """Take it all down; nothing may be left."""
        self.log("docker compose down -v")
        self.compose.down()
        assert self.compose.left() == []
        self.log("no container, network or volume is left")


def main() -> int:
    """Run the test; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.compose", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--log", type=Path, default=ROOT / "runs" / "compose.log", help="where the log is kept")
    chosen = parser.parse_args()
    if why := engine.missing():
        print(f"test-compose is skipped: {why}")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="joynexus-compose-"))
    with Log(chosen.log) as log:
        test = Test(folder, log)
        try:
            test.run(tuple(chosen.parts.split(",")))
        except (AssertionError, joynexus.JoyNexusError) as error:
            log(f"FAILED: {error}")
            said = test.compose("--profile", "*", "logs", "--no-color", check=False)
            chosen.log.with_suffix(".roles").write_text(said)
            return 1
        finally:
            if not chosen.keep:
                test.down()
                shutil.rmtree(folder)
        log(f"passed in {log.seconds / 60:.0f} minutes")
    return 0


def _told(numbers: Numbers) -> str:
    return (
        f"loss {numbers.losses[0]:.3f} → {numbers.losses[-1]:.3f} in {len(numbers.losses)} steps, "
        f"reward {', '.join(f'{update[1]:.1f}' for update in numbers.updates)} in the updates, "
        f"{numbers.pressed.successes} of {numbers.pressed.episodes} pressed, "
        f"{numbers.reached.successes} of {numbers.reached.episodes} reached"
    )


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    sys.exit(main())
