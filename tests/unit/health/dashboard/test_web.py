"""What browsers are answered: pages, cookies, headers, and who is let in."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from starlette.testclient import TestClient

from joynexus.wire import ErrorCode
from services.health.dashboard import hub as hub_module
from services.health.dashboard import render
from services.health.dashboard import web as web_module
from services.health.dashboard.render import STATIC
from services.health.dashboard.web import Web
from tests.unit.health.dashboard.pictures import TENANTS, FakeSource, cluster, refused

URL = "http://127.0.0.1:5714"


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def web(source: FakeSource) -> Web:
    return Web(source)


@pytest.fixture
def browser(web: Web) -> Iterator[TestClient]:
    with TestClient(web.app, base_url=URL, raise_server_exceptions=False, follow_redirects=False) as client:
        yield client


def let_in(browser: TestClient, session: str) -> None:
    browser.cookies.set("joynexus", session)


# In and out


def test_code_is_good_once_and_leaves_a_cookie_that_scripts_and_other_sites_cannot_use(browser: TestClient) -> None:
    answer = browser.get("/login?code=open-sesame")
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "max-age=43200" in cookie
    assert "secure" not in cookie
    assert "Jobs now" in browser.get("/").text
    again = browser.get("/login?code=open-sesame")
    assert again.status_code == 403
    assert "wrong, was used, or is older than a minute" in again.text
    assert "set-cookie" not in again.headers


def test_behind_https_the_cookie_is_for_https_alone(source: FakeSource) -> None:
    web = Web(source, hosts=("dash.example",), https=True)
    with TestClient(web.app, base_url="https://dash.example") as browser:
        answer = browser.get("/login?code=open-sesame")
        assert answer.headers["set-cookie"].startswith("__Host-joynexus=operator;")
        assert "secure" in answer.headers["set-cookie"].lower()
        assert answer.headers["strict-transport-security"]
        assert "Jobs now" in browser.get("/").text


def test_browser_that_looks_ahead_does_not_use_the_code_up(browser: TestClient, source: FakeSource) -> None:
    browser.get("/login?code=open-sesame", headers={"sec-purpose": "prefetch;prerender"})
    browser.head("/login?code=open-sesame")
    assert "open-sesame" in source.codes


def test_who_guesses_codes_and_sessions_shuts_nobody_out_who_has_a_code(
    source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "STRANGERS_A_MINUTE", 3)
    with TestClient(Web(source, clock=lambda: 0.0).app, base_url=URL) as browser:  # all come from one address
        assert {browser.get(f"/login?code=guess-{number}").status_code for number in range(20)} == {403}
        for number in range(4):
            let_in(browser, f"forged-{number}")
            status = browser.get("/").status_code
        assert status == 503, "who makes up sessions has to wait"
        browser.cookies.clear()
        assert browser.get("/login?code=open-sesame").status_code == 200
        assert "Jobs now" in browser.get("/").text


def test_codes_that_are_tried_at_once_are_bounded_and_none_while_nobody_can_tell(
    source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_module, "LOGINS", 0)
    with TestClient(Web(source).app, base_url=URL) as browser:
        answer = browser.get("/login?code=open-sesame")
        assert (answer.status_code, 'content="5"' in answer.text) == (429, True), "the page comes again by itself"
    with TestClient(Web(source, unready=lambda: "away").app, base_url=URL) as browser:
        assert browser.get("/login?code=open-sesame").status_code == 503
    assert "open-sesame" in source.codes


def test_tenant_that_opens_pages_without_end_leaves_the_others_served(
    source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_module, "LOOKS_A_MINUTE", 3)
    with TestClient(Web(source, clock=lambda: 0.0).app, base_url=URL) as browser:
        let_in(browser, "arm")
        pages = ("/jobs", "/jobs/arm-lab/guess", "/events?page=none", "/policies", "/", "/jobs/arm-lab/guess")
        assert [browser.get(page).status_code for page in pages] == [200, 404, 404, 200, 429, 429]
        assert 'content="5"' in browser.get("/").text, "the page comes again by itself"
        let_in(browser, "operator")
        assert browser.get("/").status_code == 200


def test_without_a_session_every_page_is_the_door(browser: TestClient) -> None:
    for path, status in (("/", 200), ("/jobs", 403), ("/jobs/arm-lab/job-1000", 403), ("/events?page=overview", 403)):
        answer = browser.get(path)
        assert answer.status_code == status
        assert "joynexus dashboard" in answer.text
        assert "arm-lab" not in answer.text


def test_session_that_the_master_ended_is_told_so_and_its_cookie_goes(browser: TestClient, source: FakeSource) -> None:
    let_in(browser, "forged")
    answer = browser.get("/")
    assert answer.status_code == 403
    assert "You are no longer in" in answer.text
    assert "max-age=0" in answer.headers["set-cookie"].lower()


def test_logout_ends_the_session_and_only_a_form_of_ours_can_ask_for_it(
    browser: TestClient, web: Web, source: FakeSource
) -> None:
    let_in(browser, "arm")
    browser.get("/")
    for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "http://evil.example"}, {}):
        assert browser.post("/logout", headers=headers).status_code == 403
    assert web.hub.knows("arm") is not None
    answer = browser.post("/logout", headers={"sec-fetch-site": "same-origin"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert "max-age=0" in answer.headers["set-cookie"].lower()
    assert web.hub.knows("arm") is None
    assert source.sessions.get("arm") is None
    source.sessions["arm"] = "arm-lab"
    let_in(browser, "arm")
    assert browser.post("/logout", headers={"origin": URL}).status_code == 303


# What every answer has


PATHS = ("/", "/jobs", "/policies", "/login", "/nowhere", "/jobs/arm-lab/job-1000", "/static/live.js", "/healthz")


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_forbids_foreign_scripts_frames_and_guessed_types(browser: TestClient, path: str) -> None:
    let_in(browser, "operator")
    headers = browser.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"


@pytest.mark.parametrize("path", PATHS)
def test_private_pages_are_kept_by_no_cache(browser: TestClient, path: str) -> None:
    let_in(browser, "operator")
    assert browser.get(path).headers["cache-control"] == "no-store"


def test_files_with_their_digest_in_the_address_are_kept_for_good(browser: TestClient) -> None:
    page = browser.get("/login").text
    (address,) = re.findall(r'href="(/static/style\.css\?v=[^"]+)"', page)
    assert "immutable" in browser.get(address).headers["cache-control"]


@pytest.mark.parametrize("path", ["/", "/jobs", "/policies", "/login", "/nowhere", "/jobs/kitchen/job-999"])
def test_no_page_has_a_script_or_style_within_it_or_loads_from_elsewhere(browser: TestClient, path: str) -> None:
    let_in(browser, "operator")
    html = browser.get(path).text
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son[a-z]+=|javascript:", html)
    assert not re.findall(r'(?:src|href|action)="(?:https?:)?//', html)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:5714", "", "127.0.0.1:5714@evil.example"])
def test_name_that_is_not_ours_is_refused(browser: TestClient, host: str) -> None:
    let_in(browser, "operator")
    answer = browser.get("/", headers={"host": host})
    assert answer.status_code == 421
    assert "arm-lab" not in answer.text
    assert browser.get("/healthz", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["localhost:5714", "127.0.0.1", "[::1]:5714", "LOCALHOST"])
def test_names_of_the_loopback_are_always_ours(browser: TestClient, host: str) -> None:
    assert browser.get("/login", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "TRACE"])
def test_nothing_can_be_changed(browser: TestClient, method: str) -> None:
    let_in(browser, "operator")
    assert browser.request(method, "/jobs").status_code == 405


# Who sees what


def test_tenant_sees_its_own_only(browser: TestClient) -> None:
    let_in(browser, "kitchen")
    for path in ("/", "/jobs", "/policies", "/jobs/kitchen/job-999", "/jobs/arm-lab/job-1000"):
        page = browser.get(path).text
        foreign = [tenant for tenant in TENANTS if tenant != "kitchen" and tenant in page]
        assert foreign == [], path
    assert browser.get("/jobs/kitchen/job-999").status_code == 200
    assert browser.get("/jobs/arm-lab/job-1000").status_code == 404
    assert "Pools and scaling" not in browser.get("/").text, "how many workers there are is the operator's"


def test_job_that_is_not_ours_is_answered_as_one_that_is_not_there(browser: TestClient) -> None:
    let_in(browser, "kitchen")
    answers = [browser.get(f"/jobs/arm-lab/{job}") for job in ("job-1000", "no-such-job")]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert answers[0].text == answers[1].text


def test_what_tenants_name_is_shown_as_text(browser: TestClient, source: FakeSource) -> None:
    evil = '<img src=x onerror="alert(1)">'
    first = msgspec.structs.replace(source.whole.jobs[0], policy=evil, message=evil, tenant=evil, job=evil)
    recent = (msgspec.structs.replace(source.whole.recent[0], text=evil, event=evil),)
    groups = (msgspec.structs.replace(source.whole.groups[0], members=((evil, evil, 3),)),)
    policies = (msgspec.structs.replace(source.whole.policies[0], policy=evil, backbone=evil),)
    source.whole = msgspec.structs.replace(source.whole, jobs=(first,), recent=recent, groups=groups, policies=policies)
    let_in(browser, "operator")
    for path in ("/", "/jobs", "/policies", f"/jobs?tenant={evil}"):
        page = browser.get(path).text
        assert "<img" not in page, path
        assert "&lt;img" in page


# Pages


def test_overview_says_who_shares_the_backbone_what_waits_and_why_roles_were_restarted(browser: TestClient) -> None:
    let_in(browser, "operator")
    page = " ".join(re.sub(r"<[^>]+>", " ", browser.get("/").text).replace(" ,", ",").split()).replace(" ,", ",")
    for text in (
        "arm-lab / pick-place 4 rows",
        "last restart: it exited with code 124 (its watchdog found it wedged)",
        "lost: env-3",
        "env 2 → 4 13 pieces wait, the oldest for 13.6 s, and a trainer waits for them",
        "18.20 EUR of 50.00 EUR",
        "worker_lost env-3 is lost: silent for 6 s",
        "2 of 4 wanted",
        "All 11 jobs that have not ended",
        "handshake 2, malformed 1",
    ):
        assert text in page


def test_jobs_are_paged_sorted_and_filtered_here(browser: TestClient, source: FakeSource) -> None:
    source.whole = cluster(jobs=200)
    let_in(browser, "operator")
    page = browser.get("/jobs?state=open&page=2").text
    assert len(re.findall(r'<tr role="row" id="job-', page)) == 40
    assert "51–90 of 90" in page
    assert "Page 2 of 2" in page
    assert 'rel="next"' not in page
    assert "/events?state=open&amp;page=jobs&amp;number=2" in page


def test_job_shows_its_curve_as_a_drawing_a_sentence_and_a_table(browser: TestClient) -> None:
    let_in(browser, "arm")
    page = browser.get("/jobs/arm-lab/job-1000").text
    assert '<polyline class="line" points="' in page
    assert 'role="img"' in page
    assert "Loss is 0.1" in page
    assert "As a table" in page
    assert "700 / 2,000 steps" in page
    assert "dataset: drawer-v2" in page
    assert "holdout_episodes" not in page  # a default


def test_learning_job_shows_success_and_return(browser: TestClient) -> None:
    let_in(browser, "kitchen")
    page = browser.get("/jobs/kitchen/job-999").text
    assert page.count('<figure class="chart"') == 2
    assert "Success is 71 % at update 31" in page
    assert "metaworld/reach-v3" in page


@pytest.mark.parametrize("path", ["/", "/jobs", "/policies"])
def test_empty_cluster_has_pages_too(browser: TestClient, source: FakeSource, path: str) -> None:
    rows = ("roles", "instances", "lanes", "groups", "demand", "decisions", "jobs", "policies", "use", "recent")
    fields = dict.fromkeys(rows, ())
    source.whole = msgspec.structs.replace(
        source.whole, **fields, desired={}, counts={}, jobs_total=0, policies_total=0
    )
    let_in(browser, "operator")
    answer = browser.get(path)
    assert answer.status_code == 200
    assert "empty" in answer.text


def test_while_the_master_is_away_the_last_picture_stays_and_says_its_age(source: FakeSource) -> None:
    now = [0.0]
    web = Web(source, clock=lambda: now[0])
    with TestClient(web.app, base_url=URL) as browser:
        let_in(browser, "operator")
        assert "does not answer" not in browser.get("/").text
        source.failing = refused(ErrorCode.DEADLINE, "no answer")
        now[0] += 95
        page = browser.get("/").text
        assert "The master does not answer." in page
        assert "1 min 35 s" in page
        assert "pick-place" in page


def test_stranger_sees_nothing_while_the_master_is_away(browser: TestClient, source: FakeSource) -> None:
    source.failing = refused(ErrorCode.UNAVAILABLE, "the master is starting")
    let_in(browser, "operator")
    answer = browser.get("/")
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert "the master is starting" in answer.text
    assert browser.get("/login?code=open-sesame").status_code == 503


def test_bug_is_a_page_and_no_traceback(browser: TestClient, source: FakeSource) -> None:
    source.whole = msgspec.structs.replace(source.whole, jobs=(object(),))
    let_in(browser, "operator")
    answer = browser.get("/")
    assert answer.status_code == 500
    assert "The dashboard failed" in answer.text
    assert "Traceback" not in answer.text
    assert answer.headers["content-security-policy"]


# For machines


def test_probes_and_metrics_need_no_session_and_tell_nothing_of_anybody(web: Web, browser: TestClient) -> None:
    let_in(browser, "operator")
    browser.get("/")
    browser.cookies.clear()
    assert browser.get("/healthz").text == "ok\n"
    assert browser.get("/readyz").status_code == 200
    text = browser.get("/metrics").text
    assert 'joynexus_dashboard_answers_total{status="2xx"} 3' in text
    assert "joynexus_dashboard_scopes 1" in text
    assert not any(tenant in text for tenant in TENANTS)


def test_not_ready_while_the_master_does_not_know_it(source: FakeSource) -> None:
    web = Web(source, unready=lambda: "not registered with the master")
    with TestClient(web.app, base_url=URL) as browser:
        answer = browser.get("/readyz")
        assert (answer.status_code, answer.text) == (503, "not registered with the master\n")
        assert browser.get("/healthz").status_code == 200


def test_script_and_style_stay_small() -> None:
    assert len((STATIC / "live.js").read_text().splitlines()) <= 60
    assert sum(path.stat().st_size for path in Path(STATIC).iterdir()) < 24_000


def test_templates_of_a_newer_checkout_change_nothing_under_a_dashboard_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(render.HERE / "templates", tmp_path / "templates")
    monkeypatch.setattr(render, "HERE", tmp_path)
    renderer = render.Renderer()
    (tmp_path / "templates" / "problem.html").write_text("{{ newer }}")
    shutil.rmtree(tmp_path / "templates" / "sections")
    assert "It is away" in renderer.plain("problem.html", title="It is away", problem="soon", again=False)
