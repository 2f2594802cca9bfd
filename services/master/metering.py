"""Who used how much: device seconds, samples, forwards, simulator seconds, bytes, from the first day.

In: what each piece of work took. Out: `UsageRecord`s to write down with the results they belong to, and `UsageReport`s.
Never: an estimate, or a result counted twice (a replay after a crash is not the tenant's use).
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import TypedDict, cast

import msgspec

from common.journal.records import UsageRecord
from joynexus.wire import ErrorCode
from joynexus.wire.front import GetUsage, UsageLine, UsageReport
from services.master.events import BlobServed, FrontMessage
from services.master.holdings import Holdings
from services.master.outbox import Outbox, refuse
from services.master.policy import PolicyKey

NO_POLICY = ""
"""The line of what belongs to no policy."""
_MONTH = re.compile(r"[0-9]{4}-[0-9]{2}")


class Use(TypedDict, total=False):
    """What something took; the fields of `UsageLine`."""

    trainer_s: float
    inference_s: float
    samples: int
    backbone_forwards: int
    env_s: float
    bytes_in: int
    bytes_out: int


class Meter:
    """Running totals by tenant and policy.

    Use by inference and simulators is written down every `flush_s`; so much of it may be lost with the master.
    """

    def __init__(self, outbox: Outbox, holdings: Holdings, flush_s: float) -> None:
        self._outbox = outbox
        self._holdings = holdings
        self._flush_s = flush_s
        self._totals: defaultdict[str, dict[str, UsageRecord]] = defaultdict(dict)
        self._unwritten: set[PolicyKey] = set()
        self._flushing = False

    def add(self, tenant: str, policy: str, use: Use) -> UsageRecord:
        """Count use, to be written down with the next flush; return the new total, to write it down earlier."""
        mine = self._totals[tenant]
        old = mine.get(policy) or UsageRecord(tenant=tenant, policy=policy)
        amounts = cast(Mapping[str, float], use).items()
        more = {field: getattr(old, field) + amount for field, amount in amounts if 0 < amount < math.inf}
        total = mine[policy] = msgspec.structs.replace(old, **more)
        self._unwritten.add((tenant, policy))
        if not self._flushing:
            self._flushing = True
            self._outbox.after(self._flush_s, self._flush)
        return total

    def written(self, tenant: str, policy: str) -> None:
        """The newest total is being written down by the caller."""
        self._unwritten.discard((tenant, policy))

    def restore(self, record: UsageRecord) -> None:
        """Take a total back from the journal."""
        self._totals[record.tenant][record.policy] = record

    def on_get(self, asked: FrontMessage, message: GetUsage) -> None:
        """Tell a tenant what it used, and an operator what all tenants used."""
        if message.since_month and not _MONTH.fullmatch(message.since_month):
            raise refuse(ErrorCode.INVALID, f"'{message.since_month[:20]}' is no month: write it as 2026-11")
        tenants = sorted({asked.tenant, *self._totals}) if asked.operator else [asked.tenant]
        lines = itertools.chain.from_iterable(map(self._lines, tenants))
        self._outbox.answer(asked, UsageReport(lines=tuple(lines)))

    def _lines(self, tenant: str) -> list[UsageLine]:
        totals = self._totals.get(tenant, {})
        lines = [_line(totals[policy]) for policy in sorted(totals)]
        stored = self._holdings.stored(tenant)
        if stored and (not lines or lines[0].policy != NO_POLICY):
            lines.insert(0, UsageLine(tenant=tenant, policy=NO_POLICY))
        if lines and lines[0].policy == NO_POLICY:
            lines[0] = msgspec.structs.replace(lines[0], bytes_stored=stored)
        return lines

    def on_served(self, event: BlobServed) -> None:
        """Bytes of a blob went to a tenant."""
        self.add(event.tenant, NO_POLICY, {"bytes_out": event.nbytes})

    def _flush(self) -> None:
        self._flushing = False
        if self._unwritten:
            self._outbox.save([self._totals[tenant][policy] for tenant, policy in sorted(self._unwritten)])
            self._unwritten.clear()


def _line(record: UsageRecord) -> UsageLine:
    return UsageLine(
        tenant=record.tenant,
        policy=record.policy,
        trainer_s=record.trainer_s,
        inference_s=record.inference_s,
        samples=record.samples,
        backbone_forwards=record.backbone_forwards,
        env_s=record.env_s,
        bytes_in=record.bytes_in,
        bytes_out=record.bytes_out,
    )
