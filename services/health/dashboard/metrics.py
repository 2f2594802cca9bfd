"""The dashboard's own few metrics, in the text format of Prometheus.

In: what was counted. Out: the text. Never: a label that grows with viewers, tenants or jobs.
"""

from __future__ import annotations

from collections import Counter


class Counts:
    """Counts answers by the first digit of their status."""

    def __init__(self) -> None:
        self._answers: Counter[int] = Counter()

    def answered(self, status: int) -> None:
        """Count an answer."""
        self._answers[status // 100] += 1

    def text(self, *, streams: int, scopes: int, sections: int, ready: bool) -> str:
        """Return all metrics as text."""
        lines = [
            *_head("joynexus_dashboard_answers_total", "counter", "Answers to requests, by class of their status."),
            *(
                f'joynexus_dashboard_answers_total{{status="{status}xx"}} {self._answers[status]}'
                for status in range(2, 6)
            ),
            *_one("joynexus_dashboard_streams", "gauge", "Pages that are kept up to date now.", streams),
            *_one("joynexus_dashboard_scopes", "gauge", "Tenants (or all) of which there is a picture.", scopes),
            *_one("joynexus_dashboard_sections_total", "counter", "Sections of pages that were rendered.", sections),
            *_one("joynexus_dashboard_ready", "gauge", "Whether the master knows this dashboard.", int(ready)),
        ]
        return "\n".join(lines) + "\n"


def _one(name: str, kind: str, text: str, value: int) -> list[str]:
    return [*_head(name, kind, text), f"{name} {value}"]


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
