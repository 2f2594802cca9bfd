"""Budgets: what a tenant may use in a month, in the operator's currency.

In: use as it is metered, the operator's prices and limits, the turn of the month. Out: who is over, in a sentence, and
word when that changes. Never: anything taken back that was accepted: a tenant that is over finishes what is under way,
and begins nothing new.

Whether a tenant is over follows from its use, which is in the journal; so a restart changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from decimal import Decimal

from joynexus.prices import Prices, rounded
from joynexus.wire import ErrorCode
from services.master.calendar import end_of_month, month_of
from services.master.limits import Limits
from services.master.metering import Meter
from services.master.outbox import Outbox, refuse

_NEARLY = Decimal("0.8")


class Budgets:
    """Who is over its budget.

    Attributes:
        changed: called with a tenant that is over its budget now, or is not any more.
    """

    def __init__(self, outbox: Outbox, meter: Meter, limits: Limits) -> None:
        self._outbox = outbox
        self._meter = meter
        self._limits = limits
        self._prices: Prices | None = None
        self._over: dict[str, str] = {}  # tenant -> the sentence that says so
        self._warned: set[tuple[str, str, float]] = set()  # tenant, month, budget
        self._waiting = False
        self.changed: Callable[[str], None] = lambda tenant: None
        meter.spent = self.look

    @property
    def prices(self) -> Prices | None:
        """The operator's prices."""
        return self._prices

    def change_prices(self, prices: Prices | None) -> None:
        """The operator's prices are these now; without any, nobody is over a budget."""
        self._prices = prices
        self.look_at_all()

    def look_at_all(self) -> None:
        """Prices, limits or the month have changed."""
        self.look({*self._limits.tenants(), *self._over})

    def resume(self) -> None:
        """Use is restored: whoever was over when the master went down is over, and nobody is told anew."""
        for tenant in self._limits.tenants():
            if sentence := self._sentence(tenant):
                self._over[tenant] = sentence
                self._wait()

    def look(self, tenants: Collection[str]) -> None:
        """These tenants have used something."""
        for tenant in sorted(tenants):
            before, sentence = self._over.get(tenant), self._sentence(tenant)
            if sentence:
                self._over[tenant] = sentence
                self._wait()
            else:
                self._over.pop(tenant, None)
            if bool(before) != bool(sentence):
                cost, budget = self.state(tenant)
                if sentence:
                    self._outbox.log("warning", "over_budget", tenant=tenant, cost=cost, budget=budget)
                else:
                    self._outbox.log("info", "within_budget", tenant=tenant, cost=cost, budget=budget)
                self.changed(tenant)

    def over(self, tenant: str) -> str:
        """Say that a tenant is over its budget; empty if it is not."""
        return self._over.get(tenant, "")

    def check(self, tenant: str) -> None:
        """Refuse what a tenant asks for if it is over its budget; JoyNexusError `OVER_BUDGET`."""
        if sentence := self.over(tenant):
            raise refuse(ErrorCode.OVER_BUDGET, sentence)

    def state(self, tenant: str) -> tuple[str, str]:
        """Return what a tenant's month has cost so far, and what it may cost, as text; empty where nothing is set."""
        budget = self._limits.of(tenant).budget
        cost = "" if self._prices is None else f"{rounded(self._cost(tenant))} {self._prices.currency}"
        return cost, "" if budget is None else plain(budget)

    # Inside

    def _cost(self, tenant: str) -> Decimal:
        return Decimal(0) if self._prices is None else self._prices.cost(self._meter.this_month(tenant))

    def _sentence(self, tenant: str) -> str:
        budget = self._limits.of(tenant).budget
        if budget is None or self._prices is None:
            return ""
        cost, most = self._cost(tenant), Decimal(repr(budget))
        month = month_of(self._outbox.now)
        if cost >= most:
            return (
                f"this tenant has used up its budget of {plain(budget)} {self._prices.currency} for {month}: it goes "
                "on by itself next month, or once the operator raises the budget"
            )
        self._warn(tenant, budget, month, nearly=cost >= _NEARLY * most)
        return ""

    def _warn(self, tenant: str, budget: float, month: str, *, nearly: bool) -> None:
        """Say once that most of it is used."""
        if nearly and (tenant, month, budget) not in self._warned:
            self._warned = {warned for warned in self._warned if warned[1] == month} | {(tenant, month, budget)}
            cost, _ = self.state(tenant)
            self._outbox.log("warning", "budget_nearly_used", tenant=tenant, cost=cost, budget=plain(budget))

    def _wait(self) -> None:
        """Look again when the month is over."""
        if self._waiting:
            return
        self._waiting = True

        def turn() -> None:
            self._waiting = False
            self.look_at_all()

        self._outbox.after(end_of_month(self._outbox.now) + 1.0 - self._outbox.now, turn)


def plain(budget: float) -> str:
    """Return a budget as people write it: with all its digits, without an exponent."""
    return f"{budget:.15g}"
