"""Cases of fault: each says which it is, checks invariants by name, and has a line in the table at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.verdict import MEANING, Verdict

_ROW = "chaos"
Row = tuple[str, str, str, str, float]
"""Case, what happens, outcome, invariants, seconds."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "case(number, what): a numbered case of fault, with a line in the table")


@pytest.fixture
def verdict(request: pytest.FixtureRequest) -> Iterator[Verdict]:
    """Takes assertions under the names of invariants."""
    verdict = Verdict()
    yield verdict
    case = request.node.get_closest_marker("case")
    assert case is not None, "a test with a verdict is a case: mark it with its number"
    number, what = case.args
    parameter = getattr(request.node, "callspec", None)
    shown = f"{what} ({parameter.id})" if parameter else what
    # Properties travel from the processes of xdist, with the report of this teardown.
    request.node.user_properties.append((_ROW, [str(number), shown, str(verdict)]))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [
        report
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport)
    ]
    outcomes: dict[str, list[str]] = {}
    seconds: dict[str, float] = {}
    for report in reports:
        outcomes.setdefault(report.nodeid, []).append(report.outcome)
        seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
    rows: dict[str, Row] = {}
    for report in reports:
        for name, row in report.user_properties:
            if name == _ROW:
                number, what, held = row
                failed = "failed" in outcomes[report.nodeid]
                rows[report.nodeid] = number, what, "FAILED" if failed else "passed", held, seconds[report.nodeid]
    if rows:
        _write(terminalreporter, sorted(rows.values(), key=lambda row: (int(row[0]), row[1])))


def _write(reporter: pytest.TerminalReporter, rows: list[Row]) -> None:
    wide = max(len(what) for _, what, *_ in rows)
    reporter.section("cases")
    reporter.write_line(f"{'case':>4}  {'what happens':<{wide}}  outcome  {'seconds':>7}  invariants")
    for number, what, outcome, held, seconds in rows:
        reporter.write_line(f"{number:>4}  {what:<{wide}}  {outcome:<7}  {seconds:7.1f}  {held}")
    for name, meaning in MEANING.items():
        reporter.write_line(f"{name}: {meaning}")
