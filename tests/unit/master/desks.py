"""Those who look at a cluster in tests: health and dashboards, and sessions in which they do."""

from __future__ import annotations

from typing import Any

from joynexus.wire import Message, back
from joynexus.wire.front import DashboardCode, OpenDashboard
from tests.unit.master.actors import new_incarnation
from tests.unit.master.world import FakeWorker, World


class Desk(FakeWorker):
    """A dashboard, or health: it asks."""

    def ask(self, message: Message) -> Any:
        (answer,) = self.world.answers(self.world.say(self.peer, message, key=self.key))
        return answer


def desk(world: World, role: str, **more: Any) -> Desk:
    made = Desk(world, new_incarnation(), key=role, credit={}, **{"role": role, **more})
    assert isinstance(made.received[-1], back.Registered)
    return made


def enter(world: World, dashboard: Desk, *, tenant: str = "a", operator: bool = False) -> back.Viewer:
    code = world.ask(OpenDashboard(), DashboardCode, tenant=tenant, operator=operator)
    viewer = dashboard.ask(back.RedeemCode(code=code.code))
    assert isinstance(viewer, back.Viewer)
    return viewer


def look(desk: Desk, session: str = "") -> back.ClusterView:
    view = desk.ask(back.ViewCluster(session=session))
    assert isinstance(view, back.ClusterView), view
    return view
