"""A network that can be made slow, narrow, silent or broken, between two ends that speak TCP.

In: the address of who listens. Out: an address to dial instead; `faults`, which may be changed at any moment from any
thread. Never: a byte lost, altered or read: as with real TCP, what a silent network swallowed comes when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from dataclasses import dataclass
from types import TracebackType

_READ = 65_536
_LOOK_S = 0.01
"""How often it is looked whether a silent network is back."""


@dataclass
class Faults:
    """What is wrong with the network, in both directions.

    Attributes:
        latency_s: every byte is so much later.
        bandwidth: bytes a second of each connection and direction; 0: as many as there are.
        slice_bytes: at most so many bytes go on at once; 0: as they come.
        blackhole: nothing goes through, not even the end of a connection; new ones are taken and hear nothing.
    """

    latency_s: float = 0.0
    bandwidth: float = 0.0
    slice_bytes: int = 0
    blackhole: bool = False


class Proxy:
    """Carries connections to one upstream, in a thread of its own. Use it with `with`."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.removeprefix("tcp://").rpartition(":")
        self._upstream = host, int(port)
        self.faults = Faults()
        self.heard = 0
        self.carried = 0
        """Bytes that came in, and of these those that went on, both ways."""
        self.hung_up = 0
        """How often an end hung up."""
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._writers) // 2

    def reset(self) -> None:
        """Break every connection at once, as a router that was restarted does."""
        self._loop.call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        for writer in list(self._writers):
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST instead of FIN
            writer.transport.abort()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._connected, sock=self._server))
        self._loop.run_forever()
        server.close()
        self._abort()
        while tasks := asyncio.all_tasks(self._loop):  # again: whoever was accepted meanwhile has begun one
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # the proxy ends
            await self._carry(reader, writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._audible()
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, up_writer}
        self._writers |= ends
        try:
            await asyncio.gather(self._pump(reader, up_writer), self._pump(up_reader, writer))
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _audible(self) -> None:
        while self.faults.blackhole:
            await asyncio.sleep(_LOOK_S)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one direction: one task takes in, the other hands on when it is time."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

        async def take() -> None:
            data = b"-"
            while data:
                try:
                    data = await reader.read(self.faults.slice_bytes or _READ)
                except OSError:
                    data = b""
                self.heard += len(data)
                self.hung_up += not data
                await queue.put((time.monotonic() + self.faults.latency_s, data))

        async def hand_on() -> None:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await self._audible()
                if not data:
                    writer.transport.abort()  # the other direction ends with it
                    return
                if self.faults.bandwidth:
                    await asyncio.sleep(len(data) / self.faults.bandwidth)
                writer.write(data)
                await writer.drain()
                self.carried += len(data)

        taking = asyncio.create_task(take())
        try:
            with contextlib.suppress(OSError):
                await hand_on()
        finally:
            taking.cancel()
