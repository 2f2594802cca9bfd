"""How health has more or fewer processes of a group: who comes, who leaves, and who never does."""

from __future__ import annotations

import pytest

from joynexus.scale import Range, instance_name
from services.health import core
from services.health.core import Adopted, Ended, HealthCore, Kill, Leaves, Removed, Seen, Start, Started, Stop
from services.health.scaling import Scaler
from tests.unit.health.cores import ROLES, adopted, advance, all_seen, role, scale, state, up_core


def grown_core(count: int, *, busy: tuple[str, ...] = ()) -> HealthCore:
    """Everything runs, and so many env workers, of which some are busy."""
    health = up_core()
    for command in scale(health, count, 2.0):
        assert isinstance(command, Start)
        health.handle(Started(name=command.name, pid=10, instance=f"h/{command.name}"), 2.0)
    more = [i.name for i in health.report() if i.name.startswith("env-")]
    working = [role("env", instance=f"h/{n}", phase="working" if n in busy else "idle") for n in more]
    health.handle(Seen(roles=(role("trainer"), role("env"), *working)), 3.0)
    assert {i.state for i in health.report()} == {"running"}
    return health


def test_a_group_that_is_to_have_more_gets_the_lowest_free_numbers() -> None:
    health = up_core()
    assert scale(health, 3, 2.0) == [Start(name="env-2"), Start(name="env-3")]
    assert health.wanted() == {"trainer": 1, "env": 3}
    assert scale(health, 3, 2.0) == []


def test_those_leave_that_are_idle_the_last_to_come_first_and_never_the_first_one() -> None:
    health = grown_core(4, busy=("env-4",))
    assert scale(health, 3, 4.0) == [Stop(name="env-3")]
    assert scale(health, 1, 4.0) == [Stop(name="env-2"), Stop(name="env-4")]
    assert health.wanted()["env"] == 1
    assert state(health, "env").state == "running"


@pytest.mark.parametrize("phase", ["lost", "quarantined", "draining"])
def test_one_that_is_of_no_use_leaves_before_one_that_could_work(phase: str) -> None:
    health = grown_core(3)
    seen = [role("env", instance="h/env-2", phase=phase), role("env", instance="h/env-3")]
    if phase == "lost":  # it is being started again
        health.handle(Ended(name="env-2", how="it exited with code 1", code=1), 3.5)
    health.handle(Seen(roles=(role("trainer"), role("env"), *seen)), 3.6)
    scale(health, 2, 3.6)
    assert [i.name for i in health.report() if i.role == "env" and i.state != "leaving"] == ["env", "env-3"]


@pytest.mark.parametrize("phase", ["crash-loop", "quarantined"])
def test_the_first_one_leaves_if_it_is_of_no_use_and_another_is(phase: str) -> None:
    health = grown_core(2)
    seen = [role("trainer"), role("env", phase=phase), role("env", instance="h/env-2")]
    if phase == "crash-loop":
        health.handle(Ended(name="env", how="it exited with code 78", code=core.NO_USE), 3.5)
    health.handle(Seen(roles=tuple(seen)), 3.6)
    scale(health, 1, 3.6)
    assert [i.name for i in health.report() if i.role == "env" and i.state != "leaving"] == ["env-2"]
    assert scale(health, 2, 30.0) == [Start(name="env" if phase == "crash-loop" else "env-3")]


def test_who_has_left_is_no_more_and_is_not_started_again() -> None:
    health = grown_core(2)
    scale(health, 1, 4.0)
    assert state(health, "env-2").state == "leaving"
    assert advance(health, 60.0, start=4.0, seen=Seen(roles=(role("trainer"), role("env")))) == []
    assert health.handle(Ended(name="env-2", how="it exited with code 0", code=0), 60.0) == []
    assert [i.name for i in health.report()] == ["master", "trainer", "env"]
    assert advance(health, 200.0, start=60.0, seen=all_seen()) == []


def test_who_does_not_finish_in_its_time_is_killed() -> None:
    health = grown_core(2, busy=("env-2",))
    scale(health, 1, 4.0)
    (kill,) = advance(health, 4.0 + core.LEAVE_S["env"] + 2, start=4.0, seen=all_seen())
    assert isinstance(kill, Kill)
    assert kill.name == "env-2"
    health.handle(Ended(name="env-2", how="it was ended by SIGKILL", code=-9), 5000.0)
    assert health.wanted()["env"] == 1


def test_one_that_only_waits_to_be_started_again_is_no_more_at_once() -> None:
    health = grown_core(2)
    health.handle(Ended(name="env-2", how="x", code=1), 4.0)
    assert scale(health, 1, 4.05) == []
    assert [i.name for i in health.report()] == ["master", "trainer", "env"]


def test_a_number_is_not_given_again_while_its_last_holder_leaves() -> None:
    health = grown_core(2)
    scale(health, 1, 4.0)
    assert scale(health, 2, 5.0) == [Start(name="env-3")]


def test_where_an_engine_starts_again_what_ended_health_only_tells_of_it() -> None:
    health = HealthCore({}, starts_again=False)
    health.handle(Adopted(running=(Started(name="env-maniskill-2", pid=5, instance="c2"),)), 0.0)
    health.handle(Seen(roles=(role("env", instance="c2"),)), 1.0)
    assert [(i.name, i.role, i.state) for i in health.report()] == [("env-maniskill-2", "env", "running")]
    health.handle(Ended(name="env-maniskill-2", how="it exited with code 1", code=1), 2.0)
    assert advance(health, 300.0, start=2.0, seen=Seen(roles=())) == []
    assert state(health, "env-maniskill-2").state == "restarting"
    health.handle(Started(name="env-maniskill-2", pid=6, instance="c2"), 300.0)
    health.handle(Seen(roles=(role("env", instance="c2"),)), 301.0)
    info = state(health, "env-maniskill-2")
    assert (info.state, info.restarts, info.reason) == ("running", 1, "it exited with code 1")
    health.handle(Removed(name="env-maniskill-2"), 302.0)
    assert health.report() == ()


def test_a_container_that_could_not_be_made_is_none() -> None:
    health = HealthCore({}, starts_again=False)
    health.handle(Adopted(running=(Started(name="env", pid=5, instance="c1"),)), 0.0)
    assert scale(health, 2, 1.0) == [Start(name="env-2")]
    health.handle(Ended(name="env-2", how="it could not be started: no space left"), 1.0)
    assert health.wanted() == {"env": 1}


def test_what_was_told_to_leave_before_health_was_started_anew_leaves_and_is_no_more() -> None:
    roles = {**ROLES, "env-2": "env"}
    for starts_again in (True, False):
        health = HealthCore(roles if starts_again else {}, starts_again=starts_again)
        running = Adopted(running=(*adopted("master", "trainer", "env").running, Started(name="env-2", pid=9)))
        health.handle(running, 0.0)
        assert health.handle(Leaves(name="env-2", pid=8), 1.0) == [], "that was another process"
        assert health.handle(Leaves(name="env-7", pid=9), 1.0) == []
        assert health.handle(Leaves(name="env-2", pid=9), 1.0) == [Stop(name="env-2")]
        assert health.handle(Leaves(name="env-2", pid=9), 1.0) == []
        assert health.wanted()["env"] == 1
        health.handle(Ended(name="env-2", how="it ended") if starts_again else Removed(name="env-2"), 2.0)
        assert "env-2" not in {i.name for i in health.report()}
        assert advance(health, 20.0, start=2.0, seen=all_seen()) == []


def test_what_an_operator_said_last_goes_before_the_plan_when_health_is_started_anew() -> None:
    for survivor in ("env", "env-3"):
        health = HealthCore({"master": "master", **dict.fromkeys(("env", "env-2", "env-3", "env-4"), "env")})
        health.handle(Adopted(running=(Started(name="master", pid=1), Started(name=survivor, pid=3))), 0.0)
        assert scale(health, 1, 0.0) == [], "nobody is started only to leave"
        assert [i.name for i in health.report()] == ["master", survivor]


def containers(count: int, **phases: str) -> HealthCore:
    """Env containers, by the name without the dash."""
    health = HealthCore({}, starts_again=False)
    names = [instance_name("env", number) for number in range(1, count + 1)]
    health.handle(Adopted(running=tuple(Started(name=name, pid=7, instance=name) for name in names)), 0.0)
    seen = [role("env", instance=name, phase=phases.get(name.replace("-", ""), "idle")) for name in names]
    health.handle(Seen(roles=tuple(seen)), 1.0)
    return health


def test_a_first_container_that_is_quarantined_counts_for_nothing_and_the_service_is_not_lost() -> None:
    health = containers(3, env="quarantined")
    assert health.wanted() == {"env": 2}
    assert scale(health, 1, 2.0) == [Stop(name="env-3")]
    assert scale(health, 1, 3.0) == [], "the one that works stays"
    assert scale(health, 2, 4.0) == [Start(name="env-4")]
    alone = containers(1, env="quarantined")
    assert alone.wanted() == {"env": 0}
    (change,) = Scaler({"env": Range(1, 4)}).decide(alone.wanted(), None, 2.0)
    assert (change.before, change.after) == (0, 1)
    assert scale(alone, change.after, 2.0) == [Start(name="env-2")]
    alone.handle(Ended(name="env", how="it was asked to end", code=0), 3.0)
    alone.handle(Started(name="env", pid=8, instance="env"), 4.0)
    assert alone.wanted() == {"env": 2}, "restarted, it counts again"
