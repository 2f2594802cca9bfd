"""The env service's shell: two lanes of work, and the connection to the master.

In: settings. Out: a process that prepares data sets, draws batches and runs episodes until it is told to end. Never:
torch, a simulator in this process (each runs in a worker process with deadlines), or an answer to work that the master
gave to somebody else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from common.runtime import WorkerRuntime
from common.scratch import open_scratch
from common.settings import EnvSettings
from common.telemetry import get_logger
from joynexus.simulation.asking import Asker
from joynexus.simulation.pool import Deadlines
from joynexus.wire import Buffer, ErrorCode, Failure, JoyNexusError, Message, Packet, failure
from joynexus.wire.back import (
    ActionsEvaluated,
    DatasetPrepared,
    DescribeSimulator,
    EvaluateActions,
    IndicesDrawn,
    PrepareDataset,
    Register,
    Rollout,
    RolloutDone,
    SampleIndices,
    SimulatorDescribed,
    WorkerAct,
)
from services.env import confinement
from services.env.data_work import DataWork, find_mounted
from services.env.rollout_work import RolloutWork
from services.env.simulators.registry import FAMILIES, prepare_process, survey
from services.env.warm_pools import WarmPools

log = get_logger(__name__)

DATA_CREDIT = 2
"""Pieces of work of the data lane at once."""
DATA_S = 900.0
"""Preparing a data set must advance (an episode, a file) within this."""

Task = Rollout | DescribeSimulator | PrepareDataset | SampleIndices | EvaluateActions
Answer = RolloutDone | SimulatorDescribed | DatasetPrepared | IndicesDrawn | ActionsEvaluated


class NoLongerWanted(Exception):  # noqa: N818 - not an error: the way out of a task that was cancelled
    """The master does not want a task's answer any more."""


def longest_silence_s(deadlines: Deadlines) -> float:
    """Return for how many seconds a rollout may show no progress.

    It advances with each round of resets, questions and chunks, in which processes that were lost are made anew: a
    simulator that hangs costs its episodes, not this process.
    """
    return 2 * deadlines.make_s + deadlines.reset_s + deadlines.step_s + 60.0


def run(settings: EnvSettings) -> None:
    """Serve until told to end."""
    prepare_process()
    families = survey()
    simulators = [name for name, problem in families.items() if not problem]
    mounted = find_mounted(settings.datasets_dir)
    detail = {"mounted": str(len(mounted)), "simulators": ", ".join(simulators) or "none"}
    for name, problem in families.items():
        made_of = ", ".join(f"{package} {version}" for package, version in FAMILIES[name].software().items())
        detail[name] = problem or "; ".join(filter(None, (made_of, FAMILIES[name].pictures_missing())))
    deadlines = Deadlines(make_s=settings.make_s, step_s=settings.step_s)
    pools = WarmPools(settings.simulator_processes, deadlines)
    scratch = open_scratch(settings.cache_dir / "scratch" / "env")
    if unconfined := confinement.missing():
        log.warning("readers_unconfined", why=unconfined)
    with (
        WorkerRuntime(settings) as runtime,
        ThreadPoolExecutor(settings.simulator_processes, "simulator") as simulator_lane,
        ThreadPoolExecutor(DATA_CREDIT, "data") as data_lane,
    ):
        progress = runtime.progress

        def alive(task: str) -> None:
            progress.advance()
            if runtime.cancelled(task):
                raise NoLongerWanted(task)

        data = DataWork(
            runtime.blobs,
            scratch,
            mounted,
            progress.advance,
            child_busy=progress.add_busy,
            reader_bytes=settings.reader_bytes,
        )
        rollouts = RolloutWork(pools, runtime.blobs, scratch, alive=alive, child_busy=progress.add_busy)
        rollout_s = longest_silence_s(deadlines)

        def asker(message: Rollout | EvaluateActions) -> Asker:
            def request(act: bytes, buffers: Sequence[Buffer], *, timeout_s: float) -> Packet:
                question = WorkerAct(task=message.task, attempt=message.attempt, act=act)
                return runtime.request(question, buffers, timeout_s=timeout_s)

            explore = isinstance(message, Rollout) and message.collect is not None
            return Asker(request, lambda: alive(message.task), message.policy, explore=explore)

        def do(message: Task) -> Answer:
            match message:
                case Rollout():
                    return rollouts.run(message, asker(message))
                case DescribeSimulator():
                    return rollouts.describe(message)
                case PrepareDataset():
                    return data.prepare(message)
                case SampleIndices():
                    return data.draw(message)
                case EvaluateActions():
                    return data.compare(message, asker(message))

        def finish(message: Task, deadline_s: float) -> None:
            started = time.monotonic()
            with progress.phase("working", deadline_s=deadline_s) as busy_s:
                answer = answer_of(message, do, busy_s)
            answer = deliver(message, answer, runtime.send)
            _note(runtime, message, answer, time.monotonic() - started)

        def work(packet: Packet) -> None:
            message = packet.message
            if isinstance(message, Rollout | DescribeSimulator):
                simulator_lane.submit(finish, message, rollout_s)
            elif isinstance(message, PrepareDataset | SampleIndices | EvaluateActions):
                data_lane.submit(finish, message, DATA_S)
            else:
                log.warning("unexpected_work", kind=packet.header.kind)

        def drain() -> None:
            simulator_lane.shutdown()
            data_lane.shutdown()
            pools.close()

        runtime.register(
            Register(
                role="env",
                incarnation=runtime.incarnation,
                pid=os.getpid(),
                credit={"simulator": settings.simulator_processes, "data": DATA_CREDIT},
                serves=(*simulators, "datasets", "sampler"),
                mounted=tuple(mounted),
                detail=detail,
            )
        )
        log.info("ready", **detail)
        runtime.serve(work, drain=drain)


def answer_of(message: Task, do: Callable[[Task], Answer], busy_s: Callable[[], float]) -> Answer:
    """Do a task and return its answer, also if it failed or nobody waits for it any more: with what it took."""
    return msgspec.structs.replace(_answer_of(message, do), busy_s=busy_s())


def _answer_of(message: Task, do: Callable[[Task], Answer]) -> Answer:
    try:
        return do(message)
    except NoLongerWanted:
        return _failed(message, failure(ErrorCode.STALE, "nobody wants this any more"))
    except JoyNexusError as error:
        return _failed(message, error.failure)
    except Exception:  # a fault of ours in one task: it is logged and answered, the other tasks go on
        log.exception("task_failed", kind=type(message).__name__, task=message.task, tenant=message.tenant)
        sentence = f"the env service failed at this: see its log under task {message.task}"
        return _failed(message, failure(ErrorCode.INTERNAL, sentence))


def deliver(message: Task, answer: Answer, send: Callable[[Message], object]) -> Answer:
    """Send an answer, or that it does not fit into a message, so that nobody waits for ever; return what was sent."""
    try:
        send(answer)
    except ValueError as error:
        large = failure(ErrorCode.TOO_LARGE, f"the result is too large ({error}): split the work")
        answer = msgspec.structs.replace(_failed(message, large), busy_s=answer.busy_s)
        send(answer)
    return answer


def _failed(message: Task, error: Failure) -> Answer:
    task, attempt = message.task, message.attempt
    match message:
        case Rollout():
            return RolloutDone(task=task, attempt=attempt, error=error)
        case DescribeSimulator():
            return SimulatorDescribed(task=task, attempt=attempt, error=error)
        case SampleIndices():
            return IndicesDrawn(task=task, attempt=attempt, error=error)
        case EvaluateActions():
            return ActionsEvaluated(task=task, attempt=attempt, error=error)
        case PrepareDataset():
            return DatasetPrepared(task=task, attempt=attempt, error=error)


def _note(runtime: WorkerRuntime, message: Task, answer: Answer, seconds: float) -> None:
    """One line a task."""
    error = answer.error
    runtime.note(
        log,
        type(message).__name__,
        outcome="ok" if error is None else "dropped" if error.code is ErrorCode.STALE else error.code,
        seconds=seconds,
        trace=message.trace,
        task=message.task,
        attempt=message.attempt,
        tenant=message.tenant,
        busy_s=round(answer.busy_s, 3),
    )
    if isinstance(answer, RolloutDone):
        for episode in answer.episodes:
            runtime.figures.add("joynexus_episodes_total", "success" if episode.success else "failure")
