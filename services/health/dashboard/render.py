"""Pages and their sections as HTML.

In: a scope's picture and what a page's address asks for. Out: HTML texts. Never: a text of a tenant's that is not
escaped, a style or a script within the page (its policy forbids both), or a section rendered twice of one picture.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from services.health.dashboard import figures, jobpage, listing, overview

if TYPE_CHECKING:
    from services.health.dashboard.curves import JobPicture
    from services.health.dashboard.hub import Scope

HERE = Path(__file__).parent
STATIC = HERE / "static"

SECTIONS: dict[str, tuple[str, ...]] = {
    "overview": ("banner", "summary", "running", "sharing", "queues", "use", "pools", "roles", "recent"),
    "jobs": ("banner", "jobs"),
    "policies": ("banner", "policies"),
    "job": ("banner", "job"),
}
"""The sections of each page that is kept up to date."""

TITLES = {"overview": "Overview", "jobs": "Jobs", "policies": "Policies", "job": "Job"}


@dataclass(frozen=True)
class Asked:
    """What a page's address asks for: which page, which rows, which job."""

    page: str
    query: listing.Query = field(default_factory=listing.Query)
    job: JobPicture | None = None

    @property
    def title(self) -> str:
        """The page's title."""
        return f"Job {self.job.name}" if self.job else TITLES[self.page]


class Renderer:
    """Templates, read once."""

    def __init__(self) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.filters.update(
            {
                name: getattr(figures, name)
                for name in ("duration", "count", "amount", "percent", "nbytes", "clock", "iso")
            }
        )
        self._environment.globals.update(
            {
                "plural": figures.plural,
                "mood": overview.mood,
                "overview": overview,
                "listing": listing,
                "jobpage": jobpage,
                "version": {path.name: _digest(path) for path in sorted(STATIC.iterdir())},
            }
        )
        for name in self._environment.list_templates():  # now: a checkout may get newer ones under an older dashboard
            self._environment.get_template(name)
        self.sections_rendered = 0

    def page(self, scope: Scope, asked: Asked, *, events: str, age_s: float) -> str:
        """Return a whole page with all its sections.

        Args:
            scope: whose picture.
            asked: which page.
            events: address of the stream that keeps it up to date.
            age_s: how old the picture is.
        """
        sections = {name: self.section(scope, asked, name, age_s=age_s) for name in SECTIONS[asked.page]}
        template = self._environment.get_template("page.html")
        return template.render(asked=asked, scope=scope, view=scope.view, sections=sections, events=events)

    def section(self, scope: Scope, asked: Asked, name: str, *, age_s: float) -> str:
        """Return one section; of one picture it is rendered once for all who see it."""
        job = (asked.job.tenant, asked.job.name) if asked.job and name == "job" else None
        query = asked.query if name == asked.page else None
        key = (name, query, job)
        if key not in scope.rendered:
            template = self._environment.get_template(f"sections/{name}.html")
            context: dict[str, Any] = {"view": scope.view, "scope": scope, "asked": asked, "age_s": age_s}
            scope.rendered[key] = template.render(context).strip()
            self.sections_rendered += 1
        return scope.rendered[key]

    def plain(self, template: str, *, title: str, **values: object) -> str:
        """Return a page without a picture: login, errors."""
        return self._environment.get_template(template).render(title=title, **values)


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()
