"""Names, units and lines of metrics, and how many lines there can be."""

from __future__ import annotations

import logging
import re

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from common import telemetry
from common.metrics import ALL_METRICS, EVERY_ROLE, MASTER, OTHERS, WORKERS, Figures, Metric, Page, Tenants, render

NO_BASE_UNITS = re.compile(r"_(ms|milliseconds|us|minutes|hours|kb|mb|mib|gib|percent|count)(_|$)")


def complaints(metric: Metric) -> list[str]:
    """What `promtool check metrics` would say, and what this house adds."""
    name, found = metric.name, []
    if not re.fullmatch(r"joynexus(_[a-z]+)+", name):
        found.append("a name is joynexus_ and lower-case words")
    if NO_BASE_UNITS.search(name):
        found.append("units are base units: seconds, bytes")
    if (metric.kind == "counter") != name.endswith("_total"):
        found.append("counters, and only they, end in _total")
    if metric.kind == "histogram" and list(metric.buckets) != sorted(set(metric.buckets)):
        found.append("buckets rise")
    if (metric.kind == "histogram") != bool(metric.buckets):
        found.append("histograms, and only they, have buckets")
    if {"policy", "job", "request", "task", "worker", "instance"} & set(metric.labels):
        found.append("labels have few values")
    if not (metric.help.endswith(".") and metric.help[0].isupper()):
        found.append("help is a sentence")
    return found


@pytest.mark.parametrize("name", ALL_METRICS)
def test_name_unit_and_type_follow_the_rules_of_prometheus(name: str) -> None:
    assert complaints(ALL_METRICS[name]) == []


def test_lint_finds_what_it_is_there_for() -> None:
    assert complaints(Metric("joynexus_wait_ms", "gauge", "Wait.")) == ["units are base units: seconds, bytes"]
    assert complaints(Metric("joynexus_x_total", "gauge", "X.")) == ["counters, and only they, end in _total"]
    assert complaints(Metric("joynexus_x", "histogram", "X.", (), (2.0, 1.0))) == ["buckets rise"]
    assert len(complaints(Metric("X", "counter", "x", ("job",)))) == 4


def test_a_metric_is_in_one_table() -> None:
    assert len(ALL_METRICS) == len(EVERY_ROLE) + len(WORKERS) + len(MASTER)


def test_text_says_what_was_counted() -> None:
    figures = Figures()
    figures.add("joynexus_ops_total", "act", "ok")
    figures.add("joynexus_ops_total", "act", "ok", by=2)
    figures.put("joynexus_disk_free_bytes", 'a "folder"\n', value=3.5)
    for seconds in (0.001, 0.001, 0.3, 1e6):
        figures.observe("joynexus_journal_commit_seconds", value=seconds)
    families = {family.name: family for family in text_string_to_metric_families(render(figures).decode())}
    assert families.keys() == {"joynexus_ops", "joynexus_disk_free_bytes", "joynexus_journal_commit_seconds"}
    (ops,) = families["joynexus_ops"].samples
    assert (ops.name, ops.labels, ops.value) == ("joynexus_ops_total", {"op": "act", "outcome": "ok"}, 3.0)
    assert families["joynexus_disk_free_bytes"].samples[0].labels == {"folder": 'a "folder"\n'}
    commits = {(s.name.removeprefix("joynexus_journal_commit_seconds"), s.labels.get("le", "")): s.value
               for s in families["joynexus_journal_commit_seconds"].samples}  # fmt: skip
    assert commits["_bucket", "0.001"] == 2  # a bound belongs to its bucket
    assert commits["_bucket", "0.2"] == 2
    assert commits["_bucket", "0.5"] == 3
    assert commits["_bucket", "5"] == 3
    assert commits["_bucket", "+Inf"] == commits["_count", ""] == 4
    assert commits["_sum", ""] == pytest.approx(1e6 + 0.302)


def test_every_metric_can_be_written_and_read() -> None:
    figures = Figures()
    for metric in ALL_METRICS.values():
        put = figures.observe if metric.kind == "histogram" else figures.put
        put(metric.name, *("x" for _ in metric.labels), value=1.0)
    families = list(text_string_to_metric_families(render(figures, process=True).decode()))
    kinds = {family.name: family.type for family in families if family.name.startswith("joynexus")}
    assert kinds == {metric.name.removesuffix("_total"): metric.kind for metric in ALL_METRICS.values()}
    assert {"process_cpu_seconds", "process_open_fds", "process_resident_memory_bytes"} <= {f.name for f in families}


def test_a_hundred_tenants_have_a_line_of_their_own_and_keep_it() -> None:
    tenants = Tenants(most=3)
    assert [tenants.label(name) for name in ("d", "c", "b", "a", "d", "z")] == ["d", "c", "b", OTHERS, "d", OTHERS]


def test_page_is_made_once_a_second_however_often_it_is_read() -> None:
    now, made = [0.0], []

    def gather(figures: Figures) -> None:
        made.append(now[0])
        figures.put("joynexus_policies", value=len(made))

    page = Page(gather, Figures(), lambda: now[0])
    for at in (0.0, 0.5, 0.99, 1.0, 1.5):
        now[0] = at
        page.text()
    assert made == [0.0, 1.0]
    assert b"joynexus_policies 2.0" in page.text()


def test_warnings_are_counted_by_event_and_sentences_together(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers, root.level
    counted = telemetry.noted()
    try:
        telemetry.configure("env")
        log = telemetry.get_logger("test")
        log.info("registered")
        log.warning("worker_lost", worker="x")
        log.warning("worker_lost", worker="y")
        logging.getLogger("library").error("disk %s of %s", "1", "2")
        logging.getLogger("library").error("disk %s of %s", "3", "4")
    finally:
        root.handlers, root.level = before
        structlog.reset_defaults()
    more = {key: count - counted.get(key, 0) for key, count in telemetry.noted().items() if count > counted.get(key, 0)}
    assert more == {"worker_lost": 2, "a sentence": 2}
