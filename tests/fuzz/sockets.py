"""Fuzzing of a real master's ports, while a tenant works and a trainer works for it.

    python -m tests.fuzz.sockets run --seconds 60 [--seed N] [--findings FOLDER]
    python -m tests.fuzz.sockets replay FILE        what was sent before a finding, once more

In: dice. Out: a report. Never: a master that ends, or meets a bug, or grows; a tenant whose ops are lost or doubled or
stand still, without a finding that says so.

The tenant counts: op n must be the n-th step of its trainer, and an uploaded blob must come back as it went.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import blake3
import msgspec

from common.runtime import WorkerRuntime
from common.settings import WorkerSettings
from joynexus.keys import ClusterFile
from joynexus.wire.back import Register, TrainDone, TrainGroup
from joynexus.wire.front import (
    AcquireLease,
    BlobBegin,
    BlobChunk,
    BlobData,
    BlobRead,
    ClusterStatus,
    CreatePolicy,
    Lease,
    OpResult,
    OptimStep,
    Status,
)
from tests.fuzz.attacks import Attacker
from tests.fuzz.decoder import ROOT, rss_mib, slope_per_hour
from tests.process.master_process import MasterProcess, Peer
from tests.process.test_master import SPEC

STILL_S = 60.0
"""A tenant whose op takes longer stands still."""
GROWN_MIB = 512.0
"""More than this above the beginning is not bounded memory: unfinished messages take some (`attacks.HELD_BYTES`)."""
LEFT_MIB = 192.0
"""So much may be left once everybody has hung up: allocators keep what they had."""
LEFT_DESCRIPTORS = 20
_BACKBONE = "of-the-living"


class Report(msgspec.Struct, kw_only=True):
    """What a run found.

    Attributes:
        acts: what was done, how often.
        live_ops: ops of the tenant that went on meanwhile; `live_slowest_s`: the longest that one took.
        rss_mib: of the master: before, at most, after everybody had hung up.
        slope_mib_h: by how much it grew in the second half, an hour.
        descriptors: before, at most, after.
        refused: what the master counted, by reason.
        findings: sentences.
    """

    seed: int
    seconds: float = 0.0
    acts: dict[str, int] = {}
    live_ops: int = 0
    live_slowest_s: float = 0.0
    rss_mib: tuple[float, float, float] = (0.0, 0.0, 0.0)
    slope_mib_h: float = 0.0
    descriptors: tuple[int, int, int] = (0, 0, 0)
    refused: dict[str, int] = {}
    findings: list[str] = []


class Living:
    """A tenant and its trainer, each in a thread.

    Attributes:
        ops: done so far.
        moved_at: when the last one was (monotonic).
        slowest_s: the longest that one took.
        wrong: what must not be, if it was.
    """

    def __init__(self, master: MasterProcess) -> None:
        self._master = master
        self._stopping = threading.Event()
        self.ops, self.slowest_s, self.moved_at = 0, 0.0, time.monotonic()
        self.wrong: list[str] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(run,), daemon=True) for run in (self._train, self._ask)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End, once the op under way is done."""
        self._stopping.set()
        for thread in reversed(self._threads):
            thread.join(STILL_S)

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self.wrong.append(f"{run.__name__.strip('_')}: {type(error).__name__}: {str(error)[:500]}")

    def _train(self) -> None:
        folder = self._master.folder / "trainer"
        settings = WorkerSettings(cluster_file=self._master.keyring.cluster_file("trainer"), cache_dir=folder)
        steps = 0
        with WorkerRuntime(settings, signals=False) as runtime:
            runtime.register(
                Register(
                    role="trainer",
                    incarnation=runtime.incarnation,
                    pid=os.getpid(),
                    credit={"train": 1},
                    backbone=_BACKBONE,
                    backbone_name=_BACKBONE,
                    batch_key=_BACKBONE,
                )
            )
            while not self._stopping.is_set() or self._threads[1].is_alive():
                packet = runtime.next_work(0.2)
                if packet is None or not isinstance(packet.message, TrainGroup):
                    continue
                group = packet.message
                for index, item in enumerate(group.items):
                    digest = ""
                    if item.kind == "checkpoint":
                        digest = runtime.blobs.put_bytes(f"checkpoint after {steps}".encode())
                    else:
                        steps += 1
                    done = TrainDone(
                        task=group.task,
                        attempt=group.attempt,
                        tenant=item.tenant,
                        policy=item.policy,
                        seq=item.seq,
                        kind=item.kind,
                        result=OpResult(policy=item.policy, seq=item.seq, metrics={"steps": float(steps)}),
                        checkpoint=digest,
                        nbytes=10,
                        step=steps,
                        last=index == len(group.items) - 1,
                    )
                    runtime.send(done)

    def _ask(self) -> None:
        with self._master.tenant("living", tenant="living") as peer:
            peer.ask(
                CreatePolicy(policy="p", spec=msgspec.structs.replace(SPEC, backbone=_BACKBONE)), timeout_s=STILL_S
            )
            lease = peer.ask(AcquireLease(policy="p", holder="loop", ttl_ms=600_000), timeout_s=STILL_S).message
            assert isinstance(lease, Lease), lease
            while not self._stopping.is_set():
                start, seq = time.monotonic(), self.ops + 1
                self._step(peer, lease.lease, seq)
                if seq % 50 == 1:
                    self._blob(peer, seq)
                self.ops, self.moved_at = seq, time.monotonic()
                self.slowest_s = max(self.slowest_s, self.moved_at - start)
                self._stopping.wait(0.02)

    def _step(self, peer: Peer, lease: str, seq: int) -> None:
        answer = peer.ask(OptimStep(policy="p", lease=lease, seq=seq), id=f"op{seq}", timeout_s=STILL_S).message
        while not isinstance(answer, OpResult):
            assert not hasattr(answer, "code"), answer
            waiting = [packet for packet in peer.unasked if packet.header.re == f"op{seq}"]
            answer = (waiting or [peer.receive(timeout_s=STILL_S)])[-1].message
        peer.unasked.clear()
        assert (answer.seq, answer.metrics) == (seq, {"steps": float(seq)}), answer

    def _blob(self, peer: Peer, number: int) -> None:
        data = random.Random(number).randbytes(50_000)
        digest = blake3.blake3(data).hexdigest()
        asked = {"bulk": True, "timeout_s": STILL_S}
        peer.ask(BlobBegin(digest=digest, nbytes=len(data)), **asked)  # type: ignore[arg-type]
        peer.ask(BlobChunk(digest=digest, offset=0), (data,), **asked)  # type: ignore[arg-type]
        back = peer.ask(BlobRead(digest=digest, offset=0, length=len(data)), **asked)  # type: ignore[arg-type]
        assert isinstance(back.message, BlobData), back.message
        assert bytes(back.buffers[0]) == data, "a blob came back as another"


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


class Watch:
    """Of the master's process, by samples.

    Args:
        pid: its own.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._start = pid, time.monotonic()
        self.before = rss_mib(pid), _descriptors(pid)
        self.points: list[tuple[float, float]] = []
        self.most_descriptors = 0

    def look(self) -> None:
        """Take a sample, at most one a second."""
        at = time.monotonic() - self._start
        if not self.points or at - self.points[-1][0] > 1.0:
            self.points.append((at, rss_mib(self._pid)))
            self.most_descriptors = max(self.most_descriptors, _descriptors(self._pid))

    def settle(self, seconds: float = 90.0) -> tuple[float, int]:
        """Wait until descriptors are back, or so long; return memory and descriptors then."""
        until = time.monotonic() + seconds
        while _descriptors(self._pid) > self.before[1] + LEFT_DESCRIPTORS and time.monotonic() < until:
            time.sleep(0.2)
        return rss_mib(self._pid), _descriptors(self._pid)


def run(seconds: float, *, seed: int, findings: Path, say: Callable[[str], object] = print) -> Report:
    """Attack a master for so long."""
    report = Report(seed=seed)
    with tempfile.TemporaryDirectory(prefix="jnx") as name, MasterProcess(Path(name), json_logs=True) as master:
        boss = ClusterFile.load(master.keyring.issue("boss", tenant="ops", operator=True))
        living, attacker = Living(master), Attacker(master.keyring, random.Random(seed))
        living.start()
        _wait(lambda: living.ops > 10 or living.wrong, STILL_S)
        assert master.process is not None
        watch, start = Watch(master.process.pid), time.monotonic()
        try:
            while time.monotonic() - start < seconds and not report.findings:
                attacker.act()
                watch.look()
                report.findings += _look(master, living, watch)
        finally:
            attacker.close()
        if not report.findings:
            gone_on = living.ops
            _wait(lambda: living.ops > gone_on or living.wrong, STILL_S)
            after = watch.settle()
            report.refused = _counts(boss)
            living.stop()
            report.findings += _look(master, living, watch) + _left(watch, after, report.refused)
            report.rss_mib = (*(round(mib, 1) for mib in (watch.before[0], _most(watch), after[0])),)
            report.descriptors = watch.before[1], watch.most_descriptors, after[1]
        report.seconds, report.acts = round(time.monotonic() - start, 1), dict(sorted(attacker.acts.items()))
        report.live_ops, report.live_slowest_s = living.ops, round(living.slowest_s, 2)
        report.slope_mib_h = round(slope_per_hour(watch.points[len(watch.points) // 2 :]), 1)
        if report.findings:
            findings.mkdir(parents=True, exist_ok=True)
            path = findings / f"sockets.{seed}.{int(time.time())}"
            path.write_bytes(msgspec.msgpack.encode(list(attacker.sent)))
            (path.with_suffix(".log")).write_text(master.log_text()[-200_000:])
            say(f"FOUND (seed {seed}): {'; '.join(report.findings)}\nagain: python -m tests.fuzz.sockets replay {path}")
    return report


def _most(watch: Watch) -> float:
    return max((size for _, size in watch.points), default=0.0)


def _look(master: MasterProcess, living: Living, watch: Watch) -> list[str]:
    """Say what is wrong now."""
    assert master.process is not None
    code = master.process.poll()
    if code is not None:
        return [f"the master ended with exit code {code}"]
    found = list(living.wrong)
    if time.monotonic() - living.moved_at > STILL_S:
        found.append(f"the living tenant stands still after {living.ops} ops")
    if watch.points and watch.points[-1][1] > watch.before[0] + GROWN_MIB:
        found.append(f"the master takes {watch.points[-1][1]:.0f} MiB, {watch.before[0]:.0f} before")
    bugs = _bugs(master)
    if bugs:
        found.append(f"the log of the master has {bugs[0]}")
    return found


def _left(watch: Watch, after: tuple[float, int], refused: dict[str, int]) -> list[str]:
    found = []
    if after[0] > watch.before[0] + LEFT_MIB:
        found.append(f"{after[0]:.0f} MiB are left of {watch.before[0]:.0f} once everybody has hung up")
    if after[1] > watch.before[1] + LEFT_DESCRIPTORS:
        found.append(f"{after[1]} descriptors are left of {watch.before[1]} once everybody has hung up")
    if refused.get("bug"):
        found.append(f"{refused['bug']} messages met a bug")
    return found


_read_upto: dict[Path, int] = {}


def _bugs(master: MasterProcess) -> list[str]:
    """Return what the master has logged, since the last look, as an error or worse."""
    path = master.folder / "master.log"
    size = path.stat().st_size
    start = _read_upto.get(path, 0)
    if size == start:
        return []
    with path.open("rb") as file:
        file.seek(start)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    _read_upto[path] = start + len(whole)
    found = []
    for line in whole.splitlines():
        try:
            level = str(json.loads(line).get("level", ""))
        except (ValueError, AttributeError):
            level = "error"  # what Python says as it ends is no JSON
        if level in ("error", "critical"):
            found.append(line.decode(errors="replace")[:3000])
    return found


def _counts(boss: ClusterFile) -> dict[str, int]:
    with Peer(boss) as peer:
        status = peer.ask(Status(), timeout_s=STILL_S).message
    assert isinstance(status, ClusterStatus), status
    return dict(status.counts)


def _wait(true: Callable[[], object], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.05)


def replay(path: Path) -> list[str]:
    """Send what was sent before a finding once more; return what is wrong then."""
    sent = msgspec.msgpack.decode(path.read_bytes(), type=list[tuple[float, str, bool, list[bytes]]])
    with tempfile.TemporaryDirectory(prefix="jnx") as name, MasterProcess(Path(name), json_logs=True) as master:
        living, attacker = Living(master), Attacker(master.keyring, random.Random(0))
        living.start()
        _wait(lambda: living.ops > 10 or living.wrong, STILL_S)
        assert master.process is not None
        watch = Watch(master.process.pid)
        found: list[str] = []
        for _, who, bulk, frames in sent:
            attacker.again(who, bulk, frames)
            watch.look()
            found = _look(master, living, watch)
            if found:
                print(who, "bulk" if bulk else "control", [frame[:2000] for frame in frames[:8]])
                break
        gone_on = living.ops
        _wait(lambda: living.ops > gone_on or living.wrong, STILL_S)
        found = found or _look(master, living, watch)
        attacker.close()
        living.stop()
    return found


def main() -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.sockets", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("run", "replay"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1, 10**6))
    parser.add_argument("--findings", type=Path, default=ROOT / "runs" / "fuzz")
    chosen = parser.parse_args()
    if chosen.what == "replay":
        found = [sentence for path in chosen.files for sentence in replay(path)]
        print("\n".join(found) or "nothing is wrong")
        return int(bool(found))
    report = run(chosen.seconds, seed=chosen.seed, findings=chosen.findings)
    print(msgspec.json.format(msgspec.json.encode(report)).decode())
    return int(bool(report.findings))


if __name__ == "__main__":
    sys.exit(main())
