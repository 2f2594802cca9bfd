"""A pipeline: jobs on one policy one after another, each begun when the one before it has succeeded.

In: the specs of its stages, ends of their jobs. Out: a job for each stage, written down together with the pipeline that
begins it. Never: a stage begun twice, or a state of its own beside that of the stage that runs: if that is parked, so
is the pipeline, and resuming either resumes both.
"""

from __future__ import annotations

import msgspec

from common.journal.records import JobRecord
from joynexus.specs import EvaluateDatasetSpec, EvaluateSpec, PipelineSpec, StageSpec
from joynexus.wire import ErrorCode, Failure, JoyNexusError, failure
from joynexus.wire.front import JobInfo, StageInfo
from services.master.job import ENDED, Job, Tools


class PipelineJob(Job):
    """Jobs one after another."""

    spec: PipelineSpec

    def __init__(self, record: JobRecord, tools: Tools) -> None:
        super().__init__(record, tools)
        if not isinstance(record.spec, PipelineSpec):
            raise TypeError(f"job {record.job} is no pipeline")
        self.spec = record.spec
        self._busy = False  # the next stage is on its way to the journal

    @property
    def parked(self) -> bool:
        """The stage that runs is parked."""
        stage = self._stage()
        return not self.ended and stage is not None and stage.parked

    @property
    def resumed(self) -> bool:
        """The stage that runs was parked, and was resumed."""
        stage = self._stage()
        return stage is not None and stage.resumed

    def resume(self) -> None:
        """Have the stage that is parked go on."""
        stage = self._stage()
        if self.ended or stage is None or not stage.parked:
            super().resume()
        else:
            stage.resume()

    def _step(self) -> None:
        if self._busy:
            return
        stages = self.record.stages
        if stages:
            stage = self._stage()
            state = stage.record.state if stage is not None else stages[-1].state
            if state not in ENDED:
                return
            if stages[-1].state != state:
                self._note_end(stage, msgspec.structs.replace(stages[-1], state=state))
            if state == "cancelled":
                self.cancel()
                return
            if state != "succeeded":
                error = stage.record.error if stage is not None else None
                self._fail_with(error or failure(ErrorCode.INTERNAL, "it is not kept why"), self.record.stages)
                return
        if len(stages) == len(self.spec.stages):
            self.succeed()
        else:
            self._begin(self.spec.stages[len(stages)])

    def _note_end(self, stage: Job | None, info: StageInfo) -> None:
        """Write down how a stage ended: its job may be forgotten before the pipeline has ended."""
        evaluated = stage is None or isinstance(stage.record.spec, EvaluateSpec | EvaluateDatasetSpec)
        version = self.record.version if evaluated or stage is None else stage.record.version
        self.change(stages=(*self.record.stages[:-1], info), version=version or self.record.version)

    def _fail_with(self, error: Failure, stages: tuple[StageInfo, ...]) -> None:
        """The newest of these stages has failed."""
        job = f", job '{stages[-1].job}'" if stages[-1].job else ""
        sentence = f"stage {len(stages)} ({stages[-1].kind}{job}) failed: {error.message}"
        self._end("failed", error=msgspec.structs.replace(error, message=sentence), stages=stages)

    def _begin(self, spec: StageSpec) -> None:
        """Make the next stage's job; both are in the journal before it does anything."""
        if isinstance(spec, EvaluateSpec | EvaluateDatasetSpec) and not spec.version:
            spec = msgspec.structs.replace(spec, version=self.record.version)
        try:
            stage = self.tools.make_stage(self, spec)
        except JoyNexusError as error:  # what was possible when the pipeline was submitted is not any more
            refused = StageInfo(kind=stage_kind(spec), state="failed")
            self._fail_with(error.failure, (*self.record.stages, refused))
            return
        begun = StageInfo(kind=stage_kind(spec), job=stage.id, state=stage.record.state)
        record = msgspec.structs.replace(self.record, state="running", stages=(*self.record.stages, begun))
        self._busy = True

        def saved() -> None:
            self._busy = False
            if self.ended:
                self.tools.begin_stage(stage)
                stage.cancel()
                return
            self.record = record
            self.tools.begin_stage(stage)

        def lost(reason: str) -> None:
            stage.discard()
            self._busy = False
            self.tools.outbox.after(self.tools.config.retry_s, self.advance)

        self.tools.outbox.save([stage.record, record], saved, lost)

    def _stage(self) -> Job | None:
        """Return the job of the newest stage."""
        stages = self.record.stages
        return self.tools.find(self.tenant, stages[-1].job) if stages else None

    def _release(self) -> None:
        stage = self._stage()
        if stage is not None:
            stage.cancel()

    def _missing(self) -> str:
        return ""

    def _describe(self, basic: JobInfo, since: int, *, brief: bool) -> JobInfo:
        stages = list(self.record.stages)
        stage = None if self.ended else self._stage()
        if stage is not None:
            running = stage.info(brief=True)
            stages[-1] = msgspec.structs.replace(stages[-1], state=running.state)
            state = "parked" if running.state == "parked" else "waiting" if running.state == "waiting" else basic.state
            basic = msgspec.structs.replace(basic, state=state, message=running.message, error=running.error)
        done = sum(stage.state == "succeeded" for stage in stages)
        stages += [StageInfo(kind=stage_kind(spec)) for spec in self.spec.stages[len(stages) :]]
        return msgspec.structs.replace(basic, done=done, total=len(stages), stages=tuple(stages))


def stage_kind(spec: StageSpec) -> str:
    """Return the kind of a stage, as in its spec."""
    return str(spec.__struct_config__.tag)
