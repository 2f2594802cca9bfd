"""A real browser, and a dashboard with pictures of the test's own behind it.

Chromium is the system's (`make test-browser` installs it, and Playwright). Where either is missing every test here is
skipped, with the reason.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn

from services.health.dashboard.service import Brief, listen
from services.health.dashboard.web import Web
from tests.unit.health.dashboard.pictures import FakeSource

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ARGS = (
    "--no-sandbox",  # tests may run as root, in a container
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_MS = 60_000


def missing() -> str:
    """Say what is missing; empty if all is there."""
    if not all(importlib.util.find_spec(name) for name in ("playwright", "axe_playwright_python")):
        return "Playwright is not installed: `make test-browser` installs it"
    if not chromium():
        return "there is no Chromium: `make test-browser` installs it"
    return ""


def chromium() -> str:
    """Return the system's Chromium; empty if there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if why := missing():
        for item in items:
            if "tests/browser/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(ARGS))
        yield browser
        browser.close()


@dataclass
class Shown:
    """A dashboard that a browser can reach.

    Attributes:
        url: its address.
        source: what it shows; a test changes it as it likes.
        pages: opened so far, with what they complained about.
    """

    url: str
    source: FakeSource
    web: Web
    browser: Any
    complaints: list[str] = field(default_factory=list)

    def code(self, session: str) -> str:
        """Return a code that lets in as a session."""
        self.source.codes[f"code-{session}"] = session
        return f"code-{session}"

    @contextmanager
    def page(self, session: str = "operator", path: str = "/", **context: Any) -> Iterator[Page]:
        """Open a page as somebody, in a browser of its own."""
        opened = self.browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
        try:
            page: Page = opened.new_page()
            page.set_default_timeout(PATIENCE_MS)
            page.on("pageerror", lambda error: self.complaints.append(str(error)))
            page.on("console", lambda said: said.type == "error" and self.complaints.append(said.text))
            if session:
                page.goto(f"{self.url}/login?code={self.code(session)}")
                page.wait_for_url(f"{self.url}/")
            if path != "/" or not session:
                page.goto(self.url + path)
            if context.get("java_script_enabled", True) and page.locator("body[data-events]").count():
                page.wait_for_function("() => stream?.readyState === EventSource.OPEN")
            yield page
        finally:
            opened.close()


@pytest.fixture
def shown(browser: Browser) -> Iterator[Shown]:
    """A dashboard, with a page's complaints (scripts that fail, what its policy blocks) counted as failures."""
    source = FakeSource()
    web = Web(source, cookie="test")
    with serving(web) as url:
        shown = Shown(url, source, web, browser)
        yield shown
    assert shown.complaints == []


@contextmanager
def serving(web: Web) -> Iterator[str]:
    """Serve a dashboard from a thread; gives its address."""
    listener = listen("127.0.0.1:0")
    config = uvicorn.Config(
        web.app, http=Brief, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)

    async def serve() -> None:
        await server.serve(sockets=[listener])
        await web.hub.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        with suppress(OSError):
            listener.close()
