"""Pages that stay open: what changes in the cluster changes in them, and nothing else of them does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest

from joynexus.wire import ErrorCode
from services.health.dashboard.web import Web
from tests.browser.conftest import Shown, serving
from tests.unit.health.dashboard.pictures import AT, FakeSource, cluster, refused, sft

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow


@contextmanager
def never_loaded_anew(page: Page) -> Iterator[None]:
    """Hold that what follows is one and the same document."""
    page.evaluate("document.same = true")
    yield
    assert page.evaluate("document.same") is True


def says(page: Page, text: str) -> None:
    """Wait until a page says something."""
    page.wait_for_function("(text) => document.body.innerText.includes(text)", arg=text)


def test_loss_falls_before_the_eyes(shown: Shown) -> None:
    with shown.page("arm", "/jobs/arm-lab/job-1000") as page:
        before = page.locator("polyline.line").get_attribute("points")
        with never_loaded_anew(page):
            shown.source.jobs["arm-lab", "job-1000"] = sft(1234)
            says(page, "1,234 / 2,000 steps")
            assert page.locator("polyline.line").get_attribute("points") != before
            assert "at step 1,234" in page.locator(".says").inner_text()
            shown.source.jobs["arm-lab", "job-1000"] = sft(2000, state="succeeded")
            says(page, "2,000 / 2,000 steps")
            assert page.locator(".badge.ok").first.inner_text() == "succeeded"


def test_restart_scaling_and_a_new_job_appear_and_are_said_once(shown: Shown) -> None:
    with shown.page() as page, never_loaded_anew(page):
        whole = shown.source.whole
        new = msgspec.structs.replace(whole.jobs[0], job="job-1001", policy="a-new-policy")
        ended = msgspec.structs.replace(whole.jobs[0], state="succeeded")
        roles = tuple(
            msgspec.structs.replace(role, phase="lost" if role.worker == "trainer-1" else role.phase)
            for role in whole.roles
        )
        shown.source.whole = msgspec.structs.replace(
            whole, at=AT + 1, jobs=(new, ended, *whole.jobs[1:]), jobs_total=25, roles=roles
        )
        says(page, "a-new-policy")
        says(page, "lost: trainer-1, env-3")
        page.wait_for_function("() => document.getElementById('news').textContent.includes('trainer-1 is lost.')")
        assert "Job job-1000 succeeded." in page.locator("#news").inner_text()


def test_updates_leave_focus_selection_scroll_and_open_parts_alone(shown: Shown) -> None:
    shown.source.whole = cluster(jobs=200)
    small = {"width": 1280, "height": 400}
    with shown.page(path="/jobs?state=open", viewport=small) as page, never_loaded_anew(page):
        link = page.get_by_role("link", name="job-973", exact=True)
        link.scroll_into_view_if_needed()
        link.focus()
        page.evaluate("document.activeElement.same = true")
        scrolled = page.evaluate("scrollY")
        newer = [msgspec.structs.replace(shown.source.whole.jobs[0], job=f"job-{2000 + n}") for n in range(2)]
        for step in range(1, 4):
            view = cluster(AT + step, jobs=200)
            jobs = (*newer[:step], *view.jobs)
            shown.source.whole = msgspec.structs.replace(view, jobs=jobs, jobs_total=len(jobs) + step)
            says(page, f"Jobs {len(jobs) + step}")
        assert page.evaluate("document.activeElement.same") is True
        assert page.evaluate("document.activeElement.innerText") == "job-973"
        assert scrolled > 0
        page.goto(f"{shown.url}/jobs/arm-lab/job-1000")
        page.get_by_text("As a table").click()
        page.evaluate("document.same = true")
        shown.source.jobs["arm-lab", "job-1000"] = sft(801)
        says(page, "801 / 2,000 steps")
        assert page.get_by_role("table", name="Loss by step").is_visible()


def test_two_hundred_jobs_change_every_second_and_only_their_texts_are_touched(shown: Shown) -> None:
    shown.source.whole = cluster(jobs=200)
    with shown.page(path="/jobs") as page, never_loaded_anew(page):
        page.evaluate(
            """() => {
              window.rows = [...document.querySelectorAll("tbody tr")];
              window.added = 0;
              new MutationObserver((changes) => {
                for (const change of changes) window.added += change.addedNodes.length;
              }).observe(document.getElementById("s-jobs"), { childList: true, subtree: true });
            }"""
        )
        for step in range(1, 6):
            shown.source.whole = msgspec.structs.replace(cluster(AT + step, jobs=200), jobs_total=200 + step)
            says(page, f"Jobs {200 + step}")
        assert page.evaluate("rows.length") == 50
        assert page.evaluate("rows.every((row) => row.isConnected)")
        assert page.evaluate("added") < 50  # texts change in place: rows are not made anew


def test_absent_master_is_told_with_the_age_of_what_stands_there_and_its_return_too(shown: Shown) -> None:
    with shown.page() as page, never_loaded_anew(page):
        shown.source.failing = refused(ErrorCode.DEADLINE, "no answer within 4 s")
        says(page, "The master does not answer. What stands below is its picture of 14:03:22 UTC")
        assert page.get_by_role("link", name="job-1000", exact=True).is_visible()
        shown.source.failing = None
        page.locator("#s-banner .notice").wait_for(state="detached")


def test_absent_dashboard_is_told_and_found_again(browser: Browser) -> None:
    source = FakeSource()
    with serving(Web(source, cookie="test")) as url:
        shown = Shown(url, source, Web(source), browser)
        with shown.page() as page:
            says(page, "Jobs now")
            page.evaluate("stream.dispatchEvent(new Event('error'))")  # as when the connection breaks
            assert page.get_by_role("alert").inner_text().startswith("The connection to the dashboard is lost")
            page.evaluate("close()")
            page.evaluate("open()")
            page.get_by_role("alert").wait_for(state="hidden")


def test_session_that_ends_leads_to_the_door(shown: Shown) -> None:
    with shown.page("arm") as page:
        del shown.source.sessions["arm"]
        page.get_by_role("heading", name="Look into the cluster").wait_for()
        assert "You are no longer in" in page.get_by_role("alert").inner_text()
    shown.complaints.clear()  # the browser's line on the 403


def test_page_in_the_background_asks_for_nothing(shown: Shown) -> None:
    with shown.page() as page:
        says(page, "Jobs now")
        page.wait_for_function("() => stream !== null")
        page.evaluate(
            "Object.defineProperty(document, 'hidden', { value: true, configurable: true });"
            "document.dispatchEvent(new Event('visibilitychange', { bubbles: true }))"
        )
        page.wait_for_function("() => stream === null")
        page.evaluate(
            "Object.defineProperty(document, 'hidden', { value: false, configurable: true });"
            "document.dispatchEvent(new Event('visibilitychange', { bubbles: true }))"
        )
        shown.source.whole = msgspec.structs.replace(shown.source.whole, at=AT + 9, server="another release")
        says(page, "Jobs now")
        page.wait_for_function("() => stream !== null")
