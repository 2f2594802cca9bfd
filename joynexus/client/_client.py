"""The tenant's side of a cluster: connect, and what one can do then.

In: where the cluster is (a cluster file). Out: policies, data sets, jobs. Never: torch; a GPU; a path of the service.
"""

from __future__ import annotations

import atexit
import contextlib
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import msgspec

import joynexus
from joynexus.client._datasets import Datasets, DatasetVerbs
from joynexus.client._flow import Flow, answered, blocking, run
from joynexus.client._io import Connection, answer_of, check_sendable
from joynexus.client._jobs import Job, JobVerbs
from joynexus.client._policy import Policy, PolicyVerbs
from joynexus.contract import Contract, Statistics
from joynexus.keys import ClusterFile
from joynexus.specs import (
    EvaluateDatasetSpec,
    EvaluateSpec,
    JobSpec,
    PipelineSpec,
    PolicySpec,
    RlSpec,
    SftSpec,
    StageSpec,
    check_name,
)
from joynexus.wire import JoyNexusError, Message
from joynexus.wire.front import (
    BackupBegin,
    BackupEnd,
    BackupTicket,
    CancelJobs,
    ClusterStatus,
    CreatePolicy,
    DashboardCode,
    DeletePolicy,
    Done,
    DrainWorker,
    GetJob,
    GetPolicy,
    GetUsage,
    Hello,
    JobInfo,
    JobList,
    ListJobs,
    ListPolicies,
    MovePolicy,
    OpenDashboard,
    PolicyInfo,
    PolicyList,
    Status,
    SubmitJob,
    UsageLine,
    UsageReport,
    Welcome,
)
from joynexus.wire.limits import PROTOCOL, PROTOCOL_MIN

M = TypeVar("M", bound=Message)
PolicyT = TypeVar("PolicyT", bound=PolicyVerbs[Any])
JobT = TypeVar("JobT", bound=JobVerbs)

MOVE_S = 600.0
"""How long a move may take: ops that were sent end first, then a checkpoint travels."""


def connect(config: str | Path | ClusterFile | None = None, *, timeout_s: float = 5.0) -> Client:
    """Connect to a cluster.

    Args:
        config: path of a `client.toml`, or its content; None takes `$JOYNEXUS_CONFIG`, `./.joynexus/client.toml` or
            `~/.joynexus/client.toml`.
        timeout_s: how long to wait for the first answer.

    Raises:
        ValueError: if no cluster is configured, or the file or key cannot be read.
        JoyNexusError: if nobody answers in time, or the key is refused.
    """
    connection = dial(config)
    try:
        return Client(connection, run(greet(connection, timeout_s)))
    except BaseException:
        connection.close()
        raise


def dial(config: str | Path | ClusterFile | None) -> Connection:
    """Open a connection; ValueError as for `connect`."""
    cluster = config if isinstance(config, ClusterFile) else ClusterFile.load(Path(config) if config else None)
    return Connection(cluster)


def greet(connection: Connection, timeout_s: float) -> Flow[Welcome]:
    """Say hello; JoyNexusError as for `connect`."""
    hello = Hello(protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL, client=f"joynexus-python/{joynexus.__version__}")
    asked = connection.ask(hello, answer_of(Welcome), patience_s=timeout_s, resend_s=0.5)
    return (yield from answered(asked))


class ClientVerbs(ABC, Generic[PolicyT, JobT]):
    """What can be done with a cluster, whether one waits or awaits.

    Attributes:
        welcome: who the key stands for, and the service's limits.
    """

    datasets: DatasetVerbs

    def __init__(self, connection: Connection, welcome: Welcome, *, timeout_s: float = 30.0) -> None:
        self.welcome = welcome
        self._connection = connection
        self._timeout_s = timeout_s
        self._handles: dict[str, PolicyT] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(tenant={self.tenant!r}, scope={self.welcome.scope!r})"

    @property
    def tenant(self) -> str:
        """The tenant that this key stands for."""
        return self.welcome.tenant

    def policy(self, name: str) -> PolicyT:
        """Return a handle on a policy; whether it exists shows when it is used."""
        if name not in self._handles:
            self._handles[name] = self._handle(name)
        return self._handles[name]

    @abstractmethod
    def _handle(self, name: str) -> PolicyT:
        """Make a handle on a policy."""

    @abstractmethod
    def _job_of(self, info: JobInfo) -> JobT:
        """Make a handle on a job."""

    def _leave(self) -> Flow[None]:
        """Give leases back where no op is under way."""
        for policy in list(self._handles.values()):  # others may make handles meanwhile
            # ValueError: closed already. Others: ops are under way, or nobody answers; the lease ends by itself.
            with contextlib.suppress(ValueError, JoyNexusError):
                yield from answered(self._connection.release(policy.name, patience_s=1.0))
        self._handles.clear()

    # Policies

    def _create_policy(
        self, /, name: str, spec: PolicySpec | None = None, *, dataset: str = "", **fields: Any
    ) -> Flow[PolicyT]:
        """Create a policy; the same again changes nothing.

        Args:
            name: name of the policy.
            spec: its spec; or give the spec's fields as keywords.
            dataset: take contract and statistics from this data set.
            **fields: fields of `PolicySpec`.

        Raises:
            ValueError: if a field is unknown or missing.
            JoyNexusError: if a policy of that name has another spec.
        """
        if spec is None:
            if dataset:
                manifest = yield from self.datasets._manifest(dataset)
                known: dict[str, Contract | Statistics] = {
                    "contract": manifest.contract,
                    "statistics": manifest.statistics,
                }
                fields = {**known, **fields}
            spec = _spec(PolicySpec, fields)
        yield from self._ask(CreatePolicy(policy=check_name("policy", name), spec=spec), PolicyInfo)
        return self.policy(name)

    def _policies(self) -> Flow[tuple[PolicyInfo, ...]]:
        """Describe all policies of the tenant."""
        return (yield from self._ask(ListPolicies(), PolicyList)).policies

    def _delete_policy(self, policy: str) -> Flow[None]:
        """Delete a policy with its versions and states; what it used stays in `usage`.

        Raises:
            JoyNexusError: `NOT_FOUND`; `CONFLICT` while a loop drives it or a job needs it.
        """
        found = yield from self._ask(GetPolicy(policy=policy), PolicyInfo)
        yield from self._ask(DeletePolicy(policy=found.policy), Done)

    def _move_policy(
        self, policy: str, trainer: str, *, tenant: str = "", timeout_s: float = MOVE_S
    ) -> Flow[PolicyInfo]:
        """Have a policy live on another trainer (operators only); nobody's numbers change.

        Args:
            policy: name of the policy.
            trainer: name as in `status`, e.g. `trainer-2`.
            tenant: whose policy; empty for the own tenant's.
            timeout_s: give up waiting (not the move) after this long.

        Returns:
            The policy, at its new home.
        """
        message = MovePolicy(policy=check_name("policy", policy), trainer=trainer, tenant=tenant)
        asked = self._connection.ask(message, answer_of(PolicyInfo), patience_s=timeout_s, resend_s=15.0)
        return (yield from answered(asked))

    # What only operators ask

    def _drain_worker(self, worker: str) -> Flow[None]:
        """Have a worker, named as in `status`, finish what it has and end; whoever supervises it starts it anew."""
        yield from self._ask(DrainWorker(worker=worker), Done)

    def _cancel_jobs_of(self, tenant: str) -> Flow[None]:
        """Cancel all jobs of a tenant that have not ended; what they published stays."""
        yield from self._ask(CancelJobs(tenant=check_name("tenant", tenant)), Done)

    def _begin_backup(self, ttl_s: float) -> Flow[str]:
        """Have no blob deleted for `ttl_s` seconds (1 to 3600), and return the ticket that ends that."""
        return (yield from self._ask(BackupBegin(ttl_s=ttl_s), BackupTicket)).ticket

    def _end_backup(self, ticket: str) -> Flow[None]:
        """Have blobs deleted again to which nothing refers."""
        yield from self._ask(BackupEnd(ticket=ticket), Done)

    # Jobs

    def _submit(self, spec: JobSpec, *, key: str = "") -> Flow[JobT]:
        """Start a job.

        Args:
            spec: what to do.
            key: the same key again returns the same job, also after this process died; empty makes a new one.

        Raises:
            JoyNexusError: if the service refuses the spec. A job whose policy somebody else drives waits.
        """
        message = SubmitJob(key=key or self._connection.new_key(), spec=spec)
        check_sendable(message)
        if not isinstance(spec, EvaluateSpec | EvaluateDatasetSpec) and spec.policy in self._handles:
            # Our own loop would be the driver that the job waits for. While its ops run it stays that, rightly.
            with contextlib.suppress(JoyNexusError):
                yield from self._handles[spec.policy]._release()
        info = yield from self._ask(message, JobInfo)
        return self._job_of(info)

    def _sft(self, /, **fields: Any) -> Flow[JobT]:
        """Start supervised fine-tuning; the fields are those of `SftSpec`."""
        return (yield from self._submit(_spec(SftSpec, fields)))

    def _rl(self, /, **fields: Any) -> Flow[JobT]:
        """Start reinforcement learning in a simulator; the fields are those of `RlSpec`."""
        return (yield from self._submit(_spec(RlSpec, fields)))

    def _pipeline(self, policy: str, *stages: StageSpec) -> Flow[JobT]:
        """Start several jobs on one policy, one after another."""
        return (yield from self._submit(PipelineSpec(policy=policy, stages=stages)))

    def _evaluate(self, /, **fields: Any) -> Flow[JobT]:
        """Start an evaluation in simulators; the fields are those of `EvaluateSpec`."""
        return (yield from self._submit(_spec(EvaluateSpec, fields)))

    def _evaluate_dataset(self, /, **fields: Any) -> Flow[JobT]:
        """Start an evaluation against recorded actions; the fields are those of `EvaluateDatasetSpec`."""
        return (yield from self._submit(_spec(EvaluateDatasetSpec, fields)))

    def _job(self, job_id: str) -> Flow[JobT]:
        """Return a handle on a job that was started before."""
        return self._job_of((yield from self._ask(GetJob(job=job_id), JobInfo)))

    def _jobs(self) -> Flow[tuple[JobInfo, ...]]:
        """Describe all jobs of the tenant, newest first."""
        return (yield from self._ask(ListJobs(), JobList)).jobs

    # The cluster

    def _status(self) -> Flow[ClusterStatus]:
        """How is the cluster?"""
        return (yield from self._ask(Status(), ClusterStatus))

    def _open_dashboard(self) -> Flow[DashboardCode]:
        """Ask for a way into the dashboard; it is good once, within a minute, and shows what this key may see."""
        return (yield from self._ask(OpenDashboard(), DashboardCode))

    def _usage(self, since_month: str = "") -> Flow[UsageReport]:
        """What did this tenant use (asked with an operator's key: all tenants), since a month, e.g. `2026-11`?"""
        lines: list[UsageLine] = []
        after = None
        while True:
            report = yield from self._ask(GetUsage(since_month=since_month, after=after), UsageReport)
            lines += report.lines
            if not report.more or not report.lines:
                return msgspec.structs.replace(report, lines=tuple(lines), more=False)
            last = lines[-1]
            after = (last.tenant, last.policy, last.job, last.month)

    def _ask(self, message: Message, answer: type[M]) -> Flow[M]:
        return (yield from answered(self._connection.ask(message, answer_of(answer), patience_s=self._timeout_s)))


class Client(ClientVerbs[Policy, Job]):
    """A connection to a cluster, as one tenant. Made by `connect`; safe to use from several threads.

    Attributes:
        datasets: the tenant's data sets.
    """

    datasets: Datasets

    create_policy = blocking(ClientVerbs[Policy, Job]._create_policy)
    policies = blocking(ClientVerbs[Policy, Job]._policies)
    delete_policy = blocking(ClientVerbs[Policy, Job]._delete_policy)
    move_policy = blocking(ClientVerbs[Policy, Job]._move_policy)
    drain_worker = blocking(ClientVerbs[Policy, Job]._drain_worker)
    cancel_jobs_of = blocking(ClientVerbs[Policy, Job]._cancel_jobs_of)
    begin_backup = blocking(ClientVerbs[Policy, Job]._begin_backup)
    end_backup = blocking(ClientVerbs[Policy, Job]._end_backup)
    submit = blocking(ClientVerbs[Policy, Job]._submit)
    sft = blocking(ClientVerbs[Policy, Job]._sft)
    rl = blocking(ClientVerbs[Policy, Job]._rl)
    pipeline = blocking(ClientVerbs[Policy, Job]._pipeline)
    evaluate = blocking(ClientVerbs[Policy, Job]._evaluate)
    evaluate_dataset = blocking(ClientVerbs[Policy, Job]._evaluate_dataset)
    job = blocking(ClientVerbs[Policy, Job]._job)
    jobs = blocking(ClientVerbs[Policy, Job]._jobs)
    status = blocking(ClientVerbs[Policy, Job]._status)
    open_dashboard = blocking(ClientVerbs[Policy, Job]._open_dashboard)
    usage = blocking(ClientVerbs[Policy, Job]._usage)

    def __init__(self, connection: Connection, welcome: Welcome, *, timeout_s: float = 30.0) -> None:
        super().__init__(connection, welcome, timeout_s=timeout_s)
        self.datasets = Datasets(connection, timeout_s=timeout_s)
        atexit.register(self.close)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give leases back where no op is under way, and close the connection. Jobs go on."""
        atexit.unregister(self.close)
        run(self._leave())
        self._connection.close()

    def _handle(self, name: str) -> Policy:
        return Policy(self._connection, name, inline_bytes=self.welcome.inline_bytes, timeout_s=self._timeout_s)

    def _job_of(self, info: JobInfo) -> Job:
        return Job(self._connection, info, timeout_s=self._timeout_s)


S = TypeVar("S", PolicySpec, SftSpec, RlSpec, EvaluateSpec, EvaluateDatasetSpec)


def _spec(type_: type[S], fields: dict[str, Any]) -> S:
    try:
        return type_(**fields)
    except TypeError as error:
        raise ValueError(f"this is no {type_.__name__}: {error}") from error
