"""Work over which an env worker died: it is done again alone, so that nobody is blamed for what ran beside it.

In: what a dead worker had, and who serves what. Out: workers kept for one suspect each, and when it is to begin. Never:
a worker kept for two, or more than one at a time that is being emptied while others would have work for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from services.master.worker import Worker


class Suspect(Protocol):
    """What has to be known of a piece of work."""

    tenant: str
    need: str
    kills: int
    since: float

    @property
    def lane(self) -> str:
        """The lane of credit in which it is done."""
        ...


S = TypeVar("S", bound=Suspect)


class Suspects(Generic[S]):
    """Pieces of work that wait for a worker of their own, and the workers kept for them."""

    def __init__(self) -> None:
        self._waiting: list[S] = []
        self._kept: dict[str, tuple[Worker, S]] = {}  # by worker: what it has alone, or is being emptied for

    def __iter__(self) -> Iterator[S]:
        """Those that wait."""
        return iter(self._waiting)

    def add(self, task: S) -> None:
        """Have a piece of work wait for a worker of its own; the likely innocent, over which fewest died, first."""
        self._waiting.append(task)
        self._waiting.sort(key=lambda task: (task.kills, task.since))

    def drop(self, task: S) -> Worker | None:
        """A piece of work was answered, or nobody wants it any more; return the worker that was kept for it."""
        if task in self._waiting:
            self._waiting.remove(task)
        worker = next((worker for worker, kept in self._kept.values() if kept is task), None)
        if worker is not None:
            self.release(worker)
        return worker

    def release(self, worker: Worker) -> None:
        """A worker is kept for nothing any more; what it was emptied for waits for another one."""
        self._kept.pop(worker.name, None)

    def keeps(self, worker: Worker) -> bool:
        """Tell whether a worker takes no other work."""
        return worker.name in self._kept

    def next(self, worker: Worker) -> S | None:
        """Return what a worker is to begin now; None if it is not kept, or still has something."""
        _, task = self._kept.get(worker.name, (worker, None))
        if task is None or task not in self._waiting or worker.given:
            return None
        self._waiting.remove(task)
        return task

    def keep(self, serving: Mapping[str, Mapping[str, Worker]]) -> list[Worker]:
        """Keep workers for what waits: those that have nothing, and one that gets nothing new until it has nothing.

        Args:
            serving: workers that take work, by what they serve and by name.

        Returns:
            The workers that may begin at once.
        """
        ready = []
        for task in self._waiting:
            if any(kept is task for _, kept in self._kept.values()):
                continue
            able = [
                worker
                for worker in serving.get(task.need, {}).values()
                if not self.keeps(worker) and worker.register.credit.get(task.lane, 0) > 0
            ]
            if not able:
                continue
            worker = min(able, key=lambda worker: len(worker.given))
            if not worker.given:
                ready.append(worker)
            elif any(kept in self._waiting and worker.given for worker, kept in self._kept.values()):
                continue
            self._kept[worker.name] = worker, task
        return ready
