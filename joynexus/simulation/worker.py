"""A worker process: hosts the environments of some rows and does what its pool asks, until the pipe closes.

In: requests over one pipe. Out: replies over the same pipe. Never: a read from the terminal, or an exception that ends
the other rows of the process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

from joynexus.simulation.interface import Simulator, SimulatorError, SimulatorOptions
from joynexus.simulation.protocol import (
    Made,
    MakeFailed,
    Outcome,
    Outcomes,
    Reply,
    Reset,
    Step,
    decode_request,
    encode,
    pack_observation,
    pack_result,
    unpack_float32,
)

MakeSimulator = Callable[[str, SimulatorOptions], Simulator]


def main(pipe: Connection, make: MakeSimulator) -> None:
    """Serve one pool; returns when it closes the pipe.

    Args:
        pipe: to the pool; its first request is `Make`.
        make: makes a simulator by task name.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which closes the pipe
    _close_stdin()
    simulators: dict[int, Simulator] = {}
    try:
        while True:
            request = decode_request(pipe.recv_bytes())
            reply: Reply
            if isinstance(request, Reset):
                seeds, draw = request.seeds, request.render
                reply = Outcomes({row: _reset(simulators[row], seed, draw) for row, seed in seeds.items()})
            elif isinstance(request, Step):
                reply = Outcomes({row: _step(simulators[row], request, row) for row in request.actions})
            else:
                try:
                    simulators = {row: make(request.task, request.options) for row in range(request.rows)}
                    reply = Made(simulators[0].contract, simulators[0].instruction)
                except (SimulatorError, ValueError) as error:
                    reply = MakeFailed(str(error), wrong=isinstance(error, ValueError))
                except Exception as error:  # whatever its packages raise is a reason, and no end of this process
                    reply = MakeFailed(f"{type(error).__name__}: {error}")
            pipe.send_bytes(encode(reply))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        for simulator in simulators.values():
            simulator.close()


def _close_stdin() -> None:
    """Let whoever reads from the terminal find its end: simulators ask there whether to download what they miss."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _reset(simulator: Simulator, seed: int, render: bool) -> Outcome:
    try:
        return pack_observation(simulator.reset(seed, render=render))
    except Exception as error:  # whatever a simulator raises costs its own row this episode, no other row anything
        return Outcome(failed=f"{type(error).__name__}: {error}")


def _step(simulator: Simulator, request: Step, row: int) -> Outcome:
    try:
        actions = unpack_float32(request.actions[row])
        record = row in request.record
        return pack_result(simulator.step_chunk(actions, render=request.render, final=request.final, record=record))
    except Exception as error:  # as above
        return Outcome(failed=f"{type(error).__name__}: {error}")
