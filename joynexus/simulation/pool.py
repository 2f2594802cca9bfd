"""A pool of worker processes that run environments in lockstep, and outlive any one of them.

In: seeds and actions by row (a row is one environment, in one of the processes). Out: observations and results by row,
or `Lost` where an environment crashed, hung or failed. Never: a call that waits longer than its deadline, a row that
suffers from a row of another process, or a process that outlives the pool or its parent.

Whoever drives the pool does a lost episode again from its seed: that gives the same episode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from joynexus.contract import Contract
from joynexus.simulation.interface import SimObservation, SimulatorError, SimulatorOptions, StepResult
from joynexus.simulation.process import DEAD, TIMEOUT, Recycling, WorkerProcess, receive
from joynexus.simulation.protocol import (
    Made,
    MakeFailed,
    Outcome,
    Outcomes,
    Reply,
    Request,
    Reset,
    Step,
    pack,
    unpack_observation,
    unpack_result,
)
from joynexus.simulation.worker import MakeSimulator

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
        make: makes a simulator in a worker process; a function of a module, which is imported there by name.
        preload: modules that are imported once for all worker processes.
        processes: number of worker processes, at most one a row; row r is in process r % processes.
        options: cameras and episode limit.
        deadlines: for each kind of call.
        recycling: when a process is replaced between episodes.

    Raises:
        ValueError: for a pool without rows or processes.
    """

    def __init__(
        self,
        task: str,
        rows: int,
        *,
        make: MakeSimulator,
        preload: Sequence[str] = (),
        processes: int = 1,
        options: SimulatorOptions | None = None,
        deadlines: Deadlines | None = None,
        recycling: Recycling | None = None,
    ) -> None:
        if rows < 1 or processes < 1:
            raise ValueError(f"a pool of {rows} rows in {processes} processes cannot run: both must be 1 or more")
        options, recycling = options or SimulatorOptions(), recycling or Recycling()
        deadlines = deadlines or Deadlines()
        count = min(processes, rows)
        shares = [len(range(first, rows, count)) for first in range(count)]
        hosts: list[WorkerProcess] = []
        try:
            for share in shares:
                host = WorkerProcess(task, options, share, make, preload, deadlines.make_s, recycling)
                hosts.append(host)
        except BaseException:
            _end(hosts)
            raise
        self._host(hosts, deadlines)

    def _host(self, processes: Sequence[WorkerProcess], deadlines: Deadlines) -> None:
        self._processes, self._deadlines = tuple(processes), deadlines
        most = max(process.rows for process in processes)
        self._places = [
            (process, local) for local in range(most) for process in self._processes if local < process.rows
        ]
        self.rows = len(self._places)

    @classmethod
    def joined(cls, pools: Sequence[SimulatorPool]) -> SimulatorPool:
        """Return one pool of all rows of some pools of one task, which still own their processes."""
        pool = cls.__new__(cls)
        pool._host([process for other in pools for process in other._processes], pools[0]._deadlines)
        return pool

    @property
    def contract(self) -> Contract:
        """The environments' contract; waits until they are made, and raises as `reset`."""
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
            ValueError: if the task cannot run with these options.
        """
        requests: dict[WorkerProcess, Request] = {}
        for process, rows in self._by_process(seeds).items():
            process.begin(list(rows))
            requests[process] = Reset({local: seeds[row] for local, row in rows.items()}, render)
        observations = self._call(requests, self._deadlines.reset_s, "reset", unpack_observation)
        for row, observation in observations.items():
            if isinstance(observation, Lost):
                self._end(row)
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
            SimulatorError, ValueError: as `reset`.
        """
        requests: dict[WorkerProcess, Request] = {}
        results: dict[int, StepResult | Lost] = {}
        for process, rows in self._by_process(actions).items():
            chunks = {}
            for local, row in rows.items():
                if local in process.busy:
                    chunks[local] = pack(np.asarray(actions[row], np.float32))
                else:
                    results[row] = Lost("has no episode: its process was replaced")
            if chunks:
                recorded = tuple(local for local in chunks if rows[local] in record)
                requests[process] = Step(chunks, render, final, recorded)
        results |= self._call(requests, self._deadlines.step_s, "step", unpack_result)
        for row, result in results.items():
            if isinstance(result, Lost) or result.done:
                self._end(row)
        return {row: results[row] for row in actions}

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(process.pid for process in self._processes)

    @property
    def make_s(self) -> float:
        """Seconds that making the environments took, as long as the slowest process; 0 until they are made."""
        return max(process.made_in_s for process in self._processes)

    def cpu_s(self) -> float:
        """CPU seconds that the worker processes used so far, those that were replaced too."""
        return sum(process.cpu_s() for process in self._processes)

    def close(self) -> None:
        """End all worker processes."""
        _end(self._processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _by_process(self, rows: Collection[int]) -> dict[WorkerProcess, dict[int, int]]:
        """Group rows by process: there, a process's own number of a row -> the row."""
        grouped: dict[WorkerProcess, dict[int, int]] = {}
        for row in sorted(rows):
            if not 0 <= row < self.rows:
                raise ValueError(f"row {row} is outside the pool, which has rows 0 to {self.rows - 1}")
            process, local = self._places[row]
            grouped.setdefault(process, {})[local] = row
        return grouped

    def _end(self, row: int) -> None:
        process, local = self._places[row]
        process.busy.discard(local)

    def _call(
        self, requests: dict[WorkerProcess, Request], deadline_s: float, what: str, unpack: Callable[[Outcome], _T]
    ) -> dict[int, _T | Lost]:
        """Send each process its request, wait for all replies together, replace the processes that do not reply."""
        self._finish_making(list(requests))
        for process, request in requests.items():
            process.send(request)
        outcomes: dict[tuple[WorkerProcess, int], _T | Lost] = {}
        replies = receive(list(requests), deadline_s)
        for process, request in requests.items():
            rows = request.seeds if isinstance(request, Reset) else request.actions if isinstance(request, Step) else ()
            reply = replies[process]
            if isinstance(reply, Outcomes) and reply.rows.keys() == set(rows):
                for local, outcome in reply.rows.items():
                    failed = Lost(f"failed to {what}: {outcome.failed}")
                    outcomes[process, local] = failed if outcome.failed else unpack(outcome)
                continue
            reason = f"took longer than {deadline_s:g} s to {what}" if reply is TIMEOUT else f"died in a {what}"
            outcomes |= {(process, local): Lost(reason) for local in rows}
            process.replace()
        return {row: outcomes[place] for row, place in enumerate(self._places) if place in outcomes}

    def _description(self) -> Made:
        first = self._processes[0]
        self._finish_making([first])
        assert first.made is not None, "whoever could not be made has raised"
        return first.made

    def _finish_making(self, processes: list[WorkerProcess]) -> None:
        making = [process for process in processes if process.made is None]
        if not making:
            return
        make_by = max(process.make_by for process in making)

        def collect(waiting: list[WorkerProcess]) -> dict[WorkerProcess, Reply | str]:
            replies = receive(waiting, max(0.0, make_by - time.monotonic()))
            for process, reply in replies.items():
                if isinstance(reply, Made):
                    process.is_made(reply)
            return replies

        replies = collect(making)
        died = [process for process, reply in replies.items() if reply == DEAD]
        for process in died:  # maybe with who forked it, which is no fault of its own: once more, in what time is left
            process.replace()
        replies |= {process: reply for process, reply in collect(died).items() if reply is not TIMEOUT}
        problem: Exception | None = None
        for process, reply in replies.items():
            if isinstance(reply, Made):
                continue
            if isinstance(reply, MakeFailed):
                reason = reply.reason
            elif reply is TIMEOUT:
                reason = f"it took longer than {self._deadlines.make_s:g} s: raise the deadline for making it"
            else:
                reason = "its process died: see its log, it may lack memory or a library"
            process.replace()
            wrong = isinstance(reply, MakeFailed) and reply.wrong
            problem = (
                ValueError(reason) if wrong else SimulatorError(f"simulator {process.task} cannot be made: {reason}")
            )
        if problem is not None:
            raise problem


def _end(processes: Sequence[WorkerProcess]) -> None:
    for process in processes:
        process.hang_up()
    for process in processes:
        process.kill(_CLOSE_S)
