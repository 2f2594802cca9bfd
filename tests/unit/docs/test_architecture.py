"""The documentation says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from docs.draw_states import PAGE, drawn

ROOT = Path(__file__).resolve().parents[3]


def test_the_pages_state_diagram_is_the_codes_table() -> None:
    page = PAGE.read_text()
    assert drawn(page) == page, "run python -m docs.draw_states"


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())]
    assert links
    broken = [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()]
    assert not broken
