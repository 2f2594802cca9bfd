"""Heartbeats of a real master while many clients wait for an answer.

In: how many clients wait. Out: round trips of a tenant's `Ping` and of a worker's `Beat`. Never: a client that does not
wait (each has one request to act under way, and no inference worker is there), or one connection for several.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import zmq

from benchmarks import _report
from benchmarks._cluster import Master, publish, running_master
from joynexus.keys import ClusterFile
from joynexus.tenants import TenantLimitsFile
from joynexus.transport import Socket, dial
from joynexus.wire import Array, Header, Message, encode
from joynexus.wire.back import Beat, Register
from joynexus.wire.front import Act, Ping

_PROCESSES = 4
_PAUSE_S = 0.005
_CONNECT_S = 120.0
_header = msgspec.msgpack.Decoder(Header)


def heartbeats(waiting: int, *, seconds: float, target_ms: float) -> list[_report.Row]:
    """Measure heartbeats for some seconds while so many clients wait."""
    with running_master() as master:
        TenantLimitsFile(master.folder / "keys" / "limits.json").change("bench", {"max_waiting_acts": 2 * waiting + 1})
        publish(master, "waiting")
        crowd = [_Crowd(master, waiting // _PROCESSES) for _ in range(_PROCESSES)] if waiting else []
        try:
            for part in crowd:
                part.settled()
            context: zmq.Context[Socket] = zmq.Context()
            tenant = _dial(context, master.keyring.cluster_file("bench"))
            worker = _dial(context, master.keyring.cluster_file("env"))
            register = Register(role="env", incarnation="bench", pid=1, credit={})
            _round_trip(worker, register)
            cpu = master.cpu_s()
            pings: list[float] = []
            beats: list[float] = []
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                pings.append(_round_trip(tenant, Ping()))
                beats.append(_round_trip(worker, Beat(progress=len(beats), phase="working", busy_s=0.0)))
                time.sleep(_PAUSE_S)
            busy = (master.cpu_s() - cpu) / seconds
            context.destroy(linger=0)
        finally:
            for part in crowd:
                part.stop()
    return [
        {
            "table": "Heartbeats of a real master",
            "heartbeat": name,
            "waiting clients": waiting,
            "p50 ms": round(1000 * _report.percentile(took, 0.5), 2),
            "p99 ms": round(1000 * _report.percentile(took, 0.99), 2),
            "p50 at most 2 ms": 1000 * _report.percentile(took, 0.5) <= target_ms,
            "round trips": len(took),
            "master's CPU": f"{100 * busy:.0f} %",
        }
        for name, took in (("tenant's ping", pings), ("worker's beat", beats))
    ]


class _Crowd:
    """A process with many connections, each of which waits for actions."""

    def __init__(self, master: Master, count: int) -> None:
        self._here, there = mp.Pipe()
        self._process = mp.get_context("spawn").Process(
            target=_wait, args=(master.keyring.cluster_file("bench"), count, there)
        )
        self._process.start()

    def settled(self) -> None:
        """Return once all its requests have been sent."""
        assert self._here.poll(_CONNECT_S), "the clients did not get connected"
        self._here.recv()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def _wait(cluster_file: Path, count: int, there: Connection) -> None:
    context: zmq.Context[Socket] = zmq.Context()
    act = Act(
        policy="waiting",
        state=Array(dtype="<f4", shape=(1, 7), frame=0),
        images=(),
        instructions=("go",),
    )
    sockets = [_dial(context, cluster_file) for _ in range(count)]
    for socket in sockets:
        socket.send_multipart(encode(act, id="a", deadline_ms=3_600_000, buffers=(bytes(28),)))
    time.sleep(1.0)  # what is wrong with a request is answered at once
    for socket in sockets:
        assert not socket.poll(0), socket.recv_multipart()
    there.send(count)
    there.recv()  # until it is killed


def _dial(context: zmq.Context[Socket], cluster_file: Path) -> Socket:
    cluster = ClusterFile.load(cluster_file)
    socket = dial(context, cluster.control, cluster.server_public, cluster.keys())
    assert socket.poll(int(1000 * _CONNECT_S), zmq.POLLOUT), "no connection to the master"
    return socket


def _round_trip(socket: Socket, message: Message) -> float:
    started = time.perf_counter()
    socket.send_multipart(encode(message, id="h"))
    _, header, *_ = socket.recv_multipart()
    took = time.perf_counter() - started
    assert _header.decode(header).kind in ("pong", "beat_ack", "registered"), header
    return took
