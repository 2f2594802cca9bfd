"""What use costs: exact, as the price list says, and a list that cannot be meant is refused in a sentence."""

from __future__ import annotations

import re
from decimal import Decimal

import pytest

from joynexus.prices import GB_MONTH, Prices, from_text, parse_prices, rounded
from joynexus.wire.front import UsageLine

TEXT = """
currency = "EUR"
trainer_s = 0.1
inference_s = 2
env_s = 0.0001
stored_gb_month = 0.02
out_gb = 0.05
"""


@pytest.fixture
def prices() -> Prices:
    return parse_prices(TEXT.encode())


def test_each_kind_of_use_has_its_price(prices: Prices) -> None:
    def cost(**use: float) -> Decimal:
        return prices.cost(UsageLine(tenant="a", policy="p", **use))  # type: ignore[arg-type]

    assert cost(trainer_s=3.0) == Decimal("0.3")  # and not 0.30000000000000004
    assert cost(inference_s=0.25) == Decimal("0.5")
    assert cost(env_s=12.5) == Decimal("0.00125")
    assert cost(stored_byte_s=2.0 * GB_MONTH) == Decimal("0.04")
    assert cost(bytes_out=3 * 10**9) == Decimal("0.15")
    assert cost(bytes_in=10**12, samples=10**6, backbone_forwards=5) == 0
    assert cost(trainer_s=3.0, inference_s=0.25) == Decimal("0.8")


def test_costs_of_the_parts_sum_up_to_the_cost_of_the_sum(prices: Prices) -> None:
    parts = [UsageLine(tenant="a", policy="p", trainer_s=0.1 * n, env_s=0.7 * n) for n in range(100)]
    total = UsageLine(
        tenant="a", policy="p", trainer_s=sum(p.trainer_s for p in parts), env_s=sum(p.env_s for p in parts)
    )
    assert sum(map(prices.cost, parts)) == pytest.approx(prices.cost(total), abs=Decimal("1e-9"))


def test_amounts_for_people_have_hundredths() -> None:
    assert str(rounded(Decimal("12.3456"))) == "12.35"
    assert str(rounded(Decimal(0))) == "0.00"


def test_prices_go_over_the_wire_as_they_are(prices: Prices) -> None:
    assert from_text(prices.as_text()) == prices
    assert prices.as_text()["trainer_s"] == "0.1"
    assert from_text({}) is None
    assert from_text({"currency": "EUR", "per_dream": "1"}) is None  # of a newer release


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("trainer_s = 1", "currency"),
        ('currency = ""', "currency must be a short name"),
        ('currency = "EUR"\ntrainer_s = -1', "trainer_s must be a number that is not negative"),
        ('currency = "EUR"\ntrainer_s = nan', "trainer_s must be a number"),
        ('currency = "EUR"\ntrainer_s = inf', "trainer_s must be a number"),
        ('currency = "EUR"\ntrainer_s = 1e99999999999999999999', "a number in it is beyond all bounds"),
        (
            'currency = "EUR"\ntrainers = 1',
            "unknown key 'trainers'; there are currency, trainer_s, inference_s, env_s, stored_gb_month, out_gb",
        ),
        ('currency = "EUR"\ntrainer_s = "dear"', "trainer_s"),
        ("currency =", "Invalid value"),
        ("a = " + "[" * 100_000, "recursion"),
        ("\udcff", "utf-8"),
    ],
)
def test_what_is_no_price_list_is_refused_in_a_sentence(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        parse_prices(text.encode("utf-8", "surrogateescape"))
