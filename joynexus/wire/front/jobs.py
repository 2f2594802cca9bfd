"""Jobs: work that the service drives for a tenant, and how far it is."""

from __future__ import annotations

from typing import Literal

from joynexus.bounds import Short
from joynexus.specs import JobSpec
from joynexus.wire.base import Wire
from joynexus.wire.errors import Failure
from joynexus.wire.front.evaluation import ActionError, EvaluationResult


class SubmitJob(Wire, frozen=True, kw_only=True):
    """Start a job. `key` is chosen by the client: the same key again returns the same job.

    Answer: `JobInfo`.
    """

    key: Short
    spec: JobSpec


class GetJob(Wire, frozen=True, kw_only=True):
    """How is a job? `since` cuts the curve: only points from that index on. Answer: `JobInfo`."""

    job: Short
    since: int = 0


class CancelJob(Wire, frozen=True, kw_only=True):
    """Stop a job; what it published stays. Answer: `JobInfo`."""

    job: Short


class ResumeJob(Wire, frozen=True, kw_only=True):
    """Have a parked job go on where it stopped. Answer: `JobInfo`; `CONFLICT` if it was not parked.

    Asking again is answered alike, also when it has ended meanwhile.
    """

    job: Short


class ListJobs(Wire, frozen=True, kw_only=True):
    """All jobs of the tenant, newest first. Answer: `JobList`."""


JobState = Literal["waiting", "running", "publishing", "parked", "paused", "succeeded", "failed", "cancelled"]
"""`parked` waits for `ResumeJob`; `paused` goes on by itself, once its tenant is within its budget again."""


class UpdatePoint(Wire, frozen=True, kw_only=True):
    """One update of an RL job.

    Attributes:
        update: counts from 0.
        version: that it published.
        episodes, steps: episodes that it was trained on, and actions in them.
        success, reward, length: their rate of success, mean return (unscaled) and mean length.
        staleness: most updates between the version that acted in one of them and this one.
        metrics: of its last epoch: `policy_loss`, `value_loss`, `entropy`, `approx_kl`, `clip_fraction`, `grad_norm`, …
    """

    update: int
    version: int
    episodes: int
    steps: int
    success: float
    reward: float
    length: float
    staleness: int = 0
    metrics: dict[str, float] = {}


class StageInfo(Wire, frozen=True, kw_only=True):
    """One stage of a pipeline: its job once it has begun, and how that ended."""

    kind: str
    job: str = ""
    state: JobState = "waiting"


class JobInfo(Wire, frozen=True, kw_only=True):
    """State and progress of a job.

    Attributes:
        done, total: optimizer steps (sft), updates (rl), episodes (evaluate) or stages (pipeline).
        losses: the loss curve from index `since` on (sft).
        updates: the learning curve from index `since` on (rl).
        stages: the stages of a pipeline.
        initial_version, version: versions the job published; 0 if none.
        backbone_forwards, samples: samples that went through the backbone, and samples trained on.
        seconds: since the job was accepted until now or its end.
        message: one sentence on what it waits for, or why it failed.
    """

    job: str
    spec: JobSpec
    state: JobState
    done: int
    total: int
    losses: tuple[float, ...] = ()
    initial_version: int = 0
    version: int = 0
    backbone_forwards: int = 0
    samples: int = 0
    seconds: float = 0.0
    message: str = ""
    error: Failure | None = None
    evaluation: EvaluationResult | None = None
    action_error: ActionError | None = None
    updates: tuple[UpdatePoint, ...] = ()
    stages: tuple[StageInfo, ...] = ()


class JobList(Wire, frozen=True, kw_only=True):
    """Jobs without curves and results."""

    jobs: tuple[JobInfo, ...]
