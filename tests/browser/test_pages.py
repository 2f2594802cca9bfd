"""What people do with the dashboard: with a mouse, a keyboard, a screen reader, a phone, at night, without scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from joynexus.wire import ErrorCode
from tests.browser.conftest import Shown
from tests.unit.health.dashboard.pictures import TENANTS, refused

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True}
PATHS = ("/", "/jobs", "/policies", "/jobs/arm-lab/job-1000", "/jobs/kitchen/job-999")


def focused(page: Page) -> str:
    """Text of what has the focus."""
    text: str = page.evaluate("document.activeElement.innerText || document.activeElement.id")
    return text.strip()


def tab_to(page: Page, text: str) -> None:
    """Press Tab until something is reached."""
    for _ in range(200):
        page.keyboard.press("Tab")
        if focused(page) == text:
            return
    raise AssertionError(f"'{text}' is not reached by Tab")


def test_operator_comes_in_looks_around_and_leaves(shown: Shown) -> None:
    with shown.page() as page:
        assert page.title() == "Overview · JoyNexus"
        page.get_by_role("navigation", name="Pages").get_by_role("link", name="Jobs").click()
        page.get_by_role("link", name="failed").click()
        page.wait_for_url("**/jobs?state=failed")
        assert page.locator("tbody tr").count() == 2
        page.goto(f"{shown.url}/jobs?state=open")
        page.get_by_role("link", name="job-1000", exact=True).click()
        assert page.get_by_role("heading", name="job-1000").is_visible()
        assert page.get_by_role("img", name="Loss by step").is_visible()
        page.get_by_text("As a table").click()
        assert page.get_by_role("table", name="Loss by step").is_visible()
        page.get_by_role("link", name="Policies").click()
        page.get_by_role("link", name="Version").click()
        page.wait_for_url("**/policies?sort=-version")
        assert page.get_by_role("columnheader", name="Version").get_attribute("aria-sort") == "descending"
        page.get_by_role("button", name="Log out").click()
        page.wait_for_url("**/login")
        page.goto(shown.url)
        assert page.get_by_role("heading", name="Look into the cluster").is_visible()


def test_code_can_be_typed_and_a_wrong_one_is_told(shown: Shown) -> None:
    with shown.page(session="", path="/login") as page:
        page.get_by_label("Code").fill("wrong")
        page.get_by_role("button", name="Look in").click()
        assert "This code is wrong" in page.get_by_role("alert").inner_text()
        page.get_by_label("Code").fill(shown.code("arm"))
        page.keyboard.press("Enter")
        page.wait_for_url(f"{shown.url}/")
        assert page.get_by_text("arm-lab").first.is_visible()
    shown.complaints.clear()  # the browser's line on the 403


def test_tenant_sees_no_name_of_another(shown: Shown) -> None:
    others = [tenant for tenant in TENANTS if tenant != "kitchen"]
    with shown.page("kitchen") as page:
        for path in ("/", "/jobs", "/policies", "/jobs/kitchen/job-999"):
            page.goto(shown.url + path)
            assert not [tenant for tenant in others if tenant in page.content()]


def test_everything_is_reached_by_keyboard(shown: Shown) -> None:
    with shown.page() as page:
        page.keyboard.press("Tab")
        assert focused(page) == "Skip to content"
        assert page.get_by_role("link", name="Skip to content").is_visible()
        page.keyboard.press("Enter")
        assert focused(page).startswith("Overview") or page.evaluate("document.activeElement.id") == "main"
        page.keyboard.press("Shift+Tab")
        tab_to(page, "job-1000")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        page.keyboard.press("Enter")
        page.wait_for_url("**/jobs/arm-lab/job-1000")
        tab_to(page, "As a table")
        page.keyboard.press("Enter")
        assert page.get_by_role("table", name="Loss by step").is_visible()
        page.goto(f"{shown.url}/jobs")
        tab_to(page, "Time")
        page.keyboard.press("Enter")
        page.wait_for_url("**/jobs?sort=-time")


@pytest.mark.parametrize(("scheme", "screen"), [("light", "wide"), ("dark", "phone")])
def test_nothing_stands_in_the_way_of_assistive_technology(shown: Shown, scheme: str, screen: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    axe = Axe()
    with shown.page(color_scheme=scheme, **(PHONE if screen == "phone" else {})) as page:
        for path in (*PATHS, "/login", "/nowhere"):
            page.goto(shown.url + path)
            page.evaluate("document.querySelectorAll('details').forEach((details) => (details.open = true))")
            found = axe.run(page).response["violations"]
            told = [f"{rule['id']}: {node['html'][:200]}" for rule in found for node in rule["nodes"]]
            assert told == [], path
    shown.complaints.clear()  # the browser's line on the 404


def test_phone_scrolls_down_and_never_sideways(shown: Shown) -> None:
    with shown.page(**PHONE) as page:
        for path in (*PATHS, "/login"):
            page.goto(shown.url + path)
            assert page.evaluate("document.documentElement.scrollWidth") == 390, path
            page.evaluate("scrollTo(1000, 0)")
            assert page.evaluate("scrollX") == 0


def test_night_is_dark_and_day_is_light(shown: Shown) -> None:
    brightness = {}
    for scheme in ("light", "dark"):
        with shown.page(color_scheme=scheme) as page:
            color = page.evaluate("getComputedStyle(document.body).backgroundColor")
            brightness[scheme] = sum(int(part) for part in color.strip("rgb()").split(","))
    assert brightness["light"] > 600
    assert brightness["dark"] < 150


def test_who_wants_no_motion_gets_none(shown: Shown) -> None:
    with shown.page(reduced_motion="reduce") as page:
        moving = page.evaluate(
            "[...document.querySelectorAll('*')].filter((node) =>"
            " parseFloat(getComputedStyle(node).transitionDuration) ||"
            " getComputedStyle(node).animationName !== 'none').length"
        )
        assert moving == 0


def test_without_scripts_pages_say_the_same_and_load_anew(shown: Shown) -> None:
    with shown.page(java_script_enabled=False, path="/jobs/arm-lab/job-1000") as page:
        assert page.get_by_text("700 / 2,000 steps").is_visible()
        assert page.locator("noscript meta[http-equiv=refresh]").count() == 1


def test_absent_master_and_wrong_addresses_have_plain_pages(shown: Shown) -> None:
    with shown.page() as page:
        page.goto(f"{shown.url}/nowhere")
        assert page.get_by_role("heading", name="There is no such page").is_visible()
        page.goto(f"{shown.url}/jobs/arm-lab/none")
        assert page.get_by_role("heading", name="There is no such job").is_visible()
    shown.source.failing = refused(ErrorCode.DEADLINE, "no answer within 4 s")
    with shown.page(session="") as page:
        page.context.add_cookies([{"name": "test", "value": "operator-2", "url": shown.url}])
        page.goto(shown.url)
        assert page.get_by_role("heading", name="The cluster does not answer").is_visible()
    shown.complaints.clear()
