"""`joynexus usage`: who used what, for which policy, job or month, and what that costs.

In: the master's lines of use, with the operator's prices if there are any. Out: a table that fits a terminal of 80
columns, JSON, or CSV with all figures. Never: a rounded figure in what programs read.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joynexus.cli._common import Config, Json, client, human_bytes, human_seconds, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from decimal import Decimal

    from joynexus.wire.front import UsageLine


class By(StrEnum):
    """What use is summed by, within each tenant."""

    tenant = "tenant"
    policy = "policy"
    job = "job"
    month = "month"


_KEYS = {By.tenant: ("tenant",), By.policy: ("tenant", "policy"), By.job: ("tenant", "policy", "job"),
         By.month: ("tenant", "month")}  # fmt: skip
_NAMED = ("tenant", "policy", "job", "month")
_FIGURES = ("trainer_s", "inference_s", "env_s", "samples", "backbone_forwards", "bytes_in", "bytes_out",
            "bytes_stored", "stored_byte_s")  # fmt: skip
_NOBODY = {"tenant": "(service)", "policy": "(none)", "job": "(own)", "month": "(before)"}


def usage(
    config: Config = None,
    by: Annotated[By, typer.Option(help="Sum by this, within each tenant.")] = By.policy,
    month: Annotated[str, typer.Option(help="Only this month of UTC, e.g. 2026-11.")] = "",
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV with all figures.")] = False,
    json: Json = False,
) -> None:
    """Show what this tenant used and what it costs; an operator sees all tenants, and the service's own use."""
    from joynexus.prices import from_text, rounded

    if csv and json:
        raise ValueError("either --csv or --json, not both")
    with client(config) as connected:
        report = connected.usage(month)
    prices = from_text(report.prices)
    lines = summed((line for line in report.lines if not month or line.month == month), by, month)
    costs = [prices.cost(line) if prices else None for line in lines]
    currency = prices.currency if prices else ""
    if json:
        figures = [_figures(line) | _priced(cost, currency) for line, cost in zip(lines, costs, strict=True)]
        print_json({"by": by, "month": month, "lines": figures})
        return
    if csv:
        _print_csv(lines, costs, currency)
        return
    if not lines:
        typer.echo(f"nothing was used{f' in {month}' if month else ''}")
        return
    tenants = {line.tenant for line in lines}
    several = len(tenants) > 1 or "" in tenants
    keys = [key for key in _KEYS[by] if key != "tenant" or several or by is By.tenant]
    rows = [
        (*(_named(line, key) for key in keys),
         *map(human_seconds, (line.trainer_s, line.inference_s, line.env_s)),
         *(() if by is By.job else (line.samples,)), "" if cost is None else rounded(cost))
        for line, cost in zip(lines, costs, strict=True)
    ]  # fmt: skip
    samples = () if by is By.job else ("samples",)
    print_table((*keys, "trainer", "inference", "env", *samples, currency), rows)
    moved = {what: sum(getattr(line, f"bytes_{what}") for line in lines) for what in ("in", "out", "stored")}
    typer.echo(", ".join(f"{human_bytes(nbytes)} {what}" for what, nbytes in moved.items()))
    if prices:
        total = sum(cost for line, cost in zip(lines, costs, strict=True) if line.tenant and cost is not None)
        whose = "tenants together" if several else "together"
        typer.echo(f"{whose} {rounded(total) if total else '0.00'} {currency}")


def summed(lines: Iterable[UsageLine], by: By, month: str = "") -> list[UsageLine]:
    """Return one line for each value of what is summed by, in their order, and with the month that all are of."""
    from joynexus.wire.front import UsageLine

    sums: dict[tuple[str, ...], dict[str, Any]] = {}
    for line in lines:
        into = sums.setdefault(tuple(getattr(line, key) for key in _KEYS[by]), dict.fromkeys(_FIGURES, 0))
        for figure in _FIGURES:
            into[figure] += getattr(line, figure)
    nobody: dict[str, Any] = dict.fromkeys(_NAMED, "") | {"month": month}
    return [
        UsageLine(**nobody | dict(zip(_KEYS[by], key, strict=True)), **figures) for key, figures in sorted(sums.items())
    ]


def _named(line: UsageLine, key: str) -> str:
    """Return a name for people; the service has no jobs of its own."""
    return getattr(line, key) or ("" if key == "job" and not line.tenant else _NOBODY[key])


def _figures(line: UsageLine) -> dict[str, Any]:
    return {name: getattr(line, name) for name in (*_NAMED, *_FIGURES)}


def _priced(cost: Decimal | None, currency: str) -> dict[str, Any]:
    return {} if cost is None else {"cost": f"{cost:f}", "currency": currency}


def _print_csv(lines: Sequence[UsageLine], costs: Sequence[Decimal | None], currency: str) -> None:
    import csv

    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow((*_NAMED, *_FIGURES, "cost", "currency"))
    for line, cost in zip(lines, costs, strict=True):
        table.writerow((*_figures(line).values(), "" if cost is None else f"{cost:f}", currency))
