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
from joynexus.wire.back.session import Beat, BeatAck, Leaving, Register, Registered, Role
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

__all__ = [
    "ActionsEvaluated",
    "Beat",
    "BeatAck",
    "Collect",
    "DatasetPrepared",
    "DescribeSimulator",
    "EvaluateActions",
    "IndicesDrawn",
    "Leaving",
    "OpenSlot",
    "PredictDone",
    "PredictGroup",
    "PredictItem",
    "Predicted",
    "PrepareDataset",
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
    "TrainDone",
    "TrainGroup",
    "TrainItem",
    "TrainKind",
    "WeightsApplied",
    "WeightsOffer",
    "WeightsRefused",
    "WorkerAct",
]
