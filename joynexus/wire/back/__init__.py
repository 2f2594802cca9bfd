"""What workers and the master say to each other (back domain).

A worker registers, then is given work up to its credit and answers each piece once. Work is named by `(task, attempt)`:
an answer counts only while that attempt is assigned to the worker's incarnation, so a worker that was declared dead can
change nothing any more.
"""

from joynexus.wire.back.data import (
    ActionsEvaluated,
    DatasetPrepared,
    EvaluateActions,
    IndicesDrawn,
    PrepareDataset,
    SampleIndices,
)
from joynexus.wire.back.inference import (
    PredictDone,
    Predicted,
    PredictGroup,
    PredictItem,
    WeightsApplied,
    WeightsOffer,
    WeightsRefused,
)
from joynexus.wire.back.rollouts import Collect, DescribeSimulator, Rollout, RolloutDone, SimulatorDescribed, WorkerAct
from joynexus.wire.back.session import Beat, BeatAck, Gone, Leaving, Register, Registered, Role
from joynexus.wire.back.training import (
    OpenSlot,
    RlBegin,
    RlEpoch,
    SlotFailed,
    TrainDone,
    TrainGroup,
    TrainItem,
    TrainKind,
)
from joynexus.wire.back.view import (
    ClusterView,
    Decision,
    DemandRow,
    GroupRow,
    InstanceRow,
    JobRow,
    PolicyRow,
    RecentRow,
    RedeemCode,
    Supervised,
    UseRow,
    ViewCluster,
    Viewer,
    ViewJob,
)

__all__ = [
    "ActionsEvaluated",
    "Beat",
    "BeatAck",
    "ClusterView",
    "Collect",
    "DatasetPrepared",
    "Decision",
    "DemandRow",
    "DescribeSimulator",
    "EvaluateActions",
    "Gone",
    "GroupRow",
    "IndicesDrawn",
    "InstanceRow",
    "JobRow",
    "Leaving",
    "OpenSlot",
    "PolicyRow",
    "PredictDone",
    "PredictGroup",
    "PredictItem",
    "Predicted",
    "PrepareDataset",
    "RecentRow",
    "RedeemCode",
    "Register",
    "Registered",
    "RlBegin",
    "RlEpoch",
    "Role",
    "Rollout",
    "RolloutDone",
    "SampleIndices",
    "SimulatorDescribed",
    "SlotFailed",
    "Supervised",
    "TrainDone",
    "TrainGroup",
    "TrainItem",
    "TrainKind",
    "UseRow",
    "ViewCluster",
    "ViewJob",
    "Viewer",
    "WeightsApplied",
    "WeightsOffer",
    "WeightsRefused",
    "WorkerAct",
]
