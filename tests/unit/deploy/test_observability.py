"""What Prometheus and Grafana are given fits what the roles say, and each alert leads to its page of the runbook."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.metrics import ALERTED, ALL_METRICS
from tests.unit.docs.test_runbook import events

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "observability"
BOARDS = sorted((FOLDER / "grafana" / "dashboards").glob("*.json"))
PROMETHEUS = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
OF_THE_CLIENT = {  # of the Prometheus client's library, and of Prometheus
    "process_open_fds",
    "process_max_fds",
    "process_resident_memory_bytes",
    "process_cpu_seconds_total",
    "up",
}
OF_THE_SCRAPE = {"instance", "job", "service"}
WORDS = {  # of PromQL, as far as it is used here
    *("sum", "rate", "increase", "absent", "by", "le", "histogram_quantile", "or", "unless"),
}


def names_of(expr: str) -> Iterator[tuple[str, set[str]]]:
    """Each metric in an expression, with the labels that are asked of it."""
    grouped = {label.strip() for by in re.findall(r"\bby \(([^)]*)\)", expr) for label in by.split(",")} - {"le"}
    bare = re.sub(r"\bby \([^)]*\)", " ", expr)
    bare = re.sub(r"\[[^\]]*\]", " ", bare)
    for name, matchers in re.findall(r"([a-z_]+)(\{[^}]*\})?", re.sub(r'"[^"]*"', '""', bare)):
        if name not in WORDS and len(name) > 1:
            yield name, grouped | set(re.findall(r"([a-z_]+)\s*[=!]", matchers))


def wrong(expr: str) -> list[str]:
    """What an expression asks for and nobody says."""
    found = []
    for name, labels in names_of(expr):
        of_histogram = re.sub(r"_(bucket|sum|count)$", "", name)
        metric = ALL_METRICS.get(name) or ALL_METRICS.get(of_histogram)
        if name in OF_THE_CLIENT:
            known = set(OF_THE_SCRAPE)
        elif metric is None or (metric.kind == "histogram") != (name != metric.name):
            found.append(f"no metric {name}")
            continue
        else:
            known = {*metric.labels, *OF_THE_SCRAPE}
        found += [f"{name} has no label {label}" for label in labels - known]
    return found


def test_check_of_expressions_finds_what_it_is_there_for() -> None:
    assert wrong("rate(joynexus_opps_total[5m])") == ["no metric joynexus_opps_total"]
    assert wrong('joynexus_workers{policy="x"}') == ["joynexus_workers has no label policy"]
    assert wrong("sum by (le, tenant) (rate(joynexus_op_seconds_bucket[5m]))") == [
        "joynexus_op_seconds_bucket has no label tenant"
    ]
    assert wrong("joynexus_op_seconds") == ["no metric joynexus_op_seconds"]
    assert wrong('sum by (role) (joynexus_workers{phase!="lost"}) == 0') == []
    assert wrong('absent(up{service="x"} == 1) or joynexus_ready == 0') == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alert_asks_for_what_roles_say_and_names_its_page_of_the_runbook(rule: dict[str, Any]) -> None:
    assert wrong(rule["expr"]) == []
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"]
    page, _, section = rule["annotations"]["runbook"].partition("#")
    titles = re.findall(r"^## (.*)$", (ROOT / page).read_text(), re.MULTILINE)
    assert section in {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_events_that_alerts_ask_for_are_logged_and_have_a_line_from_the_start() -> None:
    asked = {
        event
        for rule in RULES
        for words in re.findall(r'event=~?"([^"]*)"', rule["expr"])
        for event in words.split("|")
    }
    assert asked == set(ALERTED)
    assert asked <= events().keys()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool here (it comes with Prometheus)")
@pytest.mark.parametrize(
    "words", [("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")], ids=["config", "alerts"]
)
def test_prometheus_itself_takes_the_files_and_alerts_go_off_when_they_should(words: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *words], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_have_names_of_their_own() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) > 15


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.stem)
def test_dashboard_asks_for_what_roles_say_and_its_panels_do_not_overlap(board: Path) -> None:
    content = json.loads(board.read_text())
    assert content["uid"].startswith("joynexus-")
    ids, taken = set(), set()
    for panel in content["panels"]:
        assert panel["title"]
        ids.add(panel["id"])
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert all(x < 24 for x, _ in cells)
        for target in panel.get("targets", ()):
            assert wrong(target["expr"].replace("$__rate_interval", "5m")) == [], panel["title"]
            assert target["datasource"]["uid"] == "prometheus"
    assert len(ids) == len(content["panels"])


def test_dashboards_find_the_source_that_is_provisioned() -> None:
    provisioning = FOLDER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["uid"] == "prometheus"
    assert len(BOARDS) == 2


def test_every_role_of_the_compose_project_is_read() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    roles = {name for name, service in services.items() if service["image"].startswith("joynexus/")}
    by_job = {job["job_name"]: job for job in PROMETHEUS["scrape_configs"]}
    (scrape,) = by_job["roles"]["dns_sd_configs"]
    assert set(scrape["names"]) == roles - {"keygen", "admin", "health", "dashboard"}  # the first three listen nowhere
    assert by_job["dashboard"]["static_configs"][0]["targets"] == ["dashboard:5714"]
    assert PROMETHEUS["rule_files"] == ["alerts.yml"]
    assert all(name in services for name in ("prometheus", "grafana"))


def test_each_metric_is_in_the_page_for_operators_with_its_kind_and_labels() -> None:
    page = (ROOT / "docs" / "operating.md").read_text()
    rows = dict(re.findall(r"^\| `(joynexus_[a-z_]+)` \| (.*) \|$", page, re.MULTILINE))
    said = {
        metric.name: f"{metric.kind} | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.help}".replace(
            "|  |", "| |"
        )
        for metric in ALL_METRICS.values()
    }
    assert rows == said


def test_the_dashboards_own_metrics_are_in_the_page_for_operators() -> None:
    code = (ROOT / "services" / "health" / "dashboard" / "metrics.py").read_text()
    page = (ROOT / "docs" / "operating.md").read_text()
    said = set(re.findall(r'"(joynexus_dashboard_[a-z_]+)"', code))
    assert said
    assert set(re.findall(r"`(joynexus_dashboard_[a-z_]+)`", page)) == said
