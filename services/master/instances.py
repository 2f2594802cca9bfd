"""Whose place a worker takes when it registers: its own former life's, and nobody else's.

In: registrations, and who is there. Out: former lives that are taken for dead. Never: a living worker that gives way to
a sibling, or to a process that was taken for dead before it came (so two do not take each other's place in turn).

An instance is what stays the same when a process is started anew: a container, a name in a plan. A worker that does not
say which it is may be the former life of any newcomer with its key: then the longest silent one gives way, if it stays
silent for a while.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from joynexus.wire import ErrorCode
from services.master.outbox import Outbox, refuse
from services.master.worker import Worker

_REMEMBERED = 1000
_QUIET_BEATS = 2.0
"""Without instances, the longest silent of a key is taken for dead after so many beats once another has come."""


class Instances:
    """Who was whom.

    Args:
        beat_s: how often workers beat.
        lose: takes a worker for dead, for a reason.
    """

    def __init__(self, outbox: Outbox, beat_s: float, lose: Callable[[Worker, str], None]) -> None:
        self._outbox = outbox
        self._beat_s = beat_s
        self._lose = lose
        self._ended: OrderedDict[str, bool] = OrderedDict()  # incarnations that have; whether they said so

    def check(self, worker: Worker, others: Iterable[Worker]) -> None:
        """Refuse a former life that comes back.

        Args:
            worker: who registers.
            others: workers of its role that live.

        Raises:
            JoyNexusError: `CONFLICT` if another process has its place now, or it has said that it is gone.
        """
        said = self._ended.get(worker.register.incarnation)
        if said:
            raise refuse(ErrorCode.CONFLICT, "this incarnation has said that it is gone: start its process anew")
        successor = next((other for other in others if same_instance(worker, other)), None)
        if said is not None and successor is not None:
            raise refuse(
                ErrorCode.CONFLICT,
                f"another process (pid {successor.register.pid}) has registered as instance "
                f"'{worker.register.instance[:80]}' since: end one of the two, or give each its own JOYNEXUS_INSTANCE",
            )

    def make_room(self, newcomer: Worker, others: Iterable[Worker]) -> None:
        """Take the former life of a newcomer for dead: now if it says who it was, else once it was silent for a while.

        Args:
            others: workers of its role that live.
        """
        self._ended.pop(newcomer.register.incarnation, None)
        if newcomer.register.instance:
            for former in [each for each in others if same_instance(newcomer, each)]:
                self._lose(former, "its process was started anew")
            return
        same = [each for each in others if each.key_name == newcomer.key_name and not each.register.instance]
        if same:  # one, as this one takes the place of one at most: a key may be many workers'
            former = min(same, key=lambda other: other.heard)
            self._replace(former, former.heard)

    def ended(self, worker: Worker, *, said: bool = False) -> None:
        """A worker is taken for dead, or has said that it ends: then it does not come back."""
        self._ended[worker.register.incarnation] = said or self._ended.get(worker.register.incarnation, False)
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _replace(self, worker: Worker, heard: float) -> None:
        """Another one came with this worker's key: take it for dead now or soon, unless it was heard since."""
        left = heard + _QUIET_BEATS * self._beat_s - self._outbox.now
        if left > 0:
            self._outbox.after(left, lambda: self._replace(worker, heard))
        elif worker.alive and worker.heard == heard:
            self._lose(worker, "it was silent when another one came with its key")


def same_instance(worker: Worker, other: Worker) -> bool:
    """Tell whether two workers say that they are lives of one instance."""
    mine, theirs = worker.register, other.register
    return bool(mine.instance) and mine.instance == theirs.instance and worker.key_name == other.key_name
