"""The runtime that all workers share, against a master on real encrypted sockets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.exits import EXIT_CONFIG
from common.runtime import WorkerRuntime
from common.settings import EnvSettings
from joynexus.wire import ErrorCode, JoyNexusError, Packet, failure
from joynexus.wire.back import IndicesDrawn, Register, SampleIndices
from joynexus.wire.front import BlobRead, ClusterStatus, Status
from tests.process.fake_master import FakeMaster
from tests.waiting import until

STATUS = ClusterStatus(server="s", uptime_s=0, roles=(), lanes=(), policies=0, jobs_running=0, versions_in_service=0)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[FakeMaster]:
    with FakeMaster(tmp_path) as master:
        yield master


@pytest.fixture
def runtime(master: FakeMaster) -> Iterator[WorkerRuntime]:
    with WorkerRuntime(master.settings(EnvSettings, "env"), signals=False, exit=pytest.fail) as runtime:
        yield runtime


def register(runtime: WorkerRuntime) -> None:
    runtime.register(Register(role="env", incarnation=runtime.incarnation, pid=os.getpid(), credit={"data": 1}))
    assert runtime.wait_registered(10)


def task(name: str) -> SampleIndices:
    return SampleIndices(
        task=name, attempt=1, tenant="a", manifest="", holdout_episodes=0, seed=0, batch_size=1, first_step=0, steps=1
    )


def test_work_comes_and_results_go(master: FakeMaster, runtime: WorkerRuntime) -> None:
    register(runtime)
    assert runtime.worker == "env-1"
    master.give(task("t1"), (b"abc", b""))
    packet = runtime.next_work(10)
    assert packet is not None
    assert packet.message == task("t1")
    assert [bytes(buffer) for buffer in packet.buffers] == [b"abc", b""]
    runtime.send(IndicesDrawn(task="t1", attempt=1, batches=((1, 2),)))
    assert master.expect(IndicesDrawn).message == IndicesDrawn(task="t1", attempt=1, batches=((1, 2),))


def test_beats_carry_the_progress_of_the_work_loop(master: FakeMaster, runtime: WorkerRuntime) -> None:
    register(runtime)
    with runtime.progress.phase("working", deadline_s=60):
        runtime.progress.advance()
        until(lambda: any(beat.phase == "working" and beat.progress == 1 for beat in master.beats))
    until(lambda: master.beats[-1].phase == "idle")
    assert 0 < master.beats[0].uptime_s < master.beats[-1].uptime_s


def test_result_reaches_a_master_that_forgot_the_worker(master: FakeMaster, runtime: WorkerRuntime) -> None:
    register(runtime)
    master.forgetful = True
    runtime.send(IndicesDrawn(task="t1", attempt=1))
    assert master.expect(IndicesDrawn).message == IndicesDrawn(task="t1", attempt=1)
    assert len(master.registers) == 2
    assert master.registers[0].incarnation == master.registers[1].incarnation


def test_request_is_answered_from_any_thread(master: FakeMaster, runtime: WorkerRuntime) -> None:
    register(runtime)
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(type(runtime.request(Status(), timeout_s=10).message).__name__))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for _ in threads:
        master.give(STATUS, re=master.expect(Status).header.id)
    for thread in threads:
        thread.join()
    assert answers == ["ClusterStatus"] * 4


def test_request_without_an_answer_ends_at_its_deadline(master: FakeMaster, runtime: WorkerRuntime) -> None:
    register(runtime)
    master.deaf = True
    with pytest.raises(JoyNexusError, match="did not answer") as caught:
        runtime.request(Status(), timeout_s=0.3)
    assert caught.value.code is ErrorCode.DEADLINE


def test_absent_master_is_waited_for_quietly(tmp_path: Path) -> None:
    with FakeMaster(tmp_path) as master:
        settings = master.settings(EnvSettings, "env")
    with WorkerRuntime(settings, signals=False, exit=pytest.fail) as runtime:
        runtime.register(Register(role="env", incarnation=runtime.incarnation, pid=1, credit={}))
        before = time.process_time()
        with pytest.raises(JoyNexusError, match="is it running"):
            runtime.request(Status(), timeout_s=1.0)
        with pytest.raises(JoyNexusError, match="is it running"):
            runtime.ask(BlobRead(digest="0" * 64, offset=0, length=1), timeout_s=1.0).result()
        assert time.process_time() - before < 0.8


def test_worker_that_was_told_to_leave_finishes_what_it_has_and_says_that_it_is_gone(
    master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", pytest.fail)
    done: list[str] = []

    def work(packet: Packet) -> None:
        done.append(packet.message.task)  # type: ignore[attr-defined]
        runtime.send(IndicesDrawn(task="t1", attempt=1))

    with WorkerRuntime(master.settings(EnvSettings, "env"), signals=False, exit=pytest.fail) as runtime:
        register(runtime)
        master.give(task("t1"))
        until(lambda: bool(runtime._work))
        master.leave = True
        until(lambda: runtime.leaving)
        runtime._on_signal(signal.SIGTERM, None)  # and is told again, by health or an engine
        runtime.serve(work)
    assert done == ["t1"]
    assert master.gone.is_set()
    assert master.expect(IndicesDrawn).message == IndicesDrawn(task="t1", attempt=1)


def test_worker_says_of_which_instance_it_is_a_life(master: FakeMaster) -> None:
    for number in range(2):
        settings = master.settings(EnvSettings, "env", instance="{host}/env-3")
        with WorkerRuntime(settings, signals=False, exit=pytest.fail) as runtime:
            register(runtime)
            assert master.registers[number].instance == f"{socket.gethostname()}/env-3"


def test_message_over_the_limits_is_refused_at_once(runtime: WorkerRuntime) -> None:
    with pytest.raises(ValueError, match="at most"):
        runtime.send(IndicesDrawn(task="t", attempt=1, batches=((1 << 40,) * 200_000,)))


def test_lost_task_is_dropped_from_the_queue(master: FakeMaster, runtime: WorkerRuntime) -> None:
    register(runtime)
    master.give(task("t1"))
    until(lambda: len(runtime._work) == 1)
    master.lost = ("t1",)
    master.forgetful = True
    until(lambda: len(master.registers) == 2)
    until(lambda: runtime.cancelled("t1"))
    assert runtime.next_work(0.0) is None
    master.give(task("t1"))  # a later attempt of it is wanted again
    assert runtime.next_work(10) is not None
    assert not runtime.cancelled("t1")


def test_work_that_is_given_again_is_not_done_again(master: FakeMaster, runtime: WorkerRuntime) -> None:
    register(runtime)
    master.give(task("queued"))
    master.give(task("done"))
    assert runtime.next_work(10) is not None
    assert runtime.next_work(10) is not None
    runtime.send(IndicesDrawn(task="done", attempt=1))
    for name in ("queued", "done", "new"):
        master.give(task(name))
    packet = runtime.next_work(10)
    assert packet is not None
    assert packet.message == task("new")
    assert runtime.next_work(0.0) is None


@pytest.mark.parametrize("size", [0, 1, 1024 * 1024, 5_500_000])
def test_blob_travels_both_ways_without_a_shared_folder(
    master: FakeMaster, runtime: WorkerRuntime, tmp_path: Path, size: int
) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    digest, nbytes = runtime.blobs.put_file(tmp_path / "file")
    assert nbytes == size
    assert not (tmp_path / "file").exists()
    assert master.store.path(digest).read_bytes() == data
    assert runtime.blobs.put_bytes(data) == digest
    assert runtime.blobs.fetch(digest).read_bytes() == data
    assert "cache" in str(runtime.blobs.fetch(digest))


def test_damaged_rest_of_an_interrupted_fetch_is_fetched_again(
    master: FakeMaster, runtime: WorkerRuntime, tmp_path: Path
) -> None:
    data = os.urandom(3_000_000)
    digest = master.store.put_bytes(data)
    (tmp_path / "env/cache/blobs/partial" / digest).write_bytes(bytes(2_000_000))
    assert runtime.blobs.fetch(digest).read_bytes() == data


def test_missing_blob_is_said_to_be_missing(master: FakeMaster, runtime: WorkerRuntime) -> None:
    with pytest.raises(JoyNexusError) as caught:
        runtime.blobs.fetch("0" * 64)
    assert caught.value.code is ErrorCode.NOT_FOUND


def test_cache_keeps_its_budget(master: FakeMaster) -> None:
    settings = master.settings(EnvSettings, "env", cache_budget_bytes=250)
    with WorkerRuntime(settings, signals=False, exit=pytest.fail) as runtime:
        digests = [master.store.put_bytes(bytes([i]) * 100) for i in range(4)]
        paths = [runtime.blobs.fetch(digest) for digest in digests]
        assert [path.exists() for path in paths] == [False, False, True, True]


def test_shared_folder_spares_the_transfer(master: FakeMaster, tmp_path: Path) -> None:
    settings = master.settings(EnvSettings, "env", shared=True)
    with WorkerRuntime(settings, signals=False, exit=pytest.fail) as runtime:
        digest = runtime.blobs.put_bytes(b"weights")
        assert master.store.path(digest) == runtime.blobs.fetch(digest)


WORKER = """
import os, sys
from pathlib import Path
from common.exits import EXIT_CONFIG
from common.runtime import WorkerRuntime
from common.settings import EnvSettings
from joynexus.wire.back import IndicesDrawn, Register

settings = EnvSettings(cluster_file=Path(sys.argv[1]), cache_dir=Path(sys.argv[2]))

def work(packet):
    if packet.message.task == "hang":
        with runtime.progress.phase("working", deadline_s=0.5):
            runtime.next_work(3600)
    runtime.send(IndicesDrawn(task=packet.message.task, attempt=1))

with WorkerRuntime(settings) as runtime:
    runtime.register(Register(role="env", incarnation=runtime.incarnation, pid=os.getpid(), credit={"data": 1}))
    runtime.serve(work, drain=lambda: runtime.send(IndicesDrawn(task="drained", attempt=1)))
"""


@pytest.fixture
def process(master: FakeMaster, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", WORKER, str(master.keyring.cluster_file("env")), str(tmp_path / "cache")]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        yield process
        process.kill()


def test_sigterm_finishes_the_work_and_delivers_every_result(
    master: FakeMaster, process: subprocess.Popen[bytes]
) -> None:
    until(lambda: bool(master.registers), 30)
    master.give(task("t1"))
    master.expect(IndicesDrawn)
    process.send_signal(signal.SIGTERM)
    assert master.left.wait(10)
    assert master.expect(IndicesDrawn).message == IndicesDrawn(task="drained", attempt=1)
    assert process.wait(10) == 0


def test_worker_of_another_protocol_ends_with_the_masters_sentence(master: FakeMaster, tmp_path: Path) -> None:
    master.refuses = failure(ErrorCode.UPGRADE_REQUIRED, "the worker speaks protocol 9: install an older worker")
    command = [sys.executable, "-c", WORKER, str(master.keyring.cluster_file("env")), str(tmp_path / "cache")]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 78, ended.stderr
    assert "install an older worker" in (ended.stdout + ended.stderr).strip().splitlines()[-1]


@pytest.mark.parametrize("missing", ["client.toml", "key.toml"])
def test_worker_without_its_key_ends_with_one_sentence(master: FakeMaster, missing: str) -> None:
    settings = master.settings(EnvSettings, "env")
    (settings.cluster_file.parent / missing).unlink()
    environment = {**os.environ, "JOYNEXUS_CLUSTER_FILE": str(settings.cluster_file)}
    ended = subprocess.run(
        [sys.executable, "-m", "services.env"], capture_output=True, env=environment, timeout=60, text=True
    )
    assert ended.returncode == EXIT_CONFIG
    assert ended.stderr.splitlines()[-1].startswith("this role cannot start: ")
    assert str(settings.cluster_file.parent / missing) in ended.stderr
    assert "Traceback" not in ended.stderr


def test_wedged_worker_ends_itself(master: FakeMaster, process: subprocess.Popen[bytes]) -> None:
    until(lambda: bool(master.registers), 30)
    master.give(task("hang"))
    assert process.wait(20) == 124
