"""What tenants and the master say to each other (front domain, control socket).

Only typed structs live here. A tenant's identity is never a field: it is the authenticated key of the connection. Every
name is looked up under that tenant. Every request is answered by exactly one message whose header's `re` is the
request's id, either the answer named here or a `Failure`; an op is answered twice, `Accepted` when it is durable and
`OpResult` when it was applied. Asking again with the same id or the same op key is always safe.
"""

from joynexus.wire.front.acting import Act, Actions, Exploration
from joynexus.wire.front.admin import BackupBegin, BackupEnd, BackupTicket, CancelJobs, DrainWorker
from joynexus.wire.front.blobs import BlobBegin, BlobChunk, BlobData, BlobOffset, BlobRead
from joynexus.wire.front.dashboard import DashboardCode, OpenDashboard
from joynexus.wire.front.datasets import (
    DatasetInfo,
    DatasetList,
    DatasetState,
    FileEntry,
    GetDataset,
    ListDatasets,
    PushDataset,
)
from joynexus.wire.front.deletion import DeleteDataset, DeletePolicy, DeleteVersion
from joynexus.wire.front.evaluation import ActionError, EpisodeResult, EvaluationResult, TaskResult
from joynexus.wire.front.jobs import (
    CancelJob,
    GetJob,
    JobInfo,
    JobList,
    JobState,
    ListJobs,
    ResumeJob,
    StageInfo,
    SubmitJob,
    UpdatePoint,
)
from joynexus.wire.front.ops import (
    Accepted,
    DatasetSamples,
    ForwardBackward,
    LoadState,
    LoadWeights,
    OpResult,
    OptimStep,
    Publish,
    Samples,
    SaveState,
)
from joynexus.wire.front.policies import (
    AcquireLease,
    CreatePolicy,
    GetPolicy,
    GetVersion,
    Lease,
    ListPolicies,
    MovePolicy,
    PolicyInfo,
    PolicyList,
    ReleaseLease,
    VersionInfo,
)
from joynexus.wire.front.session import Done, Hello, Ping, Pong, Welcome
from joynexus.wire.front.status import ClusterStatus, GetUsage, LaneStatus, RoleStatus, Status, UsageLine, UsageReport

__all__ = [
    "Accepted",
    "AcquireLease",
    "Act",
    "ActionError",
    "Actions",
    "BackupBegin",
    "BackupEnd",
    "BackupTicket",
    "BlobBegin",
    "BlobChunk",
    "BlobData",
    "BlobOffset",
    "BlobRead",
    "CancelJob",
    "CancelJobs",
    "ClusterStatus",
    "CreatePolicy",
    "DashboardCode",
    "DatasetInfo",
    "DatasetList",
    "DatasetSamples",
    "DatasetState",
    "DeleteDataset",
    "DeletePolicy",
    "DeleteVersion",
    "Done",
    "DrainWorker",
    "EpisodeResult",
    "EvaluationResult",
    "Exploration",
    "FileEntry",
    "ForwardBackward",
    "GetDataset",
    "GetJob",
    "GetPolicy",
    "GetUsage",
    "GetVersion",
    "Hello",
    "JobInfo",
    "JobList",
    "JobState",
    "LaneStatus",
    "Lease",
    "ListDatasets",
    "ListJobs",
    "ListPolicies",
    "LoadState",
    "LoadWeights",
    "MovePolicy",
    "OpResult",
    "OpenDashboard",
    "OptimStep",
    "Ping",
    "PolicyInfo",
    "PolicyList",
    "Pong",
    "Publish",
    "PushDataset",
    "ReleaseLease",
    "ResumeJob",
    "RoleStatus",
    "Samples",
    "SaveState",
    "StageInfo",
    "Status",
    "SubmitJob",
    "TaskResult",
    "UpdatePoint",
    "UsageLine",
    "UsageReport",
    "VersionInfo",
    "Welcome",
]
