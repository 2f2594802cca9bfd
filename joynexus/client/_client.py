"""The tenant's side of a cluster: connect, and what one can do then.

In: where the cluster is (a cluster file). Out: policies, data sets, jobs. Never: torch; a GPU; a path of the service.
"""

from __future__ import annotations

import atexit
import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import joynexus
from joynexus.client._datasets import Datasets
from joynexus.client._io import Connection, answer_of
from joynexus.client._jobs import Job
from joynexus.client._policy import Policy
from joynexus.contract import Contract, Statistics
from joynexus.keys import ClusterFile
from joynexus.specs import EvaluateDatasetSpec, EvaluateSpec, JobSpec, PolicySpec, SftSpec, check_name
from joynexus.wire import JoyNexusError, Message
from joynexus.wire.front import (
    ClusterStatus,
    CreatePolicy,
    GetJob,
    GetUsage,
    Hello,
    JobInfo,
    JobList,
    ListJobs,
    ListPolicies,
    PolicyInfo,
    PolicyList,
    Status,
    SubmitJob,
    UsageReport,
    Welcome,
)
from joynexus.wire.limits import PROTOCOL, PROTOCOL_MIN

M = TypeVar("M", bound=Message)


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
    cluster = config if isinstance(config, ClusterFile) else ClusterFile.load(Path(config) if config else None)
    connection = Connection(cluster)
    hello = Hello(protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL, client=f"joynexus-python/{joynexus.__version__}")
    try:
        welcome = connection.ask(hello, answer_of(Welcome), patience_s=timeout_s, resend_s=0.5).result()
    except BaseException:
        connection.close()
        raise
    return Client(connection, welcome)


class Client:
    """A connection to a cluster, as one tenant. Made by `connect`; safe to use from several threads.

    Attributes:
        welcome: who the key stands for, and the service's limits.
        datasets: the tenant's data sets.
    """

    def __init__(self, connection: Connection, welcome: Welcome, *, timeout_s: float = 30.0) -> None:
        self.welcome = welcome
        self.datasets = Datasets(connection, timeout_s=timeout_s)
        self._connection = connection
        self._timeout_s = timeout_s
        self._policies: dict[str, Policy] = {}
        atexit.register(self.close)

    def __repr__(self) -> str:
        return f"Client(tenant={self.tenant!r}, scope={self.welcome.scope!r})"

    @property
    def tenant(self) -> str:
        """The tenant that this key stands for."""
        return self.welcome.tenant

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give leases back where no op is under way, and close the connection. Jobs go on."""
        atexit.unregister(self.close)
        for policy in self._policies.values():
            # ValueError: closed already. Others: ops are under way, or nobody answers; the lease ends by itself.
            with contextlib.suppress(ValueError, JoyNexusError, TimeoutError):
                self._connection.release(policy.name).result(1.0)
        self._policies.clear()
        self._connection.close()

    # Policies

    def create_policy(self, name: str, spec: PolicySpec | None = None, *, dataset: str = "", **fields: Any) -> Policy:
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
                manifest = self.datasets.manifest(dataset)
                known: dict[str, Contract | Statistics] = {
                    "contract": manifest.contract,
                    "statistics": manifest.statistics,
                }
                fields = {**known, **fields}
            try:
                spec = PolicySpec(**fields)
            except TypeError as error:
                raise ValueError(f"this is no policy spec: {error}") from error
        self._ask(CreatePolicy(policy=check_name("policy", name), spec=spec), PolicyInfo)
        return self.policy(name)

    def policy(self, name: str) -> Policy:
        """Return a handle on a policy; whether it exists shows when it is used."""
        if name not in self._policies:
            self._policies[name] = Policy(
                self._connection, name, inline_bytes=self.welcome.inline_bytes, timeout_s=self._timeout_s
            )
        return self._policies[name]

    def policies(self) -> tuple[PolicyInfo, ...]:
        """Describe all policies of the tenant."""
        return self._ask(ListPolicies(), PolicyList).policies

    # Jobs

    def submit(self, spec: JobSpec, *, key: str = "") -> Job:
        """Start a job.

        Args:
            spec: what to do.
            key: the same key again returns the same job, also after this process died; empty makes a new one.

        Raises:
            JoyNexusError: if the service refuses the spec, or another driver has the policy.
        """
        if isinstance(spec, SftSpec) and spec.policy in self._policies:
            # Our own loop would be the driver that is in the way. If its ops are still running, the service says so.
            with contextlib.suppress(JoyNexusError):
                self._policies[spec.policy].release()
        info = self._ask(SubmitJob(key=key or self._connection.new_key(), spec=spec), JobInfo)
        return Job(self._connection, info, timeout_s=self._timeout_s)

    def sft(self, **fields: Any) -> Job:
        """Start supervised fine-tuning; the fields are those of `SftSpec`."""
        return self.submit(_spec(SftSpec, fields))

    def evaluate(self, **fields: Any) -> Job:
        """Start an evaluation in a simulator; the fields are those of `EvaluateSpec`."""
        return self.submit(_spec(EvaluateSpec, fields))

    def evaluate_dataset(self, **fields: Any) -> Job:
        """Start an evaluation against recorded actions; the fields are those of `EvaluateDatasetSpec`."""
        return self.submit(_spec(EvaluateDatasetSpec, fields))

    def job(self, job_id: str) -> Job:
        """Return a handle on a job that was started before."""
        return Job(self._connection, self._ask(GetJob(job=job_id), JobInfo), timeout_s=self._timeout_s)

    def jobs(self) -> tuple[JobInfo, ...]:
        """Describe all jobs of the tenant, newest first."""
        return self._ask(ListJobs(), JobList).jobs

    # The cluster

    def status(self) -> ClusterStatus:
        """How is the cluster?"""
        return self._ask(Status(), ClusterStatus)

    def usage(self) -> UsageReport:
        """What did this tenant use?"""
        return self._ask(GetUsage(), UsageReport)

    def _ask(self, message: Message, answer: type[M]) -> M:
        return self._connection.ask(message, answer_of(answer), patience_s=self._timeout_s).result()


S = TypeVar("S", SftSpec, EvaluateSpec, EvaluateDatasetSpec)


def _spec(type_: type[S], fields: dict[str, Any]) -> S:
    try:
        return type_(**fields)
    except TypeError as error:
        raise ValueError(f"this is no {type_.__name__}: {error}") from error
