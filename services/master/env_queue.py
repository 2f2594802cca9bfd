"""Work for env workers: rollouts, data sets to prepare, pages of batches to draw.

In: tasks of jobs and data sets, answers, lost workers. Out: work for whoever serves what a task needs and has credit,
the tenant that used least first; of workers with credit, to one that has the simulator ready. Never: a scan over tasks,
an answer to an earlier attempt, or work set aside for what ran beside it: what a dead worker had is done again alone
(`suspects.py`), and only a death over it alone counts. What came to nothing is tried by another one (`doubts.py`); a
worker that is wrong again and again gets nothing more until it is restarted.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from joynexus.wire import ErrorCode, failure, kind_of
from joynexus.wire.hosted import OWN
from services.master.config import CoreConfig
from services.master.doubts import Doubts, came_to_nothing
from services.master.events import BackMessage
from services.master.lanes import Counters, Lanes
from services.master.metering import FAILED, Account, Meter, bearer
from services.master.outbox import Outbox, refuse
from services.master.readiness import Readiness
from services.master.roster import Roster
from services.master.suspects import Suspects
from services.master.tasks import MOUNTED, EnvAnswer, Task, lane_of
from services.master.worker import Worker

_NEW_COST = 0.2
"""Weight of a task's seconds in what the next one is expected to take."""
_WRONG = 3
"""So many pieces in a row that came to nothing at a worker, and were done well by others, are its own fault."""
_CANCELLED = 1000
"""So many cancelled tasks of a worker are remembered: those that it never began are never answered."""


class EnvQueue:
    """Tasks that wait and tasks that run."""

    def __init__(self, outbox: Outbox, roster: Roster, config: CoreConfig, counters: Counters, meter: Meter) -> None:
        self._outbox = outbox
        self._roster = roster
        self._config = config
        self._counters = counters
        self._meter = meter
        self._waiting: defaultdict[str, Lanes[Task]] = defaultdict(lambda: Lanes(counters))
        self._suspects: Suspects[Task] = Suspects()
        self._running: dict[str, Task] = {}
        self._costs: dict[str, float] = {}  # seconds of a task, by need
        self._serving: defaultdict[str, dict[str, Worker]] = defaultdict(dict)  # need -> workers, by name
        self._ready = Readiness()
        self._doubts: Doubts[Task] = Doubts(_WRONG)
        self._cancelled: dict[str, dict[str, Account]] = {}  # worker -> who is charged for what it may still be doing
        roster.add_staff("env", self)

    def submit(self, task: Task) -> None:
        """Add a task."""
        task.id, task.since = self._outbox.new_id(), self._outbox.now
        self._waiting[task.need].push(task.tenant, task)
        self._fill(task.need)

    def cancel(self, tasks: Collection[Task]) -> None:
        """Nobody wants these tasks any more."""
        workers: dict[str, Worker] = {}
        for task in tasks:
            task.cancelled = True
            if task.worker is not None:
                workers[task.worker.name] = task.worker
                self._roster.cancel(task.worker, task.id)
                if task.worker.ring is None:
                    self._remember(task.worker, task)
                self._forget(task)
            self._doubts.drop(task)
            if (kept := self._suspects.drop(task)) is not None:
                workers[kept.name] = kept
        for need, tenant in {(task.need, task.tenant) for task in tasks}:  # nobody may ever serve that need
            if need in self._waiting:
                self._waiting[need].remove(tenant, lambda task: task.cancelled)
                self._tidy(need)
        self._isolate()
        for worker in workers.values():
            self._employ(worker)

    def serves(self, need: str) -> bool:
        """Tell whether any worker serves this need."""
        return bool(self._serving.get(need))

    def mounted(self) -> set[str]:
        """Names of the data sets in the operator's folder."""
        served = (need for need, workers in self._serving.items() if workers)
        return {need.removeprefix(MOUNTED) for need in served if need.startswith(MOUNTED)}

    def task(self, said: BackMessage, task: str, attempt: int) -> Task:
        """Return the task for which a worker speaks.

        Raises:
            JoyNexusError: `STALE`, `NOT_REGISTERED` or `INVALID`.
        """
        self._roster.check(said, task, attempt)
        return self.running_task(task)

    def running_task(self, task: str) -> Task:
        """Return a task that a worker has; `INVALID` if it is none of this queue."""
        running = self._running.get(task)
        if running is None:  # one key may serve several roles
            raise refuse(ErrorCode.INVALID, f"task '{task[:64]}' is no work of the env service")
        return running

    def waiting(self, tenant: str) -> int:
        """Number of a tenant's tasks that wait (for status)."""
        apart = sum(task.tenant == tenant for task in self._apart())
        return apart + sum(lanes.waiting(tenant) for lanes in self._waiting.values())

    def running(self, tenant: str) -> int:
        """Number of a tenant's tasks that run (for status)."""
        return sum(task.tenant == tenant for task in self._running.values())

    def oldest(self, tenant: str) -> float | None:
        """When the oldest task of a tenant that waits was submitted; None if none waits (for status)."""
        waiting = (task for lanes in self._waiting.values() for task in lanes.of(tenant))
        apart = (task for task in self._apart() if task.tenant == tenant)
        return min((task.since for task in itertools.chain(waiting, apart)), default=None)

    def tenants(self) -> set[str]:
        """Tenants with tasks here (for status)."""
        return {tenant for lanes in self._waiting.values() for tenant in lanes.tenants()} | {
            task.tenant for task in itertools.chain(self._running.values(), self._apart())
        }

    def needs(self) -> set[str]:
        """Return what tasks need and workers serve (for views)."""
        return {*self._waiting, *self._serving}

    def serving(self, need: str) -> Iterable[Worker]:
        """Return the workers that serve a need and take new work (for views)."""
        return self._serving.get(need, {}).values()

    def at_work(self) -> Collection[Task]:
        """Return the tasks that workers have (for views)."""
        return self._running.values()

    def in_line(self, need: str) -> list[float]:
        """Return since when each task waits that needs this (for views)."""
        lanes = self._waiting.get(need)
        waiting = [task.since for tenant in lanes.tenants() for task in lanes.of(tenant)] if lanes else []
        return waiting + [task.since for task in self._apart() if task.need == need]

    def cost_s(self, need: str) -> float:
        """Return the seconds that such a task takes; 0 while nobody knows (for views)."""
        return self._costs.get(need, 0.0)

    # Messages

    def on_answer(self, said: BackMessage, message: EnvAnswer) -> None:
        """A worker has done a task, or could not."""
        worker = self._roster.of(said)
        cancelled = self._cancelled.get(worker.name, {}).pop(message.task, None)
        if cancelled is not None:
            self._meter.worked(worker, cancelled, {"env_s": message.busy_s})
            return
        void = message.error is not None and message.error.code is ErrorCode.STALE
        given = worker.given.get(message.task)
        if void and (given is None or given.attempt != message.attempt):
            return  # it knows that this does not count
        self.answered(worker, self.task(said, message.task, message.attempt), message)

    def answered(self, worker: Worker, task: Task, message: EnvAnswer) -> None:
        """A worker has answered a task that it was given."""
        self._roster.take(worker, task.id)
        self._forget(task)
        task.alone = False
        self._suspects.drop(task)
        self._isolate()
        self._counters.charge(task.tenant, message.busy_s - task.estimate_s)
        cost = self._costs.get(task.need, message.busy_s)
        self._costs[task.need] = cost + _NEW_COST * (message.busy_s - cost)
        error = message.error
        if not isinstance(message, task.answer):
            error = failure(ErrorCode.INTERNAL, f"the env worker answered with '{kind_of(message)}': see its log")
        nothing = came_to_nothing(message)
        again = nothing and self._doubts.ask_another(task, worker, self._serving.get(task.need, {}))
        self._meter.worked(worker, FAILED if again else bearer(task.account, error), {"env_s": message.busy_s})
        if again:
            self._outbox.log(
                "warning", "task_came_to_nothing", tenant=task.tenant, task=task.id, need=task.need, worker=worker.name
            )
            self._isolate()
            self._employ(worker)
            return
        if (convicted := self._doubts.judge(task, worker, well=error is None and not nothing)) is not None:
            self._quarantine(convicted, task)
        if error is None:
            task.done(message)
        elif error.category == "user":
            task.failed(error)
        else:
            passes = error.retry_after_ms / 1000  # a full disk, say: then the work is not at fault
            task.faults += not passes
            self._outbox.log(
                "warning", "task_failed", tenant=task.tenant, task=task.id, need=task.need, reason=error.message
            )
            if task.faults < self._config.kills:
                self._outbox.after(passes or self._config.retry_s, lambda: self._again(task))
            else:
                task.failed(error)
        self._employ(worker)

    # Staff

    def joined(self, worker: Worker) -> None:
        """An env worker is there."""
        for need in self._needs(worker):
            self._serving[need][worker.name] = worker
        self._isolate()
        self._employ(worker)

    def leaving(self, worker: Worker) -> None:
        """An env worker takes nothing new."""
        for need in self._needs(worker):
            if self._serving[need].get(worker.name) is worker:
                del self._serving[need][worker.name]
            self._tidy(need)
        self._suspects.release(worker)
        self._isolate()

    def lost(self, worker: Worker) -> None:
        """An env worker is dead: its tasks are done again elsewhere, from the start and each alone."""
        self.leaving(worker)
        self._ready.forget(worker)
        self._doubts.forget(worker)
        self._cancelled.pop(worker.name, None)
        had = [task for id_ in worker.given if (task := self._running.get(id_)) is not None]
        for task in had:
            self._forget(task)
            self._counters.charge(task.tenant, -task.estimate_s)
            if worker.ring is None:  # a tenant's machine comes and goes: that is not the work's fault
                task.alone = True
                # What was cancelled only just now may still have been at work, until the next beat.
                task.kills += len(had) == 1 and not worker.cancelled
        for task in had:
            if task.cancelled:  # a job that fails over one task cancels its others
                continue
            if task.kills < self._config.kills:
                self._again(task)
            else:
                sentence = (
                    f"this work was set aside because {task.kills} workers died while they did it and nothing else"
                )
                task.failed(failure(ErrorCode.POISON, sentence))

    # Inside

    def _needs(self, worker: Worker) -> list[str]:
        return [*worker.register.serves, *(MOUNTED + name for name in worker.register.mounted)]

    def _remember(self, worker: Worker, task: Task) -> None:
        """Note who is charged for a cancelled task, if the worker has begun it."""
        cancelled = self._cancelled.setdefault(worker.name, {})
        cancelled[task.id] = task.account
        if len(cancelled) > _CANCELLED:
            del cancelled[next(iter(cancelled))]

    def _again(self, task: Task) -> None:
        if task.cancelled:
            return
        if task.alone:
            self._suspects.add(task)
            self._isolate()
        else:
            self._waiting[task.need].put_back(task.tenant, task, front=True)
            self._fill(task.need)

    def _apart(self) -> Iterator[Task]:
        """Tasks that wait outside of the lanes."""
        return itertools.chain(self._suspects, self._doubts)

    def _isolate(self) -> None:
        """Find workers for what must be alone, and for what another one is to try."""
        for worker in self._suspects.keep(self._serving):
            self._employ(worker)
        for need in {task.need for task in self._doubts}:
            for worker in list(self._serving.get(need, {}).values()):
                self._employ(worker)

    def _quarantine(self, worker: Worker, task: Task) -> None:
        """Give a worker nothing more: it takes work and makes nothing of what others do well."""
        worker.quarantine = (
            f"{_WRONG} pieces of work for {task.need} in a row came to nothing here, and others did them well: "
            "mend it and restart it"
        )
        self._outbox.log(
            "error", "worker_quarantined", worker=worker.name, pid=worker.register.pid, why=worker.quarantine
        )
        self.leaving(worker)

    def _fill(self, need: str) -> None:
        """Give what waits for a need to the workers that serve it, the least loaded first."""
        lane = lane_of(need)
        while (lanes := self._waiting.get(need)) and (serving := self._serving.get(need)):
            free = [worker for worker in serving.values() if self._credit(worker, lane) > 0]
            if not free:
                return
            head = lanes.peek()
            self._give(max(free, key=lambda worker: self._fitness(worker, head)), need)

    def _employ(self, worker: Worker) -> None:
        """Use a worker's credit: among all that it serves, the tenant that used least comes first."""
        if not worker.alive or worker.leaving or worker.quarantine:
            return
        if (suspect := self._suspects.next(worker)) is not None:
            self._start(worker, suspect)
        while (doubted := self._doubts.next(worker, self._free(worker), self._serving)) is not None:
            self._start(worker, doubted)
        for lane in worker.register.credit:
            needs = [need for need in self._needs(worker) if lane_of(need) == lane]
            while self._credit(worker, lane) > 0:
                waiting = [(need, lanes) for need in needs if (lanes := self._waiting.get(need))]
                heads = [(need, head) for need, lanes in waiting if (head := lanes.peek()) is not None]
                if not heads:
                    break
                # Of one tenant the older first: its jobs in one family never let those in another one starve.
                need, _ = min(heads, key=lambda pair: (*self._counters.rank(pair[1].tenant), pair[1].since))
                self._give(worker, need, choose=True)

    def _give(self, worker: Worker, need: str, *, choose: bool = False) -> None:
        """Give a worker what comes next, or what it has ready for, if it may `choose`."""
        lanes = self._waiting[need]
        cost_s = self._costs.get(need, 0.0)
        skips = self._ready.look_ahead(worker, lanes, self._counters, cost_s) if choose else 0
        for _ in range(skips):
            lanes.skip()
        task = lanes.pop()
        lanes.unskip()
        self._tidy(need)
        if task is not None:
            self._start(worker, task)

    def _start(self, worker: Worker, task: Task) -> None:
        self._ready.note(worker, task)
        if not task.attempt:
            self._outbox.waited("env", task.since)
        task.attempt += 1
        task.worker = worker
        task.estimate_s = self._costs.get(task.need, 0.0)
        self._counters.charge(task.tenant, task.estimate_s)
        self._running[task.id] = task
        self._roster.give(worker, task.id, task.attempt, task.make(task.id, task.attempt))

    def _fitness(self, worker: Worker, task: Task | None) -> tuple[bool, int, int]:
        """Rank workers for a task: has it ready, has most credit, gives up least for it."""
        lane = "simulator" if task is None else lane_of(task.need)
        return self._ready.has(worker, task), self._credit(worker, lane), -self._ready.count(worker)

    def _tidy(self, need: str) -> None:
        """Keep nothing of a tenant's environment that nothing waits for and nobody serves: names are its choice."""
        if not need.startswith(f"{OWN}:"):
            return
        if not self._waiting.get(need):
            self._waiting.pop(need, None)
            self._costs.pop(need, None)
        if not self._serving.get(need):
            self._serving.pop(need, None)

    def _credit(self, worker: Worker, lane: str) -> int:
        if self._suspects.keeps(worker):
            return 0
        used = sum(self._running[id_].lane == lane for id_ in worker.given)
        return worker.register.credit.get(lane, 0) - used

    def _free(self, worker: Worker) -> list[str]:
        """Lanes in which a worker has credit."""
        return [lane for lane in worker.register.credit if self._credit(worker, lane) > 0]

    def _forget(self, task: Task) -> None:
        self._running.pop(task.id, None)
        task.worker = None
