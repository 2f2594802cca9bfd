"""The least that a broker could do, to compare with: frames in, frames out, CURVE on both hops, no decode, no journal.

In: clients that send what JoyNexus's clients send. Out: the same figures. Never: anything that a service needs
(tenants, scopes, limits, versions, metering, order, retries).
"""

from __future__ import annotations

import multiprocessing as mp
import time
from multiprocessing.synchronize import Barrier
from typing import Any

import zmq

from benchmarks._cluster import ACTION, CHUNK, SIDE, STATE

B, T_S = 8, 0.010
_REQUEST = [b"magic", b"h" * 60, b"b" * 200, bytes(4 * STATE), bytes(3 * SIDE * SIDE), bytes(3 * SIDE * SIDE)]
_ANSWER = [b"magic", b"h" * 60, b"b" * 60, bytes(4 * CHUNK * ACTION)]

Keys = tuple[bytes, bytes]


def relay(keys: Keys, addresses: Any) -> None:
    """Pass frames between two ROUTERs until killed; the worker's first message says who it is."""
    context = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    for router in (front, back):
        router.curve_server, router.curve_secretkey = True, keys[1]
        router.bind("tcp://127.0.0.1:*")
    addresses.put((front.getsockopt(zmq.LAST_ENDPOINT), back.getsockopt(zmq.LAST_ENDPOINT)))
    worker, *_ = back.recv_multipart()
    poller = zmq.Poller()
    poller.register(front, zmq.POLLIN)
    poller.register(back, zmq.POLLIN)
    while True:
        for router, _ in poller.poll():
            frames = router.recv_multipart(copy=False)
            if router is front:
                back.send_multipart([worker, *frames], copy=False)
            else:
                front.send_multipart(frames[1:], copy=False)


def infer(address: bytes, keys: Keys, device_s: float, clients: int) -> None:
    """Answer groups of all clients (at most B; T after the first at the latest) until killed."""
    socket = _dial(address, keys)
    socket.send(b"here")
    while True:
        group = [socket.recv_multipart(copy=False)]
        deadline = time.perf_counter() + T_S
        while len(group) < min(B, clients) and socket.poll(max(0, int(1000 * (deadline - time.perf_counter())))):
            group.append(socket.recv_multipart(copy=False))
        time.sleep(device_s)
        for asker, *_ in group:
            socket.send_multipart([asker, *_ANSWER])


def act(address: bytes, keys: Keys, warm_up: int, requests: int, barrier: Barrier, results: Any) -> None:
    """Ask, one request after the other; report each request's seconds."""
    socket = _dial(address, keys)
    seconds = []
    for index in range(warm_up + requests):
        if index == warm_up:
            barrier.wait()
        start = time.perf_counter()
        socket.send_multipart(_REQUEST)
        socket.recv_multipart()
        seconds.append(time.perf_counter() - start)
    barrier.wait()
    results.put(seconds[warm_up:])


def run(clients: int, device_s: float, warm_up: int, requests: int) -> tuple[list[float], float]:
    """Return each request's seconds, and requests a second."""
    keys, addresses, results, barrier = zmq.curve_keypair(), mp.Queue(), mp.Queue(), mp.Barrier(clients + 1)
    broker = mp.Process(target=relay, args=(keys, addresses), daemon=True)
    broker.start()
    front, back = addresses.get(timeout=30)
    worker = mp.Process(target=infer, args=(back, keys, device_s, clients), daemon=True)
    worker.start()
    askers = [
        mp.Process(target=act, args=(front, keys, warm_up, requests, barrier, results), daemon=True)
        for _ in range(clients)
    ]
    for asker in askers:
        asker.start()
    barrier.wait(60)
    start = time.perf_counter()
    barrier.wait(120)
    wall = time.perf_counter() - start
    seconds = [second for _ in askers for second in results.get()]
    for process in (broker, worker, *askers):
        process.kill()
        process.join()
    return seconds, len(seconds) / wall


def _dial(address: bytes, keys: Keys) -> Any:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.curve_serverkey = keys[0]
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(address.decode())
    return socket
