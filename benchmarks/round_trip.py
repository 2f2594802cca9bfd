"""Policy round trip: two 224x224 uint8 pictures and a state to a chunk of actions, through a real master, CURVE on.

In: 1 and 8 clients (the package's own client, a process each), a stub inference worker that takes 0 or 20 ms for a
group; the same through a bare relay, for what this machine allows at best just now. Out: latency, requests a second,
the master's CPU time a request. Never: a picture that is not sent.

    python -m benchmarks.round_trip [--quick]
"""

from __future__ import annotations

import multiprocessing as mp
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _bare_relay, _report
from benchmarks._cluster import ACTION, CHUNK, Master, observation, publish, registration, running_master
from common.runtime import WorkerRuntime
from common.settings import WorkerSettings
from joynexus.client import connect
from joynexus.wire import Packet
from joynexus.wire.arrays import ArrayPacker
from joynexus.wire.back import PredictDone, Predicted, PredictGroup, WeightsApplied, WeightsOffer

WARM_UP = 20


def infer(cluster_file: Path, cache: Path, device_s: float, ready: Any) -> None:
    """Run the stub inference worker until it is killed."""
    settings = WorkerSettings(cluster_file=cluster_file, cache_dir=cache)
    with WorkerRuntime(settings) as runtime:
        actions = np.zeros((1, CHUNK, ACTION), np.float32)

        def work(packet: Packet) -> None:
            message = packet.message
            if isinstance(message, WeightsOffer):
                runtime.send(WeightsApplied(tenant=message.tenant, policy=message.policy, version=message.version))
                ready.set()
            elif isinstance(message, PredictGroup):
                time.sleep(device_s)
                packer = ArrayPacker()
                items = tuple(
                    Predicted(request=item.request, version=item.version, actions=packer.add(actions), rows=1)
                    for item in message.items
                )
                runtime.send(PredictDone(task=message.task, attempt=message.attempt, items=items), packer.buffers)

        runtime.register(registration(runtime, "inference", predict=1))
        runtime.wait_registered(30)
        ready.set()
        runtime.serve(work)


def act(cluster_file: Path, requests: int, barrier: Barrier, results: Any) -> None:
    """Ask for actions, one request after the other; report each request's seconds."""
    pictures, state = observation()
    with connect(cluster_file, timeout_s=30.0) as client:
        policy = client.policy("stub")
        for _ in range(WARM_UP):
            policy.act(pictures, "pick up the cube", state)
        barrier.wait()
        seconds = []
        for _ in range(requests):
            start = time.perf_counter()
            policy.act(pictures, "pick up the cube", state)
            seconds.append(time.perf_counter() - start)
        barrier.wait()
        results.put(seconds)


def run(master: Master, clients: int, requests: int) -> tuple[list[float], float, float]:
    """Return each request's seconds, requests a second, and the master's CPU seconds a request."""
    barrier, results = mp.Barrier(clients + 1), mp.Queue()
    cluster_file = master.keyring.cluster_file("bench")
    processes = [mp.Process(target=act, args=(cluster_file, requests, barrier, results)) for _ in range(clients)]
    for process in processes:
        process.start()
    barrier.wait(60)
    start, cpu = time.perf_counter(), master.cpu_s()
    barrier.wait(120)
    wall, cpu = time.perf_counter() - start, master.cpu_s() - cpu
    seconds = [second for _ in processes for second in results.get()]
    for process in processes:
        process.join()
    return seconds, len(seconds) / wall, cpu / len(seconds)


def measure(clients: int, device_ms: int, *, requests: int, repeats: int) -> list[_report.Row]:
    """Measure one combination in a cluster of its own, each run beside one of the bare relay."""
    reference = [_bare_relay.run(clients, device_ms / 1000, WARM_UP, requests)]
    with running_master() as master:
        publish(master, "stub")
        ready = mp.Event()
        worker = mp.Process(
            target=infer,
            args=(master.keyring.cluster_file("inference"), master.folder / "inference", device_ms / 1000, ready),
        )
        worker.start()
        try:
            assert ready.wait(30)
            runs = [run(master, clients, requests) for _ in range(repeats)]
        finally:
            worker.kill()
            worker.join()
    reference += [_bare_relay.run(clients, device_ms / 1000, WARM_UP, requests) for _ in range(repeats - 1)]
    ours = _row("joynexus", clients, device_ms, [(seconds, rate) for seconds, rate, _ in runs])
    ours["master_cpu_ms"] = _report.spread([1000 * cpu for _, _, cpu in runs], 2)
    return [ours, _row("bare relay", clients, device_ms, reference)]


def _row(system: str, clients: int, device_ms: int, runs: list[tuple[list[float], float]]) -> _report.Row:
    return {
        "system": system,
        "clients": clients,
        "device_ms": device_ms,
        "p50_ms": _report.spread([1000 * _report.percentile(seconds, 0.5) for seconds, _ in runs], 2),
        "p95_ms": _report.spread([1000 * _report.percentile(seconds, 0.95) for seconds, _ in runs], 2),
        "requests_per_s": _report.spread([rate for _, rate in runs], 1),
    }


def main() -> None:
    options = _report.arguments("round_trip", "Policy round trip through a real master.")
    mp.set_start_method("spawn")
    requests, repeats = (60, 1) if options.quick else (500, 5)
    rows = [
        row
        for clients, device_ms in ((1, 0), (8, 0), (1, 20), (8, 20))
        for row in measure(clients, device_ms, requests=requests, repeats=repeats)
    ]
    _report.write("round_trip", options, rows)


if __name__ == "__main__":
    main()
