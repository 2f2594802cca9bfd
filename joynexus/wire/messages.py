"""The registry of all messages: kind ↔ type, and who may say what.

Kinds are the struct names in snake case and never change once released; golden bytes in `tests/wire` hold that.
"""

from __future__ import annotations

import inspect
import re
from typing import Literal, get_args

import msgspec

from joynexus.wire import back, front, hosted
from joynexus.wire.base import Wire
from joynexus.wire.errors import Failure

Message = msgspec.Struct

Scope = Literal["read", "act", "all"]
"""What a tenant's key may do: look; look and ask for actions; everything."""


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


# Parts of messages that never travel by themselves.
_PARTS = frozenset(
    {
        Wire, front.Samples, front.DatasetSamples, front.EpisodeResult, front.EvaluationResult,
        front.ActionError, front.FileEntry, front.Exploration, front.TaskResult,
        front.UpdatePoint, front.StageInfo, front.RoleStatus, front.LaneStatus, front.UsageLine,
        back.OpenSlot, back.RlBegin, back.RlEpoch, back.Collect, back.TrainItem, back.PredictItem, back.Predicted,
        back.InstanceRow, back.Decision, back.GroupRow, back.DemandRow, back.JobRow, back.PolicyRow, back.UseRow,
        back.RecentRow,
    }
)  # fmt: skip


def _messages(module: object) -> dict[str, type[Message]]:
    return {
        _snake(name): value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Wire) and value not in _PARTS
    }


KINDS: dict[str, type[Message]] = {**_messages(front), **_messages(back), **_messages(hosted), "failure": Failure}
"""Every kind that may travel, with the type of its body."""

_KIND_OF = {type_: kind for kind, type_ in KINDS.items()}

FRONT_REQUESTS: dict[type[Message], Scope] = {
    front.Hello: "read",
    front.Ping: "read",
    front.GetPolicy: "read",
    front.ListPolicies: "read",
    front.GetJob: "read",
    front.ListJobs: "read",
    front.GetDataset: "read",
    front.ListDatasets: "read",
    front.Status: "read",
    front.GetUsage: "read",
    front.GetVersion: "read",
    front.BlobRead: "read",
    front.OpenDashboard: "read",
    front.Act: "act",
    front.CreatePolicy: "all",
    front.AcquireLease: "all",
    front.ReleaseLease: "all",
    front.ForwardBackward: "all",
    front.OptimStep: "all",
    front.Publish: "all",
    front.SaveState: "all",
    front.LoadState: "all",
    front.LoadWeights: "all",
    front.SubmitJob: "all",
    front.CancelJob: "all",
    front.ResumeJob: "all",
    front.MovePolicy: "all",
    front.DrainWorker: "all",
    front.CancelJobs: "all",
    front.BackupBegin: "all",
    front.BackupEnd: "all",
    front.DeletePolicy: "all",
    front.DeleteVersion: "all",
    front.DeleteDataset: "all",
    front.PushDataset: "all",
    front.BlobBegin: "all",
    front.BlobChunk: "all",
    hosted.OfferEnvironment: "all",
    hosted.PullWork: "all",
    hosted.HostAct: "all",
    hosted.HostDone: "all",
    hosted.WithdrawEnvironment: "all",
}
"""What a tenant may send, and the scope its key needs."""

_EVERY = frozenset(get_args(back.Role))

BACK_REQUESTS: dict[type[Message], frozenset[str]] = {
    back.Register: _EVERY,
    back.Beat: _EVERY,
    back.Leaving: _EVERY,
    back.Gone: _EVERY,
    front.BlobBegin: frozenset({"trainer", "env"}),
    front.BlobChunk: frozenset({"trainer", "env"}),
    front.BlobRead: frozenset({"trainer", "inference", "env"}),
    back.TrainDone: frozenset({"trainer"}),
    back.SlotFailed: frozenset({"trainer"}),
    back.PredictDone: frozenset({"inference"}),
    back.WeightsApplied: frozenset({"inference"}),
    back.WeightsRefused: frozenset({"inference"}),
    back.DatasetPrepared: frozenset({"env"}),
    back.IndicesDrawn: frozenset({"env"}),
    back.RolloutDone: frozenset({"env"}),
    back.SimulatorDescribed: frozenset({"env"}),
    back.ActionsEvaluated: frozenset({"env"}),
    back.WorkerAct: frozenset({"env"}),
    front.Status: frozenset({"health"}),
    back.Supervised: frozenset({"health"}),
    back.ViewCluster: frozenset({"health", "dashboard"}),
    back.ViewJob: frozenset({"dashboard"}),
    back.RedeemCode: frozenset({"dashboard"}),
    back.CloseSession: frozenset({"dashboard"}),
}
"""What a worker may send, and the role that its key must claim."""

SCOPES: tuple[Scope, ...] = ("read", "act", "all")
"""Scopes from narrow to wide; each includes those before it."""


def kind_of(message: Message) -> str:
    """Return the kind of a message.

    Raises:
        ValueError: if this type never travels by itself.
    """
    kind = _KIND_OF.get(type(message))
    if kind is None:
        raise ValueError(f"{type(message).__name__} is not a message")
    return kind


def scope_allows(held: str, needed: Scope) -> bool:
    """Tell whether a key with scope `held` may do what needs scope `needed`."""
    return held in SCOPES and SCOPES.index(held) >= SCOPES.index(needed)
