"""The rollouts of an RL job: given out as far ahead as tickets allow, journaled once finished, kept while needed.

In: how many updates are published, answers of env workers, pages from the journal. Out: tasks for env workers, the
pages of an update once all are finished. Never: a page that is done twice once it is in the journal, or one that begins
so early that it would be too old.

Page `n` of the job (a rollout) belongs to update `n // pages`. What is not finished when the master goes down is done
again from the same seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from common.journal.records import PageRecord
from joynexus.specs import PpoSpec, RlSpec
from joynexus.wire import ErrorCode, Failure, failure
from joynexus.wire.back import Collect, Rollout, RolloutDone
from joynexus.wire.front import EpisodeResult
from services.master.job import Job
from services.master.plan import RlPlan, has_ended, mean
from services.master.policy import Policy
from services.master.tasks import EnvAnswer, Task, simulator_need
from services.master.tickets import Tickets


class Rollouts:
    """What a job's updates are trained on.

    Args:
        job: whose they are.
        plan: of the job; `plan` may be given fewer updates later.
        finished: called when one more page is durable.

    Attributes:
        plan: which episodes are in which page.
    """

    def __init__(self, job: Job, spec: RlSpec, plan: RlPlan, finished: Callable[[], None]) -> None:
        self._job = job
        self._spec = spec
        self.plan = plan
        self._finished = finished
        self._tickets = Tickets(batch=plan.pages, max_staleness=spec.max_staleness)
        self._pages: dict[int, PageRecord] = {}
        self._running: dict[int, Task] = {}
        self._saving: set[int] = set()
        self._next = 0  # pages before it were given out or are done

    @property
    def acting(self) -> set[int]:
        """Versions that act in rollouts now."""
        return {task.version for task in self._running.values()}

    def produce(self, policy: Policy, first_version: int, published: int, folded: int) -> None:
        """Give out pages, as many as there are tickets for.

        Args:
            first_version: that was published before the first update.
            published: updates that were published since then.
            folded: updates whose pages are not needed any more.
        """
        end = self.plan.updates * self.plan.pages
        self._stop([number for number in self._running if number >= end])
        self._next = max(self._next, folded * self.plan.pages)
        while (
            self._next < end
            and len(self._running) < self._job.tools.config.job_pages
            and self._tickets.may_begin(self._next, published)
        ):
            number, self._next = self._next, self._next + 1
            if number not in self._pages and number not in self._running and number not in self._saving:
                self._roll(policy, number, first_version + published)

    def stop(self) -> None:
        """Have nothing run any more; what is not finished is given out again by `produce`."""
        self._stop(list(self._running))
        self._next = 0

    def pause(self) -> None:
        """Take back what has not begun; `produce` gives it out again."""
        self._stop([number for number, task in self._running.items() if not task.attempt])
        self._next = 0

    def restore(self, record: PageRecord) -> None:
        """Take a page back from the journal."""
        self._keep(record)

    def of_update(self, update: int) -> list[PageRecord] | None:
        """Return an update's pages, once all are finished."""
        pages = [self._pages.get(number) for number in self._numbers(update)]
        return None if None in pages else [page for page in pages if page is not None]

    def drop_update(self, update: int) -> list[PageRecord]:
        """Let go of an update's pages; return the records by which they go from the journal."""
        return self._drop(self._numbers(update))

    def drop_all(self) -> list[PageRecord]:
        """Let go of all pages; return the records by which they go from the journal."""
        return self._drop(list(self._pages))

    def look_whether_to_stop(self, update: int, success: float) -> None:
        """An update whose episodes succeed often enough is the last one; a function of what is in the journal."""
        if 0 < self._spec.stop_at <= success and update + 1 < self.plan.updates:
            self.plan = msgspec.structs.replace(self.plan, updates=update + 1)

    # Inside

    def _roll(self, policy: Policy, number: int, version: int) -> None:
        """Have a page's episodes run."""
        seeds, draws = self.plan.page(number)
        job, spec = self._job, self._spec
        need = simulator_need(job.tenant, spec.env)

        def make(task: str, attempt: int) -> Rollout:
            return Rollout(
                task=task,
                attempt=attempt,
                tenant=job.tenant,
                policy=policy.name,
                version=version,
                contract=policy.spec.contract,
                chunk=policy.spec.chunk,
                env=spec.env,
                seeds=seeds,
                draws=draws,
                episode_limit=spec.episode_limit,
                execute=spec.execute,
                collect=Collect(reward=spec.reward, value=isinstance(spec.algorithm, PpoSpec)),
                trace=job.id,
            )

        def done(answer: EnvAnswer) -> None:
            if not isinstance(answer, RolloutDone) or tuple(e.seed for e in answer.episodes) != seeds:
                sentence = "an env worker returned other episodes than asked for: see its log"
                job.fail(failure(ErrorCode.INTERNAL, sentence))
                return
            self._save(number, version, answer)

        def failed(error: Failure) -> None:
            if error.category == "user" and error.code is not ErrorCode.POISON:
                job.fail(error)
                return
            nothing = EpisodeResult(seed=0, success=False, steps=0, reward=0.0, failure=error.message)
            lost = tuple(msgspec.structs.replace(nothing, seed=seed) for seed in seeds)
            self._save(number, version, RolloutDone(task="", attempt=0, episodes=lost))

        self._running[number] = task = Task(
            tenant=job.tenant,
            policy=policy.name,
            version=version,
            job=job.id,
            need=need,
            setup=(spec.env, policy.spec.contract.cameras),
            answer=RolloutDone,
            make=make,
            done=done,
            failed=failed,
        )
        job.tools.env.submit(task)

    def _save(self, number: int, version: int, answer: RolloutDone) -> None:
        """A page is finished (or cannot be run at all, and the update goes on without it): write it down."""
        self._running.pop(number, None)
        self._saving.add(number)
        record = PageRecord(
            tenant=self._job.tenant,
            job=self._job.id,
            page=number,
            episodes=answer.episodes,
            contract_digest=answer.contract_digest,
            software=answer.software,
            version=version,
            trajectories=answer.trajectories if any(map(has_ended, answer.episodes)) else "",
            trajectories_nbytes=answer.trajectories_nbytes,
        )

        def saved() -> None:
            self._saving.discard(number)
            self._keep(record)
            if self._job.ended:
                self._job.tools.outbox.save(self._drop([number]))
            else:
                self._finished()

        self._job.tools.outbox.save([record, *self._job.tools.meter.unwritten()], saved)

    def _keep(self, record: PageRecord) -> None:
        if record.page in self._pages:
            return
        self._pages[record.page] = record
        self._job.tools.holdings.hold(self._job.tenant, record.trajectories, record.trajectories_nbytes)
        update = self._tickets.update(record.page)
        pages = self.of_update(update)
        if pages is not None:
            self.look_whether_to_stop(update, mean([episode.success for episode in episodes_of(pages)]))

    def _drop(self, numbers: Sequence[int]) -> list[PageRecord]:
        gone = [self._pages.pop(number) for number in numbers if number in self._pages]
        for record in gone:
            self._job.tools.holdings.release(self._job.tenant, record.trajectories)
        return [PageRecord(tenant=self._job.tenant, job=self._job.id, page=record.page, gone=True) for record in gone]

    def _stop(self, numbers: Sequence[int]) -> None:
        self._job.tools.env.cancel([self._running.pop(number) for number in numbers])

    def _numbers(self, update: int) -> range:
        return range(update * self.plan.pages, (update + 1) * self.plan.pages)


def episodes_of(pages: Sequence[PageRecord]) -> list[EpisodeResult]:
    """Return the episodes that count: those that could be run."""
    return [episode for page in pages for episode in page.episodes if has_ended(episode)]
