"""What all jobs have in common: a record, a state, and one function that does what comes next.

In: anything that may let a job go on. Out: `advance`, which may be called at any time and does what is due. Never:
progress that is kept here alone: after a restart the same function goes on from what the journal has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import msgspec

from common.journal.records import DatasetRecord, JobRecord, Record
from joynexus.specs import StageSpec
from joynexus.wire import ErrorCode, Failure, JoyNexusError
from joynexus.wire.front import JobInfo
from services.master.acting import Acting
from services.master.catalog import Catalog
from services.master.config import CoreConfig
from services.master.env_queue import EnvQueue
from services.master.holdings import Holdings
from services.master.intake import Intake
from services.master.metering import Meter
from services.master.outbox import Outbox, refuse
from services.master.policies import Policies
from services.master.policy import Policy
from services.master.serving import Serving
from services.master.training import Training

ENDED = frozenset({"succeeded", "failed", "cancelled"})


class Tools(msgspec.Struct, frozen=True):
    """The parts of the core that jobs use.

    Attributes:
        over_budget: says that a tenant is over its budget; empty if it is not.
        wait: have a job advanced when something about this key happens.
        ended: note that a job has ended.
        freed: tell those who wait for a policy that its job has let go of it.
        find: find a job of a tenant.
        earlier: find a job that was submitted before this one, has not ended, and trains the same policy.
        make_stage, begin_stage: make a job that is a stage of another one; have it begin, once it is durable.
    """

    outbox: Outbox
    config: CoreConfig
    policies: Policies
    catalog: Catalog
    holdings: Holdings
    intake: Intake
    training: Training
    serving: Serving
    acting: Acting
    env: EnvQueue
    meter: Meter
    over_budget: Callable[[str], str]
    wait: Callable[[Job, tuple[str, ...]], None]
    ended: Callable[[Job], None]
    freed: Callable[[Policy], None]
    find: Callable[[str, str], Job | None]
    earlier: Callable[[Job], Job | None]
    make_stage: Callable[[Job, StageSpec], Job]
    begin_stage: Callable[[Job], None]


class Job(ABC):
    """One job.

    Attributes:
        record: its journal row.
        waiting_for: clause for `JobInfo.message`, if it waits for something.
        waits_at: under which key it waited last (`Tools.wait`).
    """

    def __init__(self, record: JobRecord, tools: Tools) -> None:
        self.record = record
        self.tools = tools
        self.waiting_for = ""
        self.waits_at: tuple[str, ...] = ()
        self._advancing = False
        self._held: Sequence[tuple[str, int]] = ()

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.record.tenant

    @property
    def id(self) -> str:
        """Its id."""
        return self.record.job

    @property
    def ended(self) -> bool:
        """Nothing more will happen."""
        return self.record.state in ENDED

    @property
    def parked(self) -> bool:
        """Nothing more will happen until somebody resumes it."""
        return self.record.state == "parked"

    @property
    def paused(self) -> str:
        """Why it begins nothing new for now, in a sentence: its tenant is over its budget; empty if that is not so."""
        return "" if self.ended or self.parked else self.tools.over_budget(self.tenant)

    def pause(self) -> None:
        """Its tenant is over its budget: what is under way is finished, what has not begun waits here."""
        self.advance()

    def advance(self) -> None:
        """Do what is due."""
        if self.ended or self.parked or self._advancing:
            return
        self._advancing = True
        try:
            self._step()
        except JoyNexusError as error:
            self.fail(error.failure)
        finally:
            self._advancing = False

    def change(self, **fields: object) -> None:
        """Write a change of the record down (sooner or later; it can be derived again)."""
        self.record = msgspec.structs.replace(self.record, **fields)
        self.tools.outbox.save([self.record])

    def succeed(self, **fields: object) -> None:
        """End well."""
        self._end("succeeded", **fields)

    def fail(self, failure: Failure) -> None:
        """End with a reason."""
        if not self.ended:
            self._end("failed", error=failure)

    def cancel(self) -> None:
        """End because the tenant wants it."""
        if not self.ended:
            self._end("cancelled")

    @property
    def resumed(self) -> bool:
        """It was parked, and was resumed."""
        return bool(self.record.resumed)

    def resume(self) -> None:
        """Go on where it was parked; one that was resumed is asked again, which is fine, also if it has ended since.

        Raises:
            JoyNexusError: `CONFLICT`: it was not parked.
        """
        if not self.resumed:
            raise refuse(
                ErrorCode.CONFLICT, f"job '{self.id}' is {self.info(brief=True).state}: only a parked job is resumed"
            )

    def version_settled(self, version: int, error: Failure | None) -> None:
        """Inference has applied or refused a version of the policy that it drives, or is not there any more."""
        if version == self.record.version:
            if error is not None:
                self.fail(error)
            self.advance()

    def discard(self) -> None:
        """It could not be written down, so it was never there."""
        self._release()

    def forget(self) -> list[Record]:
        """It ended long ago: give up what it still holds, and return the records that are to go."""
        return [msgspec.structs.replace(self.record, gone=True)]

    @property
    def newest(self) -> tuple[float, str]:
        """Its newest number, and what that is, as in `JobRow`."""
        return 0.0, ""

    def info(self, since: int = 0, *, brief: bool = False) -> JobInfo:
        """Describe it.

        Args:
            since: only this part of the curve.
            brief: leave curve and results out.
        """
        record = self.record
        waits = "" if self.ended or self.parked else self.waiting_for or self._missing()
        state = "waiting" if waits and record.state == "running" else record.state
        message = f"waits for {waits}" if waits else record.error.message if record.error else ""
        if paused := self.paused:
            state, message = "paused", paused
        ended = record.ended_s or self.tools.outbox.now
        basic = JobInfo(
            job=record.job,
            spec=record.spec,
            state=state,
            done=0,
            total=0,
            version=record.version,
            initial_version=record.initial_version,
            seconds=max(0.0, ended - record.accepted_s),
            message=message,
            error=record.error,
            action_error=None if brief else record.action_error,
        )
        return self._describe(basic, since, brief=brief)

    def _dataset(self, name: str) -> DatasetRecord | None:
        """Return the job's data set once it is ready; until then wait for it.

        Raises:
            JoyNexusError: it does not exist, or is faulty.
        """
        found = self.tools.catalog.find(self.tenant, name)
        if found.state == "checking":
            self.waiting_for = self.tools.catalog.waits_for(found) or f"data set '{name}', which is being checked"
            self.tools.wait(self, dataset_key(found.tenant, found.dataset))
            return None
        self.waiting_for = ""
        return self.tools.catalog.ready(self.tenant, name)

    def _hold(self, blobs: Sequence[tuple[str, int]]) -> None:
        """Keep the blobs of a data set until the end, whatever is pushed under its name meanwhile."""
        self._held = blobs
        for digest, nbytes in blobs:
            self.tools.holdings.hold(self.tenant, digest, nbytes)

    @abstractmethod
    def _step(self) -> None:
        """Do what is due; may be called at any time."""

    @abstractmethod
    def _missing(self) -> str:
        """Name the kind of worker that is needed now and not there; empty if none."""

    @abstractmethod
    def _describe(self, basic: JobInfo, since: int, *, brief: bool) -> JobInfo:
        """Fill in progress and results."""

    @abstractmethod
    def _release(self) -> None:
        """Give up what it holds; it has ended, or never began."""

    def _end(self, state: str, **fields: object) -> None:
        self.change(state=state, ended_s=self.tools.outbox.now, **fields)
        self.waiting_for = ""
        outcome = self.record.error.message if self.record.error else ""
        self.tools.outbox.log("info", "job_ended", tenant=self.tenant, job=self.id, state=state, reason=outcome)
        for digest, _ in self._held:
            self.tools.holdings.release(self.tenant, digest, swept=True)
        self._release()
        self.tools.ended(self)


def dataset_key(tenant: str, name: str) -> tuple[str, ...]:
    """Return what jobs wait for that need a data set."""
    return ("dataset", tenant, name)


def policy_key(tenant: str, name: str) -> tuple[str, ...]:
    """Return what jobs wait for that need to drive a policy."""
    return ("policy", tenant, name)


def mismatch(sentence: str) -> JoyNexusError:
    """A policy and data do not fit each other."""
    return refuse(ErrorCode.CONTRACT_MISMATCH, sentence)
