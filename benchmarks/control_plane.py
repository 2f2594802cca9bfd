"""Control plane: operations a second through a real master, CURVE on, with and without the journal.

In: one load generator that keeps a window of requests in flight over many policies; a stub trainer that answers at
once. Out: operations a second and the master's CPU time for each. Never: an acknowledgement that was not awaited.

    python -m benchmarks.control_plane [--quick]

- `ping`: a request that changes nothing.
- `accepted`: `optim_step` until it is acknowledged (fsynced, with the journal).
- `applied`: until its result has come back from a trainer: two journal rows, five messages.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from benchmarks import _report
from benchmarks._cluster import SPEC, Master, registration, running_master, train
from common.runtime import WorkerRuntime
from common.settings import WorkerSettings
from joynexus.keys import ClusterFile
from joynexus.transport import Socket, dial
from joynexus.wire import Header, Message, encode
from joynexus.wire.front import AcquireLease, CreatePolicy, Lease, OptimStep, Ping

WINDOW = 256
"""Requests in flight, over all policies."""

POLICIES = 64

_header = msgspec.msgpack.Decoder(Header)
_lease = msgspec.msgpack.Decoder(Lease)


class Load:
    """Keeps a window of requests in flight over one connection."""

    def __init__(self, cluster: ClusterFile) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self.socket = dial(self._context, cluster.control, cluster.server_public, cluster.keys())
        assert self.socket.poll(30_000, zmq.POLLOUT), "no connection to the master"

    def ask(self, message: Message) -> tuple[str, bytes]:
        """Send one request and return its answer's kind and body."""
        self.socket.send_multipart(encode(message, id="setup"))
        return self.receive()

    def receive(self) -> tuple[str, bytes]:
        """Return kind and body of the next message."""
        _, header, body, *_ = self.socket.recv_multipart()
        return _header.decode(header).kind, body

    def run(self, messages: Iterator[Message], count: int, final: str) -> float:
        """Send `count` requests, at most a window of them unanswered; return seconds until all `final`s came."""
        start, sent, done = time.perf_counter(), 0, 0
        while done < count:
            while sent < count and sent - done < WINDOW:
                self.socket.send_multipart(encode(next(messages), id=f"m{sent}"))
                sent += 1
            while done < count:
                kind, body = self.receive()
                done += kind == final
                if kind == "failure":
                    raise RuntimeError(f"the master refused a request: {body!r}")
                if not self.socket.poll(0):
                    break
        return time.perf_counter() - start

    def close(self) -> None:
        """Hang up."""
        self._context.destroy(linger=0)


def steps(load: Load) -> Iterator[Message]:
    """Create policies, take their leases, and give ops of all of them in turn, for ever."""
    leases: deque[Lease] = deque()
    for index in range(POLICIES):
        kind, body = load.ask(CreatePolicy(policy=f"p{index}", spec=SPEC))
        assert kind == "policy_info", body
        kind, body = load.ask(AcquireLease(policy=f"p{index}", holder="bench", ttl_ms=600_000))
        assert kind == "lease", body
        leases.append(_lease.decode(body))
    seq = 0
    while True:
        seq += 1
        for lease in leases:
            yield OptimStep(policy=lease.policy, lease=lease.lease, seq=seq)


def pings() -> Iterator[Message]:
    while True:
        yield Ping()


def trainer(cluster_file: Path, cache: Path) -> None:
    """Run the stub trainer until it is killed."""
    with WorkerRuntime(WorkerSettings(cluster_file=cluster_file, cache_dir=cache)) as runtime:
        runtime.register(registration(runtime, "trainer", train=4))
        runtime.serve(lambda packet: train(runtime, packet))


def measure(what: str, module: str, *, count: int, repeats: int) -> _report.Row:
    """Measure one operation in a cluster of its own."""
    final = {"ping": "pong", "accepted": "accepted", "applied": "op_result"}[what]
    with running_master(module, max_inflight_ops=1_000_000) as master:
        worker = _start_trainer(master) if what == "applied" else None
        load = Load(ClusterFile.load(master.keyring.cluster_file("bench")))
        try:
            messages = pings() if what == "ping" else steps(load)
            load.run(messages, 500, final)  # warm-up
            rates, cpus = [], []
            for _ in range(repeats):
                cpu = master.cpu_s()
                seconds = load.run(messages, count, final)
                rates.append(count / seconds)
                cpus.append(1e6 * (master.cpu_s() - cpu) / count)
        finally:
            load.close()
            if worker is not None:
                worker.kill()
                worker.join()
    return {
        "operation": what,
        "journal": module == "services.master" and what != "ping",
        "ops_per_s": _report.spread(rates, 0),
        "master_cpu_us": _report.spread(cpus, 1),
    }


def _start_trainer(master: Master) -> mp.Process:
    files = (master.keyring.cluster_file("trainer"), master.folder / "trainer")
    process = mp.Process(target=trainer, args=files)
    process.start()
    return process


def main() -> None:
    options = _report.arguments("control_plane", "Operations a second through a real master.")
    mp.set_start_method("spawn")
    count, repeats = (5_000, 3) if options.quick else (20_000, 5)
    plan = (
        ("ping", "services.master"),
        ("accepted", "services.master"),
        ("accepted", "benchmarks._no_journal"),
        ("applied", "services.master"),
        ("applied", "benchmarks._no_journal"),
    )
    rows = [measure(what, module, count=count, repeats=repeats) for what, module in plan]
    _report.write("control_plane", options, rows)


if __name__ == "__main__":
    main()
