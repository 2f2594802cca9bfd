"""How figures read, which rows a table shows, what a curve looks like."""

from __future__ import annotations

import math

import pytest

from services.health.dashboard import figures
from services.health.dashboard.chart import HEIGHT, POINTS, TABLE, WIDTH, draw
from services.health.dashboard.listing import ROWS, Query, list_jobs, list_policies
from tests.unit.health.dashboard.pictures import cluster


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (0.42, "0.4 s"), (12.4, "12 s"), (59.7, "1 min 00 s"), (200, "3 min 20 s"), (1500, "25 min"),
        (3900, "1 h 05 min"), (180_000, "2 d 2 h"), (math.nan, "–"), (-1, "–"), (math.inf, "–"),
    ],
)  # fmt: skip
def test_duration_has_at_most_two_units(seconds: float, text: str) -> None:
    assert figures.duration(seconds) == text


def test_share_is_not_rounded_to_nothing_or_all() -> None:
    assert [figures.percent(share) for share in (0, 0.001, 0.5, 0.999, 1)] == [
        "0 %",
        "< 1 %",
        "50 %",
        "> 99 %",
        "100 %",
    ]


def test_rate_is_told_by_a_unit_in_which_something_happens() -> None:
    assert [figures.rate(each, "steps") for each in (11.51, 0.5, 0.008623)] == [
        "11.5 steps/s",
        "30 steps/min",
        "31 steps/h",
    ]


def test_numbers_are_short_and_times_say_their_zone() -> None:
    assert figures.amount(0.04606123) == "0.04606"
    assert figures.amount(1e-7) == "1.00e-07"
    assert figures.amount(math.nan) == "–"
    assert figures.nbytes(0) == "0 B"
    assert figures.nbytes(5 * 1024**2) == "5.0 MiB"
    assert figures.iso(1_796_047_402).endswith("Z")
    assert figures.plural(1, "policy", "policies") == "1 policy"
    assert figures.plural(1234, "job") == "1,234 jobs"


# Tables


def test_page_shows_fifty_rows_and_knows_its_neighbours() -> None:
    jobs = cluster(jobs=120).jobs
    page = list_jobs(jobs, Query(page=2))
    assert [row.job for row in page.rows] == [job.job for job in jobs[ROWS : 2 * ROWS]]
    assert (page.first, page.last, page.matching, page.pages) == (51, 100, 120, 3)


def test_filter_and_order_are_those_of_the_address() -> None:
    query = Query.of({"state": "open", "kind": "sft", "sort": "-progress", "page": "1", "evil": "1"})
    page = list_jobs(cluster(jobs=120).jobs, query)
    shares = [row.done / row.total for row in page.rows]
    assert shares == sorted(shares, reverse=True)
    assert {row.kind for row in page.rows} == {"sft"}
    assert not {row.state for row in page.rows} & {"succeeded", "failed", "cancelled"}


def test_filter_says_how_many_rows_each_of_its_values_would_show() -> None:
    jobs = cluster(jobs=120).jobs
    page = list_jobs(jobs, Query(kind="sft"))
    for state, number in page.states.items():
        assert list_jobs(jobs, Query(kind="sft", state=state)).matching == number
    assert list_jobs(jobs, Query(kind="sft", state="open")).matching == page.open


@pytest.mark.parametrize("page", ["0", "-1", "99999", "1e9", "²", "", "x" * 5000])
def test_address_without_sense_shows_a_page_all_the_same(page: str) -> None:
    listing = list_jobs(cluster(jobs=60).jobs, Query.of({"page": page, "sort": "-nothing"}))
    assert listing.rows
    assert 1 <= listing.query.page <= listing.pages
    assert listing.query.sort == ""


def test_column_is_sorted_one_way_then_the_other_then_not_at_all() -> None:
    sorts = ["", "-value", "value"]
    followed = [Query(sort=sort).sorted_by("value") for sort in sorts]
    assert followed == ["?sort=-value", "?sort=value", "?"]
    assert Query(sort="value", page=3, state="open").sorted_by("job") == "?state=open&sort=job"


def test_address_of_a_filter_keeps_the_others_and_begins_at_page_one() -> None:
    assert Query(state="open", tenant="a b&c", page=4).but(kind="rl") == "?state=open&kind=rl&tenant=a+b%26c"


def test_policies_are_filtered_by_backbone_and_sorted() -> None:
    page = list_policies(cluster().policies, Query(tenant="kitchen", sort="-step", kind="lite"))
    assert [row.policy for row in page.rows] == ["reach-ppo", "pick-place", "drawer"]


# Curves


def _curve(*values: float) -> list[tuple[float, float]]:
    return [(index + 1.0, value) for index, value in enumerate(values)]


def test_curve_says_what_it_shows() -> None:
    chart = draw(_curve(1.0, 0.5, 0.25), title="Loss", across="step", up="loss")
    assert chart.sentence == "loss is 0.25 at step 3, after 1 at step 1; lowest 0.25 at 3, highest 1 at 1."
    assert chart.rows == (("1", "1"), ("2", "0.5"), ("3", "0.25"))
    assert chart.y_ticks[0] == "1"
    assert len(chart.grid) == len(chart.y_ticks)


def test_long_curve_is_drawn_by_few_points_that_stay_in_its_box() -> None:
    chart = draw(_curve(*(math.sin(x / 50) for x in range(5000))), title="Loss", across="step", up="loss")
    (line,), (band,) = chart.lines, chart.bands
    points = [tuple(map(float, point.split(","))) for point in [*line.split(), *band.split()]]
    assert len(line.split()) <= POINTS
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    assert len(chart.rows) == TABLE
    assert chart.rows[-1][0] == "5,000"


def test_what_is_not_finite_is_a_gap() -> None:
    chart = draw(_curve(1.0, 2.0, math.nan, 3.0, math.inf, math.nan, 1.0), title="Loss", across="step", up="loss")
    assert [len(line.split()) for line in chart.lines] == [2, 2, 2]  # a lone point is drawn as a dot: twice the same
    assert "nan" not in str(chart).lower()


@pytest.mark.parametrize("values", [(), (math.nan,), (0.0,), (5.0, 5.0), (-1e-12, 1e-12), (1e30, -1e30), (1e-300,)])
def test_any_curve_can_be_drawn(values: tuple[float, ...]) -> None:
    chart = draw(_curve(*values), title="Loss", across="step", up="loss")
    assert chart.sentence
    assert all(math.isfinite(y) for y in chart.grid)
    assert len(chart.y_ticks) < 12


def test_success_is_drawn_between_nothing_and_all() -> None:
    chart = draw(
        _curve(0.2, 0.3), title="Success", across="update", up="success", text=figures.percent, bounds=(0.0, 1.0)
    )
    assert (chart.y_ticks[0], chart.y_ticks[-1]) == ("100 %", "0 %")
