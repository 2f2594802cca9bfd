"""The asyncio twin: the same verbs under the same names; what waits is awaited.

In: calls on an event loop. Out: coroutines, and futures for ops. Never: a blocked event loop, or an op that is lost or
done twice because nobody waits for it any more: cancelling an await ends the waiting, and the op goes on.
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import AsyncIterator, Coroutine, Generator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from joynexus.client._client import ClientVerbs, dial, greet
from joynexus.client._datasets import DatasetVerbs
from joynexus.client._flow import Flow, answered, awaiting, follow
from joynexus.client._io import Connection, answer_of
from joynexus.client._jobs import JobVerbs, Result
from joynexus.client._packing import Batch
from joynexus.client._policy import Order, PolicyVerbs
from joynexus.keys import ClusterFile
from joynexus.specs import PolicySpec
from joynexus.wire.front import JobInfo, OpResult, Welcome


def connect_async(config: str | Path | ClusterFile | None = None, *, timeout_s: float = 5.0) -> Connecting:
    """Connect to a cluster: `async with connect_async() as client:`, or `client = await connect_async()`.

    Arguments and errors are those of `connect`.
    """
    return Connecting(config, timeout_s)


class Connecting:
    """A connection on its way: await it, or enter it."""

    def __init__(self, config: str | Path | ClusterFile | None, timeout_s: float) -> None:
        self._config, self._timeout_s = config, timeout_s
        self._client: AsyncClient | None = None

    def __await__(self) -> Generator[Any, None, AsyncClient]:
        return self._connect().__await__()

    async def __aenter__(self) -> AsyncClient:
        self._client = await self
        return self._client

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.close()

    async def _connect(self) -> AsyncClient:
        connection = dial(self._config)
        try:
            return AsyncClient(connection, await follow(greet(connection, self._timeout_s)))
        except BaseException:
            await asyncio.to_thread(connection.close)
            raise


class AsyncPolicy(PolicyVerbs["asyncio.Future[OpResult]"]):
    """A handle on one policy; made by `AsyncClient.policy` and `AsyncClient.create_policy`.

    Ops are plain calls that return a future at once, and are applied in the order of the calls, whatever is awaited
    when, also where an earlier one uploads its samples first. Cancelling such a future does not call the op back.
    """

    info = awaiting(PolicyVerbs._info)
    release = awaiting(PolicyVerbs._release)
    act = awaiting(PolicyVerbs._act)
    version = awaiting(PolicyVerbs._version)
    delete_version = awaiting(PolicyVerbs._delete_version)
    export = awaiting(PolicyVerbs._export)

    _turn: Future[None] | None = None
    """Done when the newest op has been handed to the connection."""

    async def __aenter__(self) -> AsyncPolicy:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    @property
    def spec(self) -> Coroutine[Any, Any, PolicySpec]:
        """The policy's spec, contract included, to be awaited; it never changes."""
        return follow(self._spec())

    def _before_release(self) -> Flow[None]:
        """Ops that were called before count as under way, also those that are still being prepared."""
        if self._turn is not None:
            yield from answered(self._turn)

    def _order(self, prepare: Flow[Order]) -> asyncio.Future[OpResult]:
        before, self._turn = self._turn, Future()
        self._turn.set_running_or_notify_cancel()  # whoever stops waiting for a turn does not take it away
        return asyncio.shield(_keep(asyncio.ensure_future(self._in_turn(prepare, before, self._turn))))

    async def _in_turn(self, prepare: Flow[Order], before: Future[None] | None, turn: Future[None]) -> OpResult:
        try:
            try:
                message, buffers = await follow(prepare)
            finally:
                if before is not None:
                    await asyncio.wrap_future(before)
            result = self._connection.op(self.name, message, answer_of(OpResult), buffers=buffers)
        finally:
            turn.set_result(None)
        return await asyncio.wrap_future(result)

    def _own(self, batch: Batch) -> Batch:
        return batch.copy()


class AsyncJob(JobVerbs):
    """A handle on one job; made by `AsyncClient.submit` and `AsyncClient.job`."""

    info = awaiting(JobVerbs._info)
    cancel = awaiting(JobVerbs._cancel)
    resume = awaiting(JobVerbs._resume)
    wait = awaiting(JobVerbs._wait)
    save_videos = awaiting(JobVerbs._save_videos)

    @property
    def result(self) -> Coroutine[Any, Any, Result]:
        """What the job found, to be awaited: an evaluation's result, or the version that training published.

        Waits for the job; errors as for `wait`.
        """
        return follow(self._result())

    async def progress(self) -> AsyncIterator[JobInfo]:
        """Give every new state, until the job has ended or is parked; raises nothing if it failed."""
        info: JobInfo | None = None
        while (info := await follow(self._next(info))) is not None:
            yield info


class AsyncDatasets(DatasetVerbs):
    """The tenant's data sets: `client.datasets`."""

    push = awaiting(DatasetVerbs._push)
    wait = awaiting(DatasetVerbs._wait)
    get = awaiting(DatasetVerbs._get)
    check = awaiting(DatasetVerbs._check)
    delete = awaiting(DatasetVerbs._delete)
    list = awaiting(DatasetVerbs._list)
    manifest = awaiting(DatasetVerbs._manifest)


class AsyncClient(ClientVerbs[AsyncPolicy, AsyncJob]):
    """A connection to a cluster, as one tenant. Made by `connect_async`; for one event loop.

    Cancelling an await ends the waiting, not what was asked for: a job that was submitted may have been started (give
    `submit` a `key` to find it again).

    Attributes:
        datasets: the tenant's data sets.
    """

    datasets: AsyncDatasets

    create_policy = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._create_policy)
    policies = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._policies)
    delete_policy = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._delete_policy)
    move_policy = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._move_policy)
    drain_worker = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._drain_worker)
    cancel_jobs_of = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._cancel_jobs_of)
    begin_backup = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._begin_backup)
    end_backup = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._end_backup)
    submit = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._submit)
    sft = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._sft)
    rl = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._rl)
    pipeline = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._pipeline)
    evaluate = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._evaluate)
    evaluate_dataset = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._evaluate_dataset)
    job = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._job)
    jobs = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._jobs)
    status = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._status)
    open_dashboard = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._open_dashboard)
    usage = awaiting(ClientVerbs[AsyncPolicy, AsyncJob]._usage)

    def __init__(self, connection: Connection, welcome: Welcome, *, timeout_s: float = 30.0) -> None:
        super().__init__(connection, welcome, timeout_s=timeout_s)
        self.datasets = AsyncDatasets(connection, timeout_s=timeout_s)
        atexit.register(connection.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Give leases back where no op is under way, and close the connection. Jobs go on."""
        atexit.unregister(self._connection.close)
        try:
            await follow(self._leave())
        finally:
            await asyncio.to_thread(self._connection.close)

    def _handle(self, name: str) -> AsyncPolicy:
        return AsyncPolicy(self._connection, name, inline_bytes=self.welcome.inline_bytes, timeout_s=self._timeout_s)

    def _job_of(self, info: JobInfo) -> AsyncJob:
        return AsyncJob(self._connection, info, timeout_s=self._timeout_s)


_under_way: set[asyncio.Task[OpResult]] = set()
"""The event loop itself holds tasks only weakly."""


def _keep(task: asyncio.Task[OpResult]) -> asyncio.Task[OpResult]:
    _under_way.add(task)
    task.add_done_callback(_under_way.discard)
    return task
