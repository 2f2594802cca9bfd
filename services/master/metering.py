"""Who used how much: device seconds, samples, forwards, simulator seconds, bytes, by policy, job and month.

In: what each piece of work took, and who had it done. Out: records to write down with the results they belong to, and
`UsageReport`s. Never: an estimate, or a result counted twice (a replay after a crash is not the tenant's use).

All of a worker's busy time is somebody's, so that the sum over all lines is the sum over all workers: a tenant's, or
the service's own, under a reason. `lives.py` finds what no answer was charged with.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypedDict, cast

import msgspec

from common.journal.records import LifeRecord, UsageRecord
from joynexus.wire import ErrorCode, Failure
from joynexus.wire.front import GetUsage, UsageLine, UsageReport
from services.master.calendar import end_of_month, month_of, months_between
from services.master.events import BlobServed, FrontMessage
from services.master.holdings import Holdings
from services.master.lives import Lives
from services.master.outbox import Outbox, refuse
from services.master.worker import Worker

_MONTH = re.compile(r"[0-9]{4}-(0[1-9]|1[0-2])")
_PAGE = 1000
"""Lines in one report: it is one message."""
_LINES, _FOLDED = 10_000, 1_000
"""A tenant's lines at most, and how many of the oldest then become part of others."""


class Account(NamedTuple):
    """Who had something done: a tenant, for a policy and a job if for any. The service itself is the tenant `""`."""

    tenant: str
    policy: str = ""
    job: str = ""


LOADING = Account("", "loading")
"""Backbones and versions on their way into memory: how many workers there are is the operator's choice."""
REPLAY = Account("", "replay")
"""What was done again, because a worker died over what came after it."""
FAILED = Account("", "failed")
"""What came to nothing through no fault of the tenant's."""
LOST = Account("", "lost")
"""Of what there is no answer that counts."""
EVERYBODY = Account("", "mounted")
"""The operator's data sets, prepared for all tenants."""


class Use(TypedDict, total=False):
    """What something took; the fields of `UsageLine`."""

    trainer_s: float
    inference_s: float
    samples: int
    backbone_forwards: int
    env_s: float
    bytes_in: int
    bytes_out: int
    stored_byte_s: float


_SECONDS = ("trainer_s", "inference_s", "env_s")


class _Key(NamedTuple):
    tenant: str
    policy: str
    job: str
    month: str


class _Sum:
    """Use that is summed up over lines."""

    def __init__(self, month: str = "") -> None:
        self.month = month
        self._amounts: dict[str, float] = {}

    def add(self, amounts: Mapping[str, float]) -> None:
        for field, amount in amounts.items():
            self._amounts[field] = self._amounts.get(field, 0) + amount

    def record(self, tenant: str) -> UsageRecord:
        whole: dict[str, Any] = dict(self._amounts)
        return UsageRecord(tenant=tenant, policy="", month=self.month, **whole)


class Meter:
    """Running totals.

    What is not written down with a result is written every `flush_s`; so much of it may be lost with the master.

    Attributes:
        prices: the operator's, as reports have them.
        spent: called, at most every `flush_s`, with the tenants that have used something since.
    """

    def __init__(self, outbox: Outbox, holdings: Holdings, flush_s: float) -> None:
        self._outbox = outbox
        self._holdings = holdings
        self._flush_s = flush_s
        self._totals: defaultdict[str, dict[_Key, UsageRecord]] = defaultdict(dict)
        self._months: dict[str, _Sum] = {}  # of each tenant, the sum of its lines of the newest month
        self._ever: defaultdict[str, _Sum] = defaultdict(_Sum)
        self._month = (math.inf, "")  # when it ends, and its name
        self._until: dict[str, float] = {}  # up to when bytes stored are counted, by tenant
        self._unwritten: set[_Key] = set()
        self._gone: list[UsageRecord] = []
        self._spenders: set[str] = set()
        self._flushing = False
        self.lives = Lives(self._rest)
        self.prices: dict[str, str] = {}
        self.spent: Callable[[Collection[str]], None] = lambda tenants: None

    # Counting

    def add(self, account: Account, use: Use) -> None:
        """Count use, to be written down with the next result or flush."""
        self._count(_Key(*account, self._now()), use)
        self._later()

    def worked(self, worker: Worker, account: Account, use: Use) -> None:
        """A worker has answered, and this is who had it done."""
        self.add(account, use)
        amounts = cast(Mapping[str, float], use)
        self.lives.charged(worker, sum(_sane(amounts.get(field, 0.0)) for field in _SECONDS))

    def unwritten(self) -> list[UsageRecord | LifeRecord]:
        """Return what is not written down yet: the caller writes it down, with the results that it belongs to."""
        records = [*self._gone, *(self._totals[key.tenant][key] for key in sorted(self._unwritten))]
        self._gone.clear()
        self._unwritten.clear()
        return [*records, *self.lives.unwritten()]

    def this_month(self, tenant: str) -> UsageRecord:
        """Return the sum of all that a tenant has used this month."""
        self._settle(tenant)
        known, month = self._months.get(tenant), self._now()
        return (known if known is not None and known.month == month else _Sum(month)).record(tenant)

    def totals(self) -> Mapping[str, UsageRecord]:
        """Return the sum of all that each tenant, and the service itself, has used since the first day (for views)."""
        return {tenant: total.record(tenant) for tenant, total in self._ever.items()}

    # Restart

    def restore(self, record: UsageRecord | LifeRecord) -> None:
        """Take a total back from the journal."""
        if isinstance(record, LifeRecord):
            self.lives.restore(record)
            return
        self._totals[record.tenant][_key(record)] = record
        self._sum(record, {field: getattr(record, field) for field in Use.__annotations__})
        if record.until_s:
            self._until[record.tenant] = max(record.until_s, self._until.get(record.tenant, 0.0))

    def resume(self) -> None:
        """Everything is restored: bytes that were kept while no master was there count too."""
        for tenant in self._until:
            self._settle(tenant)
        self._holdings.changing = self._storage_changes

    # Messages

    def on_get(self, asked: FrontMessage, message: GetUsage) -> None:
        """Tell a tenant what it used, and an operator what all tenants and the service used."""
        if message.since_month and not _MONTH.fullmatch(message.since_month):
            raise refuse(ErrorCode.INVALID, f"'{message.since_month[:20]}' is no month: write it as 2026-11")
        tenants = sorted({asked.tenant, *self._totals}) if asked.operator else [asked.tenant]
        lines: list[UsageLine] = []
        for tenant in tenants:
            if message.after is not None and tenant < message.after[0]:
                continue
            lines += self._lines(tenant, message.since_month, message.after)
            if len(lines) > _PAGE:
                break
        self._outbox.answer(asked, UsageReport(lines=tuple(lines[:_PAGE]), more=len(lines) > _PAGE, prices=self.prices))

    def on_served(self, event: BlobServed) -> None:
        """Bytes of a blob went to a tenant."""
        self.add(Account(event.tenant), {"bytes_out": event.nbytes})

    def _lines(self, tenant: str, since: str, after: tuple[str, str, str, str] | None) -> Iterable[UsageLine]:
        self._settle(tenant)
        now = _Key(tenant, "", "", self._now())
        for key in sorted(self._totals.get(tenant, ())):
            if key.month >= since and (after is None or key > after):
                line = _line(self._totals[tenant][key], self._holdings.stored(tenant) if key == now else 0)
                if line is not None:
                    yield line

    # Inside

    def _count(self, key: _Key, use: Use) -> None:
        amounts = {field: amount for field, said in cast(Mapping[str, float], use).items() if (amount := _sane(said))}
        old = self._totals[key.tenant].get(key) or UsageRecord(**key._asdict())
        self._totals[key.tenant][key] = _plus(old, amounts)
        self._sum(old, amounts)
        self._unwritten.add(key)
        self._spenders.add(key.tenant)
        if len(self._totals[key.tenant]) > _LINES:
            self._fold(key.tenant)

    def _fold(self, tenant: str) -> None:
        """Make the oldest lines part of others, as names are a tenant's choice: a job's of its policy's, and so on."""
        lines = self._totals[tenant]
        named = (key for key in lines if key.policy or key.job)
        for key in sorted(named, key=lambda key: key.month)[:_FOLDED]:
            line = lines.pop(key)
            self._unwritten.discard(key)
            self._gone.append(msgspec.structs.replace(line, gone=True))
            into = key._replace(job="") if key.job else key._replace(policy="")
            amounts = {field: getattr(line, field) for field in Use.__annotations__}
            lines[into] = _plus(lines.get(into) or UsageRecord(**into._asdict()), amounts)
            self._unwritten.add(into)

    def _sum(self, line: UsageRecord, amounts: Mapping[str, float]) -> None:
        """Count use in the sum of a tenant's month, and in that of all its months."""
        self._ever[line.tenant].add(amounts)
        known = self._months.get(line.tenant)
        if known is None or known.month < line.month:
            known = self._months[line.tenant] = _Sum(line.month)
        if known.month == line.month:
            known.add(amounts)

    def _now(self) -> str:
        """Return the month that it is."""
        if not self._outbox.now < self._month[0] < math.inf:
            self._month = end_of_month(self._outbox.now), month_of(self._outbox.now)
        return self._month[1]

    def _rest(self, worker: Worker, seconds: float, *, loading: bool) -> None:
        """A worker was busy for so long without anybody being charged."""
        field = {"trainer": "trainer_s", "inference": "inference_s", "env": "env_s"}[worker.role]
        self.add(LOADING if loading else LOST, cast(Use, {field: seconds}))

    def _storage_changes(self, tenant: str) -> None:
        """A tenant is about to keep more or less."""
        self._settle(tenant)
        self._unwritten.add(_Key(tenant, "", "", self._now()))  # up to when it is counted, at least
        self._later()

    def _settle(self, tenant: str) -> None:
        """Count the bytes that a tenant has kept until now."""
        now, stored = self._outbox.now, self._holdings.stored(tenant)
        since = self._until.get(tenant, now)
        self._until[tenant] = max(since, now)
        for month, seconds in months_between(since, now) if stored else ():
            self._count(_Key(tenant, "", "", month), {"stored_byte_s": stored * seconds})
        key = _Key(tenant, "", "", self._now())
        line = self._totals[tenant].get(key) or UsageRecord(**key._asdict())
        self._totals[tenant][key] = msgspec.structs.replace(line, until_s=self._until[tenant])

    def _later(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._outbox.after(self._flush_s, self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if records := self.unwritten():
            self._outbox.save(records)
        spenders, self._spenders = self._spenders, set()
        self.spent(spenders)


def bearer(account: Account, error: Failure | None) -> Account:
    """Return who is charged for work that was answered: not the tenant if the service is at fault."""
    return FAILED if error is not None and error.category == "server" else account


def _sane(amount: float) -> float:
    """What a worker says is a number, at most."""
    return amount if 0 < amount < math.inf else 0


def _plus(record: UsageRecord, amounts: Mapping[str, float]) -> UsageRecord:
    return msgspec.structs.replace(record, **{field: getattr(record, field) + more for field, more in amounts.items()})


def _key(record: UsageRecord) -> _Key:
    return _Key(record.tenant, record.policy, record.job, record.month)


def _line(record: UsageRecord, stored: int) -> UsageLine | None:
    """Return a line of a report; None if there is nothing in it."""
    amounts = {field: getattr(record, field) for field in Use.__annotations__}
    if not stored and not any(amounts.values()):
        return None
    return UsageLine(**_key(record)._asdict(), **amounts, bytes_stored=stored)
