"""A job as its tenant holds it: how far it is, what it found.

In: the job's id. Out: its state, its loss curve, its result. Never: work of its own (jobs run in the cluster, whether
anybody watches or not).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from joynexus.client import _blobs
from joynexus.client._io import Connection, answer_of
from joynexus.specs import EvaluateSpec, JobSpec, SftSpec
from joynexus.wire import ErrorCode, JoyNexusError, failure
from joynexus.wire.front import ActionError, CancelJob, EvaluationResult, GetJob, JobInfo

ENDED = frozenset({"succeeded", "failed", "cancelled"})


class Job:
    """A handle on one job; made by `Client.submit` and `Client.job`."""

    def __init__(self, connection: Connection, info: JobInfo, *, timeout_s: float) -> None:
        self.id = info.job
        self._connection = connection
        self._timeout_s = timeout_s
        self._info = info
        self._losses: list[float] = list(info.losses)

    def __repr__(self) -> str:
        return f"Job({self.id!r}, {self._info.state})"

    @property
    def spec(self) -> JobSpec:
        """What was asked for."""
        return self._info.spec

    @property
    def losses(self) -> list[float]:
        """The loss curve, one point an optimizer step, as of the last `info` or `wait`."""
        return list(self._losses)

    @property
    def result(self) -> EvaluationResult | ActionError | int:
        """What the job found: an evaluation's result, or the version that training published.

        Waits for the job; errors as for `wait`.
        """
        info = self._info if self._info.state in ENDED else self.wait(progress=False)
        return info.evaluation or info.action_error or info.version

    def info(self) -> JobInfo:
        """Ask how the job is; `losses` of the answer are the whole curve."""
        ask = GetJob(job=self.id, since=len(self._losses))
        info = self._connection.ask(ask, answer_of(JobInfo), patience_s=self._timeout_s).result()
        self._losses.extend(info.losses)
        self._info = msgspec.structs.replace(info, losses=tuple(self._losses))
        return self._info

    def cancel(self) -> JobInfo:
        """Stop the job; what it published stays."""
        self._connection.ask(CancelJob(job=self.id), answer_of(JobInfo), patience_s=self._timeout_s).result()
        return self.info()

    def wait(
        self,
        *,
        progress: bool = True,
        timeout_s: float | None = None,
        on_info: Callable[[JobInfo], None] | None = None,
    ) -> JobInfo:
        """Wait until the job has ended.

        Args:
            progress: draw a progress bar on a terminal's standard error.
            timeout_s: give up waiting (not the job) after this long.
            on_info: called with every new state.

        Raises:
            JoyNexusError: if the job failed, was cancelled, or `timeout_s` passed first.
        """
        from joynexus.client._progress import JobBar

        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause = 0.05
        with JobBar(describe(self.spec), enabled=progress) as bar:
            while True:
                info = self.info()
                bar.show(info)
                if on_info is not None:
                    on_info(info)
                if info.state in ENDED:
                    break
                if deadline is not None and time.monotonic() > deadline:
                    sentence = f"job {self.id} is still {info.state} after {timeout_s:g} s; it goes on in the cluster"
                    raise JoyNexusError(failure(ErrorCode.DEADLINE, sentence))
                time.sleep(pause)
                pause = min(0.5, pause * 1.5)
        if info.state == "failed":
            raise JoyNexusError(info.error or failure(ErrorCode.INTERNAL, info.message or f"job {self.id} failed"))
        if info.state == "cancelled":
            raise JoyNexusError(failure(ErrorCode.CONFLICT, f"job {self.id} was cancelled"))
        return info

    def save_videos(self, folder: str | Path) -> list[Path]:
        """Save the episodes that an evaluation recorded, as `seed-<seed>.mp4`; returns their paths."""
        evaluation = self._info.evaluation
        paths: list[Path] = []
        for episode in evaluation.results if evaluation else ():
            if episode.video:
                path = Path(folder) / f"seed-{episode.seed}.mp4"
                _blobs.download(self._connection, episode.video, path)
                paths.append(path)
        return paths


def describe(spec: JobSpec) -> str:
    """Say in a few words what a job does."""
    if isinstance(spec, SftSpec):
        return f"sft {spec.policy} on {spec.dataset}"
    if isinstance(spec, EvaluateSpec):
        return f"evaluate {spec.policy} in {spec.env}"
    return f"evaluate {spec.policy} on {spec.dataset}"
