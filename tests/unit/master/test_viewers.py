"""Who may look: codes, sessions, and what ends them."""

from __future__ import annotations

import pytest

from joynexus.wire import ErrorCode, Failure, back
from joynexus.wire.front import DashboardCode, OpenDashboard
from tests.unit.master.desks import Desk, desk, enter, look
from tests.unit.master.world import World


@pytest.fixture
def dashboard(world: World) -> Desk:
    return desk(world, "dashboard", detail={"url": "http://127.0.0.1:5714"})


@pytest.fixture
def health(world: World) -> Desk:
    return desk(world, "health")


def test_a_code_lets_in_once_and_says_where_the_dashboard_is(world: World, dashboard: Desk) -> None:
    code = world.ask(OpenDashboard(), DashboardCode)
    assert (code.url, code.valid_s) == ("http://127.0.0.1:5714", 60.0)
    viewer = dashboard.ask(back.RedeemCode(code=code.code))
    assert (viewer.tenant, viewer.operator) == ("a", False)
    assert viewer.session != code.code
    assert dashboard.ask(back.RedeemCode(code=code.code)).code is ErrorCode.NOT_FOUND
    assert look(dashboard, viewer.session).tenant == "a"


def test_without_a_dashboard_a_code_comes_without_an_address(world: World) -> None:
    assert world.ask(OpenDashboard(), DashboardCode).url == ""


def test_a_code_is_good_for_a_minute_and_a_session_for_half_a_day(world: World, dashboard: Desk) -> None:
    old = world.ask(OpenDashboard(), DashboardCode)
    viewer = enter(world, dashboard)
    world.now += 61
    dashboard.connect()
    assert dashboard.ask(back.RedeemCode(code=old.code)).code is ErrorCode.NOT_FOUND
    look(dashboard, viewer.session)
    world.now += 12 * 3600
    dashboard.connect()
    assert dashboard.ask(back.ViewCluster(session=viewer.session)).code is ErrorCode.FORBIDDEN


def test_a_session_ends_with_its_key_with_the_viewer_and_with_the_master(world: World, dashboard: Desk) -> None:
    revoked, left, kept = (enter(world, dashboard, tenant=tenant) for tenant in ("a", "b", "b"))
    code = world.ask(OpenDashboard(), DashboardCode)
    world.revoked.add("key-of-a")
    assert isinstance(dashboard.ask(back.CloseSession(session=left.session)), back.BeatAck)
    for session in (revoked.session, left.session, "secret0", ""):
        assert dashboard.ask(back.ViewCluster(session=session)).code is ErrorCode.FORBIDDEN
        assert dashboard.ask(back.ViewJob(session=session, tenant="a", job="sft-1")).code is ErrorCode.FORBIDDEN
    assert dashboard.ask(back.RedeemCode(code=code.code)).code is ErrorCode.NOT_FOUND
    look(dashboard, kept.session)
    world.crash()
    dashboard.connect()
    assert dashboard.ask(back.ViewCluster(session=kept.session)).code is ErrorCode.FORBIDDEN


def test_a_tenant_that_asks_for_many_codes_takes_none_from_others(world: World, dashboard: Desk) -> None:
    theirs = world.ask(OpenDashboard(), DashboardCode, tenant="b")
    codes = [world.ask(OpenDashboard(), DashboardCode).code for _ in range(1000)]
    assert dashboard.ask(back.RedeemCode(code=codes[0])).code is ErrorCode.NOT_FOUND
    for code in (codes[-1], theirs.code):
        assert isinstance(dashboard.ask(back.RedeemCode(code=code)), back.Viewer)
    sessions = [enter(world, dashboard).session for _ in range(200)]
    assert dashboard.ask(back.ViewCluster(session=sessions[0])).code is ErrorCode.FORBIDDEN
    look(dashboard, sessions[-1])


def test_only_health_sees_the_whole_without_a_session(world: World, dashboard: Desk, health: Desk) -> None:
    assert dashboard.ask(back.ViewCluster()).code is ErrorCode.FORBIDDEN
    assert look(health).operator
    peer = world.new_peer("back")
    for message in (back.ViewCluster(), back.Supervised(), back.RedeemCode(code="c"), back.CloseSession(session="s")):
        (answer,) = world.answers(world.say(peer, message))
        assert isinstance(answer, Failure)
        assert answer.code is ErrorCode.NOT_REGISTERED
