"""The clock on the wall is set, by an hour or by a little again and again: nobody is timed out, and nothing goes.

Processes under test are started with a module that shifts what they read of that clock; files keep the times that the
kernel gives them, so that after a jump all of them look older, or from the future.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import blake3
import pytest

from joynexus import launch
from joynexus.wire.back import Beat, BeatAck, Register, Registered
from joynexus.wire.front import Accepted, BlobBegin, BlobChunk, BlobOffset, GetPolicy, Ping, PolicyInfo, Pong
from tests.chaos.cluster import BACKBONE, chaotic
from tests.chaos.jobs import DATASET, numbers, push, sft
from tests.chaos.test_acknowledgement import OPS, driving, op
from tests.chaos.verdict import Verdict
from tests.process.master_process import MasterProcess
from tests.waiting import meanwhile, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # on a busy host a cluster starts in minutes

HOUR = 3600.0
STEPS = 30
SHIFT = """
import os, time

_time, _time_ns = time.time, time.time_ns

_last = 0.0

def _shift():
    global _last
    try:
        with open(os.environ["SHIFTED_CLOCK"]) as file:
            _last = float(file.read())
        with open(os.environ["SHIFTED_CLOCK"] + ".read", "a") as file:
            file.write(f"{_last} ")
    except OSError:  # who reads data sets is confined to them
        pass
    return _last

time.time = lambda: _time() + _shift()
time.time_ns = lambda: _time_ns() + int(_shift() * 1e9)
"""


class Clock:
    """What processes that are started from now on read of the clock on the wall."""

    def __init__(self, folder: Path) -> None:
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SHIFT)
        self._file = folder / "clock"
        self.environment = {
            "SHIFTED_CLOCK": str(self._file),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(folder / "site"), os.environ.get("PYTHONPATH")))),
        }
        self.set(0.0)

    def set(self, seconds: float) -> None:
        """Set it so far ahead of what it would be."""
        new = self._file.with_suffix(".new")
        new.write_text(str(seconds))
        new.rename(self._file)

    def was_read(self, seconds: float) -> bool:
        """Somebody has read it, set so."""
        read = self._file.with_name("clock.read")
        return read.exists() and str(seconds) in read.read_text().split()

    @contextmanager
    def stepping(self, seconds: float) -> Iterator[None]:
        """Have it set to and fro all the while."""

        def step(ended: threading.Event) -> None:
            for shift in itertools.cycle((seconds, -seconds)):
                if ended.wait(0.05):
                    return
                self.set(shift)

        try:
            with meanwhile(step):
                yield
        finally:
            self.set(0.0)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(tmp_path)
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    return clock


@pytest.mark.case(15, "the master's clock is set by hours, and it starts again then")
def test_leases_beats_uploads_and_ops_outlast_a_clock_that_is_set(
    tmp_path: Path, clock: Clock, verdict: Verdict
) -> None:
    data = b"half of it, and the other half"
    digest, half = blake3.blake3(data).hexdigest(), len(data) // 2
    register = Register(role="env", incarnation="one", pid=os.getpid(), credit={"data": 1})
    beat = Beat(progress=0, phase="idle", busy_s=0.0)
    with (
        MasterProcess(tmp_path, silent_s=300) as master,
        driving(master) as (peer, lease),
        master.worker("env") as worker,
    ):
        assert isinstance(worker.ask(register).message, Registered)
        seqs = itertools.count(OPS + 1)
        begin = BlobBegin(digest=digest, nbytes=len(data))
        assert peer.ask(begin, bulk=True).message == BlobOffset(digest=digest, offset=0)
        peer.ask(BlobChunk(digest=digest, offset=0), [data[:half]], bulk=True)

        def all_goes_on() -> None:
            with verdict("I1"), verdict("I3"):
                assert isinstance(op(peer, lease, next(seqs)), Accepted)
            with verdict("I4"):
                assert peer.ask(begin, bulk=True).message == BlobOffset(digest=digest, offset=half)
            with verdict("I5"):
                assert isinstance(worker.ask(beat).message, BeatAck)

        for hours in (1, -1, 2, 0):
            clock.set(hours * HOUR)
            all_goes_on()
        with clock.stepping(0.5):
            for _ in range(10):
                all_goes_on()
        with verdict("I6"):
            assert "worker_lost" not in master.log_text()
        for hours in (1, -1):
            clock.set(hours * HOUR)
            master.kill()
            master.start()
            assert isinstance(worker.ask(register, timeout_s=60.0).message, Registered)
            all_goes_on()
            assert clock.was_read(hours * HOUR)
        with master.tenant("late") as late, verdict("I1"):
            assert isinstance(late.ask(Ping()).message, Pong)
            told = late.ask(GetPolicy(policy="p")).message
            assert isinstance(told, PolicyInfo)
            assert told.next_seq == next(seqs)


@pytest.mark.thorough
@pytest.mark.case(15, "all clocks of a cluster are set in a job, as its roles start again")
def test_job_and_roles_of_a_cluster_whose_clocks_are_set_are_those_of_an_undisturbed_one(
    tmp_path: Path, clock: Clock, verdict: Verdict
) -> None:
    with chaotic(tmp_path, JOYNEXUS_BEAT_MS="300", JOYNEXUS_SILENT_S="20") as cluster:
        push(cluster.client, tmp_path / DATASET)
        undisturbed = numbers(cluster.client, sft(cluster.client, "undisturbed", STEPS), "undisturbed", STEPS)
        before = cluster.local.all_running()
        for hours in (1, -1):
            clock.set(hours * HOUR)
            policy = f"ahead-{hours}" if hours > 0 else f"behind{hours}"
            with verdict("I1"), verdict("I3"):
                assert numbers(cluster.client, sft(cluster.client, policy, STEPS), policy, STEPS) == undisturbed
        with clock.stepping(0.5), verdict("I1"), verdict("I3"):
            assert numbers(cluster.client, sft(cluster.client, "stepping", STEPS), "stepping", STEPS) == undisturbed
        with verdict("I5"):
            assert cluster.local.all_running() == before
            assert "worker_lost" not in cluster.log("master")
        clock.set(HOUR)
        os.kill(before["health"], signal.SIGKILL)
        until(lambda: not cluster.local.running("health"))
        launch.up(cluster.local.folder, launch.Options(backbone=BACKBONE, timeout_s=300))
        with verdict("I4"):
            after = cluster.local.all_running()
            assert {**after, "health": 0} == {**before, "health": 0}, "health adopted them"
        for role in ("master", "trainer", "inference", "env"):
            os.kill(before[role], signal.SIGKILL)
            until(lambda role=role: cluster.local.running(role) not in (0, before[role]))
        with verdict("I1"), verdict("I3"):
            assert numbers(cluster.client, sft(cluster.client, "again", STEPS), "again", STEPS) == undisturbed
        assert clock.was_read(HOUR)
