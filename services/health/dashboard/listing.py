"""Which rows of a long table a page shows: filtered, sorted and cut into pages here, never in the browser.

In: rows of the master's picture and the page's address. Out: the rows of one page, and addresses of its neighbours.
Never: an error for an address that makes no sense: what is not understood is as if it were not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import urlencode

if TYPE_CHECKING:
    from joynexus.wire.back import JobRow, PolicyRow

ROWS = 50
"""Rows of a page."""

ENDED = frozenset({"succeeded", "failed", "cancelled"})
OPEN = "open"
"""The state filter for jobs that have not ended."""

_LARGEST_FIRST = frozenset({"progress", "value", "time", "version", "step", "waiting", "size"})

Row = TypeVar("Row")


@dataclass(frozen=True)
class Query:
    """What a page's address asks for; an empty text or 0 means all, or the table's own order.

    Attributes:
        page: counted from 1.
    """

    state: str = ""
    kind: str = ""
    tenant: str = ""
    sort: str = ""
    page: int = 1

    @staticmethod
    def of(params: Mapping[str, str]) -> Query:
        """Read an address's parameters."""
        page = params.get("page", "1")
        return Query(
            **{name: params.get(name, "")[:256] for name in ("state", "kind", "tenant", "sort")},
            page=int(page) if page.isascii() and page.isdigit() and len(page) < 6 else 1,
        )

    def sorted_by(self, name: str) -> str:
        """Return the address that sorts by a column: first its natural way, then the other way, then not at all."""
        ways = [f"-{name}", name] if name in _LARGEST_FIRST else [name, f"-{name}"]
        return self.but(sort=[*ways, ""][ways.index(self.sort) + 1 if self.sort in ways else 0])

    def but(self, **changes: Any) -> str:
        """Return the address (its part from `?` on) of this query with changes; a change goes back to page 1."""
        changed = replace(self, **{"page": 1, **changes})
        kept = {name: value for name, value in vars(changed).items() if value not in ("", 1)}
        return "?" + urlencode(kept) if kept else "?"


@dataclass(frozen=True)
class Listing(Generic[Row]):
    """One page of a table.

    Attributes:
        rows: of this page.
        matching: rows on all pages.
        first, last: numbers of the page's rows among these, counted from 1; 0 if there are none.
        pages: how many pages there are, at least 1.
        query: what was asked for, with a page that exists and a sort order that there is.
        states, kinds, tenants: how many rows each value of a filter would show.
    """

    rows: tuple[Row, ...]
    matching: int
    first: int
    last: int
    pages: int
    query: Query
    states: dict[str, int]
    kinds: dict[str, int]
    tenants: dict[str, int]

    @property
    def open(self) -> int:
        """How many rows the state filter `open` would show."""
        return sum(number for state, number in self.states.items() if state not in ENDED)


def list_jobs(jobs: Sequence[JobRow], query: Query) -> Listing[JobRow]:
    """Choose the jobs of a page; without another order the newest stand first."""
    return _list(jobs, query, _JOB_ORDERS, state=lambda job: job.state, kind=lambda job: job.kind)


def list_policies(policies: Sequence[PolicyRow], query: Query) -> Listing[PolicyRow]:
    """Choose the policies of a page."""
    return _list(policies, query, _POLICY_ORDERS, state=lambda _: "", kind=lambda policy: policy.backbone)


_JOB_ORDERS: dict[str, Callable[[Any], Any]] = {
    "job": lambda job: job.job,
    "policy": lambda job: (job.tenant, job.policy),
    "state": lambda job: job.state,
    "progress": lambda job: job.done / job.total if job.total else 0.0,
    "value": lambda job: (job.value_of, job.value if job.value == job.value else float("-inf")),
    "eta": lambda job: job.eta_s or float("inf"),
    "time": lambda job: job.seconds,
}
_POLICY_ORDERS: dict[str, Callable[[Any], Any]] = {
    "policy": lambda policy: (policy.tenant, policy.policy),
    "version": lambda policy: policy.version,
    "step": lambda policy: policy.step,
    "waiting": lambda policy: policy.waiting,
    "size": lambda policy: policy.nbytes,
}


def _list(
    rows: Sequence[Row],
    query: Query,
    orders: Mapping[str, Callable[[Any], Any]],
    *,
    state: Callable[[Row], str],
    kind: Callable[[Row], str],
) -> Listing[Row]:
    def tenant(row: Any) -> str:
        name: str = row.tenant
        return name

    def wanted(row: Row, filter: str) -> bool:
        if filter == "state" and query.state == OPEN:
            return state(row) not in ENDED
        value = {"state": state, "kind": kind, "tenant": tenant}[filter](row)
        return getattr(query, filter) in ("", value)

    filters = ("state", "kind", "tenant")
    counts: dict[str, Counter[str]] = {}
    for filter, of in zip(filters, (state, kind, tenant), strict=True):
        others = [other for other in filters if other != filter]
        counts[filter] = Counter(of(row) for row in rows if all(wanted(row, other) for other in others))
    matching = [row for row in rows if all(wanted(row, filter) for filter in filters)]
    name, down = query.sort.removeprefix("-"), query.sort.startswith("-")
    if name in orders:
        matching.sort(key=orders[name], reverse=down)
    pages = max(1, -(-len(matching) // ROWS))
    page = min(max(1, query.page), pages)
    shown = tuple(matching[(page - 1) * ROWS : page * ROWS])
    first = (page - 1) * ROWS + 1 if shown else 0
    return Listing(
        rows=shown,
        matching=len(matching),
        first=first,
        last=first + len(shown) - 1 if shown else 0,
        pages=pages,
        query=replace(query, page=page, sort=query.sort if name in orders else ""),
        states=dict(sorted(counts["state"].items())),
        kinds=dict(sorted(counts["kind"].items())),
        tenants=dict(sorted(counts["tenant"].items())),
    )
