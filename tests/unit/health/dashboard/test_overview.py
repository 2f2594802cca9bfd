"""Rows that the overview draws from a picture."""

from __future__ import annotations

import msgspec

from joynexus.wire.back import GroupRow, InstanceRow, UseRow
from services.health.dashboard import overview
from tests.unit.health.dashboard.pictures import cluster, of_tenant


def test_pieces_of_one_worker_are_one_bar_and_who_is_elses_is_its_last_part() -> None:
    groups = (
        GroupRow(worker="trainer-1", kind="train", members=(("a", "p", 2), ("b", "q", 1)), since_s=3.0),
        GroupRow(worker="trainer-1", kind="train", members=(("", "", 4), ("a", "p", 1)), since_s=9.0),
        GroupRow(worker="env-1", kind="data", members=(("b", "", 1),)),
    )
    trains, data = overview.at_work(groups)
    assert (trains.pieces, trains.since_s) == (2, 9.0)
    assert [(part.name, part.text) for part in trains.members] == [
        ("a / p", "3 rows"),
        ("b / q", "1 row"),
        ("others", "4 rows"),
    ]
    assert sum(part.width for part in trains.members) == 100
    assert trains.members[2].start == 50
    assert data.members[0].name == "b"


def test_process_is_joined_with_what_health_knows_of_it_by_instance() -> None:
    rows = {row.worker or row.name: row for row in overview.processes(cluster())}
    assert list(rows)[:2] == ["master", "trainer-1"]
    assert (rows["env-1"].name, rows["env-1"].restarts) == ("env", 2)
    assert rows["env-1"].reason.startswith("last restart: it exited with code 124")
    assert rows["env-2"].restarts == 0
    assert rows["master"].state == "ready"


def test_process_that_the_master_does_not_know_yet_is_shown_too() -> None:
    view = cluster()
    starting = InstanceRow(name="env-4", instance="host/env-4", role="env", state="crash-loop", reason="no memory")
    rows = overview.processes(msgspec.structs.replace(view, instances=(*view.instances, starting)))
    (row,) = [row for row in rows if row.name == "env-4"]
    assert (row.state, row.reason, overview.mood(row.state)) == ("crash-loop", "last restart: no memory", "bad")


def test_worker_that_gets_no_more_work_says_why() -> None:
    view = cluster()
    why = "3 pieces in a row failed here and went well elsewhere"
    role = msgspec.structs.replace(view.roles[2], detail={"quarantined": why})
    (row,) = overview.processes(msgspec.structs.replace(view, roles=(role,), instances=()))
    assert (row.state, row.reason) == ("quarantined", why)


def test_tenant_sees_phases_and_no_figures_of_processes() -> None:
    for row in overview.processes(of_tenant(cluster(), "kitchen")):
        assert (row.busy, row.uptime, row.restarts, row.reason) == ("", "", 0, "")


def test_bars_of_use_have_one_scale_and_the_services_own_comes_last() -> None:
    rows = [UseRow(tenant="", trainer_s=90.0), UseRow(tenant="a", trainer_s=30.0), UseRow(tenant="b", env_s=60.0)]
    assert [row.tenant for row in overview.by_use(rows)] == ["b", "a", ""]
    assert overview.most_used(rows) == 90.0
    assert overview.device_time(rows[1], 90.0)[0].width == 33.33
    assert overview.device_time(UseRow(tenant="c"), 0.0) == ()


def test_unknown_state_is_plain() -> None:
    assert overview.mood("something new") == "off"
