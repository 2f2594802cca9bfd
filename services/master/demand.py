"""What waits for workers of which kind: what scaling goes by.

In: the queues. Out: rows, one for each simulator family, one for data sets, one for each backbone. Never: a tenant's
own environments, which no operator's worker could serve, or a tenant's name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from joynexus.wire.back import DemandRow
from joynexus.wire.hosted import OWN
from services.master.act_groups import rows_of
from services.master.acting import Acting
from services.master.env_queue import EnvQueue
from services.master.jobs import Jobs
from services.master.outbox import Outbox
from services.master.policy import Policy
from services.master.tasks import DATASETS, lane_of
from services.master.training import Training
from services.master.worker import Worker


class Demand:
    """Reads the queues."""

    def __init__(self, outbox: Outbox, env: EnvQueue, acting: Acting, training: Training, jobs: Jobs) -> None:
        self._outbox = outbox
        self._env = env
        self._acting = acting
        self._training = training
        self._jobs = jobs

    def rows(self, policies: Iterable[Policy]) -> Iterator[DemandRow]:
        """Say what each kind of worker has to do; `policies` are all there are."""
        yield from self._simulators_and_data()
        yield from self._inference()
        yield from self._trainers(policies)

    def _simulators_and_data(self) -> Iterator[DemandRow]:
        needs: dict[str, set[str]] = {}
        for need in self._env.needs():
            if not need.startswith(f"{OWN}:"):
                needs.setdefault(need if lane_of(need) == "simulator" else DATASETS, set()).add(need)
        running = Counter(task.need for task in self._env.at_work())
        starved = self._jobs.starved()
        for name, same in sorted(needs.items()):
            waiting = {need: self._env.in_line(need) for need in same}
            serving = {worker.name: worker for need in same for worker in self._env.serving(need)}
            pieces = {need: running[need] + len(line) for need, line in waiting.items()}
            seconds = sum(count * self._env.cost_s(need) for need, count in pieces.items())
            total = sum(pieces.values())
            yield self._row(
                f"env:{name}",
                "env",
                name,
                serving.values(),
                lane_of(name),
                running=sum(running[need] for need in same),
                waiting=sum(map(len, waiting.values())),
                oldest=min((since for line in waiting.values() for since in line), default=None),
                cost_s=seconds / total if total else max(map(self._env.cost_s, same)),
                starved=bool(starved & same),
            )

    def _inference(self) -> Iterator[DemandRow]:
        for backbone, batcher, stations in self._acting.by_backbone():
            groups = [group for station in stations for group in station.groups.values()]
            rows = sum(map(rows_of, groups))
            requests = sum(map(len, groups))
            together_s = batcher.device.of(rows) if rows else None
            yield self._row(
                f"inference:{backbone}",
                "inference",
                backbone,
                [station.worker for station in stations],
                "predict",
                running=requests,
                waiting=len(batcher),
                oldest=batcher.oldest(),
                cost_s=together_s / requests if together_s is not None else batcher.device.of(1) or 0.0,
            )

    def _trainers(self, policies: Iterable[Policy]) -> Iterator[DemandRow]:
        running: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        oldest: dict[str, float] = {}
        for policy in policies:
            unanswered = policy.next_seq - 1 - policy.applied
            if unanswered:
                backbone, with_trainer = policy.spec.backbone, min(unanswered, self._training.running(policy))
                running[backbone] += with_trainer
                waiting[backbone] += unanswered - with_trainer
                since = policy.ops[policy.applied + with_trainer + 1].since if unanswered > with_trainer else None
                if since is not None:
                    oldest[backbone] = min(since, oldest.get(backbone, since))
        workers: dict[str, list[Worker]] = {}
        for trainer in self._training.trainers():
            workers.setdefault(trainer.backbone, []).append(trainer.worker)
        for backbone in sorted({*workers, *waiting}):
            yield self._row(
                f"training:{backbone}",
                "trainer",
                backbone,
                workers.get(backbone, ()),
                "train",
                running=running[backbone],
                waiting=waiting[backbone],
                oldest=oldest.get(backbone),
            )

    def _row(
        self,
        group: str,
        role: str,
        need: str,
        workers: Iterable[Worker],
        lane: str,
        *,
        running: int,
        waiting: int,
        oldest: float | None,
        cost_s: float = 0.0,
        starved: bool = False,
    ) -> DemandRow:
        able = [worker for worker in workers if worker.alive and not worker.leaving and not worker.quarantine]
        return DemandRow(
            group=group,
            role=role,
            need=need,
            workers=len(able),
            credit=sum(worker.register.credit.get(lane, 0) for worker in able),
            running=running,
            waiting=waiting,
            oldest_s=0.0 if oldest is None else max(0.0, self._outbox.now - oldest),
            cost_s=cost_s,
            starved=starved,
        )
