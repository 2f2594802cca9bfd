"""What use costs: the operator's price list, and sums in its currency.

In: `prices.toml` in the folder of keys, lines of use. Out: amounts, exact to the last digit (`Decimal`). Never: a
rounded sum (whoever shows one rounds it), or a price that nobody has set.

    currency = "EUR"
    trainer_s = 0.0008          # a busy second of a trainer's device
    inference_s = 0.0006
    env_s = 0.0001              # of a simulator's CPU
    stored_gb_month = 0.02      # 10^9 bytes kept for 30 days
    out_gb = 0.05               # 10^9 bytes sent to the tenant
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from decimal import Decimal
from typing import Protocol

import msgspec

from joynexus.unreadable import UNREADABLE

GB = 10**9
GB_MONTH = GB * 30 * 86_400
"""Bytes times seconds in a gigabyte that is kept for a month."""


class Use(Protocol):
    """What of a line of use costs something (`UsageLine`, and the master's own records)."""

    @property
    def trainer_s(self) -> float: ...  # noqa: D102 - as in UsageLine
    @property
    def inference_s(self) -> float: ...  # noqa: D102
    @property
    def env_s(self) -> float: ...  # noqa: D102
    @property
    def stored_byte_s(self) -> float: ...  # noqa: D102
    @property
    def bytes_out(self) -> int: ...  # noqa: D102


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A price list; what has no price costs nothing.

    Attributes:
        currency: as it is shown, e.g. `EUR`.
        trainer_s, inference_s, env_s: of a busy second.
        stored_gb_month: of 10^9 bytes kept for 30 days.
        out_gb: of 10^9 bytes sent to the tenant.
    """

    currency: str
    trainer_s: Decimal = Decimal(0)
    inference_s: Decimal = Decimal(0)
    env_s: Decimal = Decimal(0)
    stored_gb_month: Decimal = Decimal(0)
    out_gb: Decimal = Decimal(0)

    def __post_init__(self) -> None:
        """Refuse, with a ValueError, what is no price."""
        if not 1 <= len(self.currency) <= 16 or not self.currency.isprintable():
            raise ValueError("currency must be a short name, e.g. 'EUR'")
        for field in _PRICED:
            price = getattr(self, field)
            if not (price.is_finite() and 0 <= price < 10**9):
                raise ValueError(f"{field} must be a number that is not negative, not {price}")

    def cost(self, use: Use) -> Decimal:
        """Return what use costs, in the currency, not rounded."""
        return (
            _exact(use.trainer_s) * self.trainer_s
            + _exact(use.inference_s) * self.inference_s
            + _exact(use.env_s) * self.env_s
            + _exact(use.stored_byte_s) / GB_MONTH * self.stored_gb_month
            + Decimal(use.bytes_out) / GB * self.out_gb
        )

    def as_text(self) -> dict[str, str]:
        """Return currency and prices as text, for `UsageReport.prices`."""
        return {"currency": self.currency, **{field: f"{getattr(self, field)}" for field in _PRICED}}


_PRICED = ("trainer_s", "inference_s", "env_s", "stored_gb_month", "out_gb")


def from_text(said: Mapping[str, str]) -> Prices | None:
    """Return the prices of a `UsageReport`; None if it has none (or some that this release does not know)."""
    try:
        return msgspec.convert(dict(said), Prices) if said else None
    except msgspec.ValidationError:
        return None


def rounded(amount: Decimal) -> Decimal:
    """Return an amount for people: in hundredths."""
    return amount.quantize(Decimal("0.01"))


def parse_prices(content: bytes) -> Prices:
    """Return the price list that is the content of a `prices.toml`.

    Raises:
        ValueError: if it is none, with what is wrong about it.
    """
    try:
        said = tomllib.loads(content.decode(), parse_float=Decimal)
        if unknown := sorted(said.keys() - set(Prices.__struct_fields__)):
            raise ValueError(f"unknown key {unknown[0]!r}; there are {', '.join(Prices.__struct_fields__)}")
        return msgspec.convert(said, Prices)
    except ArithmeticError as error:  # an exponent that `Decimal` does not take
        raise ValueError("a number in it is beyond all bounds") from error
    except UNREADABLE as error:
        raise ValueError(str(error)) from error


def _exact(amount: float) -> Decimal:
    return Decimal(repr(amount))
