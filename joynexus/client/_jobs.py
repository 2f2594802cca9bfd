"""A job as its tenant holds it: how far it is, what it found.

In: the job's id. Out: its state, its curve, its result. Never: work of its own (jobs run in the cluster, whether
anybody watches or not).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from joynexus.client import _blobs
from joynexus.client._flow import Flow, answered, blocking, paused, run
from joynexus.client._io import Connection, answer_of
from joynexus.specs import EvaluateSpec, JobSpec, PipelineSpec, RlSpec, SftSpec
from joynexus.wire import ErrorCode, JoyNexusError, failure
from joynexus.wire.front import ActionError, CancelJob, EvaluationResult, GetJob, JobInfo, ResumeJob, UpdatePoint

ENDED = frozenset({"succeeded", "failed", "cancelled"})
AT_REST = ENDED | {"parked"}
"""States that a job does not leave by itself."""
PAUSES_S = (0.05, 0.5)
"""Between two looks at a job: at first, and at most."""

Result = EvaluationResult | ActionError | int


class JobVerbs:
    """What can be done with a job, whether one waits or awaits."""

    def __init__(self, connection: Connection, info: JobInfo, *, timeout_s: float) -> None:
        self.id = info.job
        self._connection = connection
        self._timeout_s = timeout_s
        self._known = info
        self._losses: list[float] = list(info.losses)
        self._updates: list[UpdatePoint] = list(info.updates)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, {self._known.state})"

    @property
    def spec(self) -> JobSpec:
        """What was asked for."""
        return self._known.spec

    @property
    def losses(self) -> list[float]:
        """The loss curve, one point an optimizer step, as of the last `info`, `progress` or `wait`."""
        return list(self._losses)

    @property
    def updates(self) -> list[UpdatePoint]:
        """The learning curve of an RL job, one point an update; as of the same moment as `losses`."""
        return list(self._updates)

    def _info(self) -> Flow[JobInfo]:
        """Ask how the job is; `losses` and `updates` of the answer are the whole curve."""
        ask = GetJob(job=self.id, since=len(self._losses) or len(self._updates))
        info = yield from answered(self._connection.ask(ask, answer_of(JobInfo), patience_s=self._timeout_s))
        self._losses[ask.since :] = info.losses  # not appended: somebody else may have asked at the same time
        self._updates[ask.since :] = info.updates
        self._known = msgspec.structs.replace(info, losses=tuple(self._losses), updates=tuple(self._updates))
        return self._known

    def _cancel(self) -> Flow[JobInfo]:
        """Stop the job; what it published stays."""
        yield from answered(
            self._connection.ask(CancelJob(job=self.id), answer_of(JobInfo), patience_s=self._timeout_s)
        )
        return (yield from self._info())

    def _resume(self) -> Flow[JobInfo]:
        """Have a parked job go on where it stopped.

        Raises:
            JoyNexusError: if it is not parked.
        """
        yield from answered(
            self._connection.ask(ResumeJob(job=self.id), answer_of(JobInfo), patience_s=self._timeout_s)
        )
        return (yield from self._info())

    def _wait(
        self,
        *,
        progress: bool = True,
        timeout_s: float | None = None,
        on_info: Callable[[JobInfo], None] | None = None,
    ) -> Flow[JobInfo]:
        """Wait until the job has ended.

        Args:
            progress: draw a progress bar on a terminal's standard error.
            timeout_s: give up waiting (not the job) after this long.
            on_info: called with every new state.

        Raises:
            JoyNexusError: if the job failed, was cancelled or parked, or `timeout_s` passed first.
        """
        from joynexus.client._progress import JobBar

        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause, longest = PAUSES_S
        with JobBar(describe(self.spec), enabled=progress) as bar:
            while True:
                info = yield from self._info()
                bar.show(info)
                if on_info is not None:
                    on_info(info)
                if info.state in AT_REST:
                    break
                if deadline is not None and time.monotonic() > deadline:
                    sentence = f"job {self.id} is still {info.state} after {timeout_s:g} s; it goes on in the cluster"
                    raise JoyNexusError(failure(ErrorCode.DEADLINE, sentence))
                yield from paused(pause)
                pause = min(longest, pause * 1.5)
        if info.state != "succeeded":
            raise _unsuccessful(info)
        return info

    def _result(self) -> Flow[Result]:
        info = self._known if self._known.state == "succeeded" else (yield from self._wait(progress=False))
        return info.evaluation or info.action_error or info.version

    def _save_videos(self, folder: str | Path) -> Flow[list[Path]]:
        """Save the episodes that an evaluation recorded, as `seed-<seed>.mp4`; returns their paths.

        Those of an evaluation over several tasks go into one folder a task.
        """
        evaluation = self._known.evaluation
        paths: list[Path] = []
        for episode in evaluation.results if evaluation else ():
            if episode.video:
                path = Path(folder) / episode.env.replace("/", "-") / f"seed-{episode.seed}.mp4"
                yield from _blobs.download(self._connection, episode.video, path)
                paths.append(path)
        return paths

    def _next(self, before: JobInfo | None) -> Flow[JobInfo | None]:
        """Wait for a state that differs from the one before; None if the job has left that one for good."""
        if before is not None and before.state in AT_REST:
            return None
        pause, longest = PAUSES_S
        while _same(info := (yield from self._info()), before):
            yield from paused(pause)
            pause = min(longest, pause * 1.5)
        return info


class Job(JobVerbs):
    """A handle on one job; made by `Client.submit` and `Client.job`."""

    info = blocking(JobVerbs._info)
    cancel = blocking(JobVerbs._cancel)
    resume = blocking(JobVerbs._resume)
    wait = blocking(JobVerbs._wait)
    save_videos = blocking(JobVerbs._save_videos)

    @property
    def result(self) -> Result:
        """What the job found: an evaluation's result, or the version that training published.

        Waits for the job; errors as for `wait`.
        """
        return run(self._result())

    def progress(self) -> Iterator[JobInfo]:
        """Give every new state, until the job has ended or is parked; raises nothing if it failed."""
        info: JobInfo | None = None
        while (info := run(self._next(info))) is not None:
            yield info


def _same(info: JobInfo, before: JobInfo | None) -> bool:
    """Tell whether only time has passed."""
    return before is not None and msgspec.structs.replace(info, seconds=before.seconds) == before


def _unsuccessful(info: JobInfo) -> JoyNexusError:
    """Say why a job that does not go on has not succeeded."""
    if info.state == "cancelled":
        return JoyNexusError(failure(ErrorCode.CONFLICT, f"job {info.job} was cancelled"))
    error = info.error or failure(ErrorCode.INTERNAL, info.message or f"job {info.job} {info.state}")
    if info.state == "parked":
        how = f"`joynexus jobs resume {info.job}` has it go on, `joynexus jobs cancel {info.job}` ends it"
        error = msgspec.structs.replace(error, message=f"job {info.job} is parked: {error.message}; {how}")
    return JoyNexusError(error)


def describe(spec: JobSpec) -> str:
    """Say in a few words what a job does."""
    if isinstance(spec, SftSpec):
        return f"sft {spec.policy} on {spec.dataset}"
    if isinstance(spec, RlSpec):
        return f"{spec.algorithm.__struct_config__.tag} {spec.policy} in {spec.env}"
    if isinstance(spec, PipelineSpec):
        return f"{len(spec.stages)} stages of {spec.policy}"
    if isinstance(spec, EvaluateSpec):
        return f"evaluate {spec.policy} in {', '.join(spec.tasks)}"
    return f"evaluate {spec.policy} on {spec.dataset}"
