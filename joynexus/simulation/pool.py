"""A pool of worker processes that run environments in lockstep, and outlive any one of them.

In: seeds and actions by row (a row is one environment; `row % processes` hosts it). Out: observations and results by
row, or `Lost` where an environment crashed, hung or failed. Never: a call that waits longer than its deadline, a row
that suffers from a row of another process, or a process that outlives the pool or its parent.

Whoever drives the pool does a lost episode again from its seed: that gives the same episode.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from joynexus.contract import Contract
from joynexus.simulation import worker
from joynexus.simulation.interface import SimObservation, SimulatorError, SimulatorOptions, StepResult
from joynexus.simulation.protocol import (
    Made,
    Make,
    MakeFailed,
    Outcome,
    Outcomes,
    Reply,
    Request,
    Reset,
    Step,
    decode_reply,
    encode,
    pack,
    unpack_observation,
    unpack_result,
)

_T = TypeVar("_T")
_CLOSE_S = 2.0


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that a worker process may take for each kind of call before it is killed."""

    make_s: float = 180.0
    reset_s: float = 60.0
    step_s: float = 60.0


class Lost(NamedTuple):
    """A row whose episode is gone; `reason` is a sentence's part such as "took longer than 60 s to step"."""

    reason: str


class SimulatorPool:
    """Environments of one task, by row; a context manager.

    Args:
        task: name such as `metaworld/reach-v3`.
        rows: number of environments.
        make: makes a simulator in a worker process; importable there.
        preload: modules that the fork server imports once for all worker processes.
        processes: number of worker processes, at most one a row.
        options: cameras and episode limit.
        deadlines: for each kind of call.
        recycle_after: episodes after which a process is replaced between episodes (simulators leak); 0 never.

    Raises:
        ValueError: for a pool without rows or processes.
    """

    def __init__(
        self,
        task: str,
        rows: int,
        *,
        make: worker.MakeSimulator,
        preload: Sequence[str] = (),
        processes: int = 1,
        options: SimulatorOptions | None = None,
        deadlines: Deadlines | None = None,
        recycle_after: int = 0,
    ) -> None:
        if rows < 1 or processes < 1:
            raise ValueError(f"a pool of {rows} rows in {processes} processes cannot run: both must be 1 or more")
        options = options or SimulatorOptions()
        self.rows = rows
        self._deadlines = deadlines or Deadlines()
        self._recycle_after = recycle_after
        self._made: Made | None = None
        count = min(processes, rows)
        self._hosts = [
            _Host(Make(task, options, tuple(range(first, rows, count))), make, preload, self._deadlines.make_s)
            for first in range(count)
        ]

    @property
    def contract(self) -> Contract:
        """The environments' contract; waits until they are made, and raises SimulatorError if they cannot be."""
        return self._description().contract

    @property
    def instruction(self) -> str:
        """Their task text; as `contract`."""
        return self._description().instruction

    def reset(self, seeds: Mapping[int, int], *, render: bool = True) -> dict[int, SimObservation | Lost]:
        """Begin episodes.

        Args:
            seeds: seed by row.
            render: draw pictures.

        Raises:
            SimulatorError: if the simulator cannot be made on this machine.
        """
        requests: dict[_Host, Request] = {}
        for host, rows in self._by_host(seeds).items():
            idle = host.busy <= set(rows)
            if self._recycle_after and host.episodes >= self._recycle_after and idle:
                host.replace()
            host.episodes += len(rows)
            host.busy.update(rows)
            requests[host] = Reset({row: seeds[row] for row in rows}, render)
        observations = self._call(requests, self._deadlines.reset_s, "reset", unpack_observation)
        for row, observation in observations.items():
            if isinstance(observation, Lost):
                self._hosts[row % len(self._hosts)].busy.discard(row)
        return {row: observations[row] for row in seeds}

    def step(
        self,
        actions: Mapping[int, npt.NDArray[np.float32]],
        *,
        render: bool = True,
        final: bool = False,
        record: Collection[int] = (),
    ) -> dict[int, StepResult | Lost]:
        """Execute a chunk in each row, [k, A] float32; the rows in `record` draw every step, `final` as in `Simulator`.

        A row that was lost has no episode until it is reset.

        Raises:
            SimulatorError: if the simulator cannot be made on this machine.
        """
        requests: dict[_Host, Request] = {}
        results: dict[int, StepResult | Lost] = {}
        for host, rows in self._by_host(actions).items():
            results |= {row: Lost("has no episode: its process was replaced") for row in rows if row not in host.busy}
            chunks = {row: pack(np.asarray(actions[row], np.float32)) for row in rows if row in host.busy}
            if chunks:
                requests[host] = Step(chunks, render, final, tuple(row for row in chunks if row in record))
        results |= self._call(requests, self._deadlines.step_s, "step", unpack_result)
        for row, result in results.items():
            if isinstance(result, Lost) or result.done:
                self._hosts[row % len(self._hosts)].busy.discard(row)
        return {row: results[row] for row in actions}

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(host.pid for host in self._hosts)

    def cpu_s(self) -> float:
        """CPU seconds that the worker processes used so far, those that were replaced too."""
        return sum(host.cpu_s() for host in self._hosts)

    def close(self) -> None:
        """End all worker processes."""
        for host in self._hosts:
            host.hang_up()
        for host in self._hosts:
            host.kill(_CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _by_host(self, rows: Collection[int]) -> dict[_Host, list[int]]:
        grouped: dict[_Host, list[int]] = {}
        for row in sorted(rows):
            if not 0 <= row < self.rows:
                raise ValueError(f"row {row} is outside the pool, which has rows 0 to {self.rows - 1}")
            grouped.setdefault(self._hosts[row % len(self._hosts)], []).append(row)
        return grouped

    def _call(
        self, requests: dict[_Host, Request], deadline_s: float, what: str, unpack: Callable[[Outcome], _T]
    ) -> dict[int, _T | Lost]:
        """Send each host its request, wait for all replies together, replace the hosts that do not reply."""
        self._finish_making(list(requests))
        for host, request in requests.items():
            host.send(request)
        results: dict[int, _T | Lost] = {}
        replies = _receive(list(requests), deadline_s)
        for host, request in requests.items():
            rows = request.seeds if isinstance(request, Reset) else request.actions if isinstance(request, Step) else ()
            reply = replies[host]
            if isinstance(reply, Outcomes) and reply.rows.keys() == set(rows):
                for row, outcome in reply.rows.items():
                    results[row] = Lost(f"failed to {what}: {outcome.failed}") if outcome.failed else unpack(outcome)
                continue
            reason = f"took longer than {deadline_s:g} s to {what}" if reply is _TIMEOUT else f"died in a {what}"
            results |= dict.fromkeys(rows, Lost(reason))
            host.replace()
        return results

    def _description(self) -> Made:
        if self._made is None:
            self._finish_making(self._hosts[:1])
        assert self._made is not None, "whoever could not be made has raised"
        return self._made

    def _finish_making(self, hosts: list[_Host]) -> None:
        making = [host for host in hosts if not host.made]
        if not making:
            return
        left_s = max(host.make_by for host in making) - time.monotonic()
        for host, reply in _receive(making, max(0.0, left_s)).items():
            if isinstance(reply, Made):
                host.made, self._made = True, reply
                continue
            if isinstance(reply, MakeFailed):
                reason = reply.reason
            elif reply is _TIMEOUT:
                reason = f"it took longer than {self._deadlines.make_s:g} s: raise the deadline for making it"
            else:
                reason = "its process died: see its log, it may lack memory or a library"
            host.replace()
            raise SimulatorError(f"simulator {host.task} cannot be made: {reason}")


_TIMEOUT = "timeout"
_DEAD = "dead"


def _receive(hosts: list[_Host], deadline_s: float) -> dict[_Host, Reply | str]:
    """Collect one reply from each host; `_TIMEOUT` or `_DEAD` where none came."""
    replies: dict[_Host, Reply | str] = dict.fromkeys(hosts, _TIMEOUT)
    waiting = {host.pipe: host for host in hosts}
    until = time.monotonic() + deadline_s
    while waiting:
        ready = wait(list(waiting), max(0.0, until - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            host = waiting.pop(pipe)
            try:
                replies[host] = decode_reply(pipe.recv_bytes())
            except (EOFError, OSError, msgspec.MsgspecError):
                replies[host] = _DEAD
    return replies


class _Host:
    """One worker process and what the pool knows of it; replaced in place."""

    def __init__(self, make: Make, make_simulator: worker.MakeSimulator, preload: Sequence[str], make_s: float) -> None:
        self._make, self._make_simulator, self._make_s = make, make_simulator, make_s
        self._preload = preload
        self.task = make.task
        self._ended_cpu_s = 0.0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([worker.__name__, *self._preload])
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=worker.main, args=(theirs, self._make_simulator), daemon=True)
        self._process.start()
        theirs.close()
        self.made = False
        self.make_by = time.monotonic() + self._make_s
        self.episodes = 0
        self.busy: set[int] = set()
        self.send(self._make)

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def send(self, request: Request) -> None:
        with suppress(OSError):  # it died: the missing reply says so
            self.pipe.send_bytes(encode(request))

    def hang_up(self) -> None:
        self.pipe.close()

    def cpu_s(self) -> float:
        return self._ended_cpu_s + _cpu_s(self.pid)

    def kill(self, patience_s: float = 0.0) -> None:
        self._ended_cpu_s += _cpu_s(self.pid)
        self._process.join(patience_s)
        if self._process.is_alive():
            os.kill(self.pid, signal.SIGKILL)
        self._process.join()
        self._process.close()

    def replace(self) -> None:
        """Kill the process and start another, which makes its environments while others work."""
        self.hang_up()
        self.kill()
        self._start()


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process (Linux), 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
