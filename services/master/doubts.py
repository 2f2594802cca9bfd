"""Work that came to nothing at one env worker is given to another, so that it shows whose fault it was.

In: work, who answered it, whether it came to nothing. Out: who is to try it next; a worker whose work came to nothing
again and again while others did the very same work well. Never: a worker blamed for work that fails elsewhere too, or
for what nobody else has tried: a tenant's bad simulator costs each worker some time, and no worker its good name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from joynexus.wire import ErrorCode, Failure
from joynexus.wire.back import RolloutDone
from services.master.plan import has_ended
from services.master.worker import Worker


class Doubted(Protocol):
    """What has to be known of a piece of work."""

    need: str
    doubted: Worker | None

    @property
    def lane(self) -> str:
        """The lane of credit in which it is done."""
        ...


D = TypeVar("D", bound=Doubted)


class Doubts(Generic[D]):
    """Pieces of work that wait for another worker, and what was found of workers.

    Args:
        most: so many pieces in a row that came to nothing at a worker, and were done well by others, are too many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: list[D] = []
        self._wrong: Counter[tuple[str, str]] = Counter()  # by incarnation and need: in a row

    def __iter__(self) -> Iterator[D]:
        """Those that wait for another worker."""
        return iter(self._waiting)

    def ask_another(self, task: D, worker: Worker, serving: Mapping[str, Worker]) -> bool:
        """A piece of work came to nothing; have another worker try it, once, if one serves it (`serving`, by name)."""
        if task.doubted is not None or worker.ring is not None or serving.keys() <= {worker.name}:
            return False
        task.doubted = worker
        self._waiting.append(task)
        return True

    def judge(self, task: D, worker: Worker, *, well: bool) -> Worker | None:
        """A piece of work was answered for good; return the worker that it convicts, if any."""
        doubted, task.doubted = task.doubted, None
        if not well:
            return None
        del self._wrong[worker.register.incarnation, task.need]
        if doubted is None or doubted is worker or not doubted.alive or doubted.quarantine:
            return None
        key = doubted.register.incarnation, task.need
        self._wrong[key] += 1
        return doubted if self._wrong[key] >= self._most else None

    def next(self, worker: Worker, lanes: Collection[str], serving: Mapping[str, Mapping[str, Worker]]) -> D | None:
        """Return what a worker with credit in some lanes is to try; who came to nothing gets it back if alone."""
        for task in self._waiting:
            able = serving.get(task.need, {})
            if task.lane in lanes and worker.name in able and (worker is not task.doubted or len(able) == 1):
                self._waiting.remove(task)
                return task
        return None

    def drop(self, task: D) -> None:
        """Nobody wants a piece of work any more."""
        if task in self._waiting:
            self._waiting.remove(task)

    def forget(self, worker: Worker) -> None:
        """A worker is dead: the next one of its name begins anew."""
        for key in [key for key in self._wrong if key[0] == worker.register.incarnation]:
            del self._wrong[key]


class Answer(Protocol):
    """What has to be known of an answer."""

    @property
    def error(self) -> Failure | None:
        """Why there is no result, if there is none."""
        ...


def came_to_nothing(message: Answer) -> bool:
    """Tell whether an answer is the kind that a broken worker gives: no simulator, or no episode that ended.

    What a worker was told by others (that no actions were to be had, say) has a hint when to ask again.
    """
    if message.error is not None:
        return message.error.code is ErrorCode.UNAVAILABLE and not message.error.retry_after_ms
    return isinstance(message, RolloutDone) and not any(map(has_ended, message.episodes))
