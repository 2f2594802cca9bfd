"""How much of each worker's busy time was charged to somebody, and what was not.

In: what answers were charged with, beats, lost workers. Out: the rest, to be charged to the service: what a worker took
before its first work, and what no answer accounts for: what it had when it died, answers that came too late, and the
little that lies between pieces of work. Never: a second charge for the same time, over a restart of the master too.

Busy time counts from a process's start, so what is known of it goes by incarnation. A beat may overtake an answer on
its way: only what stays when a worker has rested between two beats was never charged.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Protocol

import msgspec

from common.journal.records import LifeRecord
from services.master.worker import Worker

METERED = ("trainer", "inference", "env")
"""Roles whose busy time is charged."""
_REMEMBERED = 1000


class Rest(Protocol):
    """Charges the service."""

    def __call__(self, worker: Worker, seconds: float, *, loading: bool) -> None:
        """A worker was busy for so many seconds that nobody was charged with."""


class _Life(msgspec.Struct):
    """What is known of one incarnation.

    Attributes:
        charged_s: seconds that somebody was charged with.
        busy_s: as it last said.
        known: it has beaten before: what comes now is no loading.
        resting: at its last beat it had nothing, and did nothing.
    """

    charged_s: float = 0.0
    busy_s: float = 0.0
    known: bool = False
    resting: bool = False
    alive: bool = False


class Lives:
    """All workers that were there since the journal began, as far as they are remembered."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest
        self._lives: OrderedDict[str, _Life] = OrderedDict()
        self._unwritten: set[str] = set()
        self._forgotten: list[str] = []

    def restore(self, record: LifeRecord) -> None:
        """Take one back from the journal."""
        self._lives[record.incarnation] = _Life(charged_s=record.charged_s, busy_s=record.charged_s, known=True)

    def unwritten(self) -> list[LifeRecord]:
        """Return what is not written down yet."""
        gone = [LifeRecord(incarnation=name, gone=True) for name in self._forgotten]
        records = [LifeRecord(incarnation=name, charged_s=self._lives[name].charged_s) for name in self._unwritten]
        self._unwritten.clear()
        self._forgotten.clear()
        return [*gone, *records]

    def charged(self, worker: Worker, seconds: float) -> None:
        """Somebody was charged with so many of its seconds."""
        if seconds and worker.ring is None:  # a tenant's own machine is nobody's cost
            self._of(worker).charged_s += seconds
            self._unwritten.add(worker.register.incarnation)

    def beat(self, worker: Worker) -> None:
        """It says how busy it was until now."""
        if worker.role not in METERED:
            return
        life = self._of(worker)
        resting = not worker.given and worker.phase in ("idle", "draining")
        still = resting and life.resting and worker.busy_s == life.busy_s
        first = not life.known
        life.busy_s, life.resting, life.known = worker.busy_s, resting, True
        if first or still:
            self._charge_rest(worker, life, loading=first)

    # Staff

    def joined(self, worker: Worker) -> None:
        """A worker is there."""
        self._of(worker).alive = True

    def leaving(self, worker: Worker) -> None:
        """It says goodbye when it has finished."""

    def lost(self, worker: Worker) -> None:
        """A worker is dead: what it had is done again by others."""
        life = self._of(worker)
        life.alive = life.resting = False
        self._charge_rest(worker, life, loading=False)
        self._lives.move_to_end(worker.register.incarnation)
        for name in [name for name, life in self._lives.items() if not life.alive][:-_REMEMBERED]:
            del self._lives[name]
            self._unwritten.discard(name)
            self._forgotten.append(name)

    # Inside

    def _charge_rest(self, worker: Worker, life: _Life, *, loading: bool) -> None:
        rest = life.busy_s - life.charged_s
        if 0 < rest < math.inf:
            self._rest(worker, rest, loading=loading)
            self.charged(worker, rest)

    def _of(self, worker: Worker) -> _Life:
        return self._lives.setdefault(worker.register.incarnation, _Life())
