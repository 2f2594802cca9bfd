"""Health's decisions, with a clock of the test's own."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

import joynexus
from common.settings import EnvSettings, load_settings
from joynexus.simulation.pool import Deadlines
from services.env.service import longest_silence_s
from services.health import core
from services.health.core import Adopted, Ended, HealthCore, Kill, Seen, Start, Started, Tick
from tests.unit.health.cores import PIDS, ROLES, adopted, advance, all_seen, role, state, up_core


def test_everything_is_started_at_once_the_master_first() -> None:
    commands = HealthCore(dict(ROLES)).handle(Tick(), 0.0)
    assert commands == [Start(name="master"), Start(name="trainer"), Start(name="env")]


def test_what_runs_already_is_adopted_and_only_the_rest_is_started() -> None:
    health = HealthCore(dict(ROLES))
    assert health.handle(adopted("master", "trainer"), 0.0) == [], "first it is said how many there should be"
    assert health.handle(Tick(), 0.0) == [Start(name="env")]
    assert [instance.restarts for instance in health.report()] == [0, 0, 0]


def test_workers_have_the_whole_time_to_register_with_each_new_master() -> None:
    health = up_core()
    health.handle(Seen(roles=()), 2.0)  # a master that was only just restarted
    health.handle(Ended(name="master", how="it exited with code 1"), 3.0)
    advance(health, 24.0, start=3.0, seen=None)
    health.handle(Started(name="master", pid=9), 25.0)
    assert health.handle(Seen(roles=()), 26.0) == []


def test_ready_means_registered_with_the_master() -> None:
    health = HealthCore(dict(ROLES))
    health.handle(Tick(), 0.0)
    for name, pid in PIDS.items():
        health.handle(Started(name=name, pid=pid), 0.0)
    assert {i.state for i in health.report()} == {"starting"}
    health.handle(Seen(roles=(role("env"),)), 1.0)
    assert [i.state for i in health.report()] == ["running", "starting", "running"]


def test_only_the_instance_that_ended_is_started_again() -> None:
    health = up_core()
    assert advance(health, 100.0, start=1.0, seen=all_seen()) == []
    assert health.handle(Ended(name="trainer", how="it was ended by SIGKILL"), 100.0) == []
    assert health.handle(Tick(), 100.0 + core.PAUSES_S[0]) == [Start(name="trainer")]
    info = state(health, "trainer")
    assert (info.restarts, info.reason) == (1, "it was ended by SIGKILL")


def test_pauses_grow_with_quick_failures_up_to_a_crash_loop_with_its_reason() -> None:
    health = up_core()
    now, pauses = 10.0, []
    for _ in range(core.LOOP_FAILURES):
        health.handle(Ended(name="trainer", how="it exited with code 2; its log ends: no such backbone"), now)
        ended = now
        while not (commands := health.handle(Seen(roles=(role("env"),)), now)):
            now += 0.05
        assert commands == [Start(name="trainer")]
        pauses.append(now - ended)
        if len(pauses) < core.LOOP_FAILURES:
            health.handle(Started(name="trainer", pid=50 + len(pauses)), now)
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.3
    assert pauses[-1] >= core.LOOP_PAUSE_S


def test_crash_loop_is_reported_while_it_waits() -> None:
    health = up_core()
    for number in range(core.LOOP_FAILURES):
        health.handle(Started(name="trainer", pid=50 + number), 10.0 + number)
        health.handle(Ended(name="trainer", how="it exited with code 2"), 10.5 + number)
    info = state(health, "trainer")
    assert (info.state, info.reason) == ("crash-loop", "it exited with code 2")
    assert state(health, "env").state == "running"


def test_long_life_forgives_earlier_failures() -> None:
    health = up_core()
    for number in range(core.LOOP_FAILURES - 1):
        health.handle(Started(name="trainer", pid=50 + number), 10.0)
        health.handle(Ended(name="trainer", how="x"), 11.0)
    health.handle(Started(name="trainer", pid=60), 20.0)
    health.handle(Ended(name="trainer", how="x"), 20.0 + core.STABLE_S)
    assert state(health, "trainer").state == "restarting"


def test_an_orderly_end_is_no_failure_however_often_it_comes() -> None:
    health = up_core()
    now = 2.0
    for number, code in enumerate((0, -signal.SIGTERM, -signal.SIGINT) * 4):
        health.handle(Ended(name="trainer", how="it exited with code 0", code=code), now)
        assert health.handle(Tick(), now + core.PAUSES_S[0]) == [Start(name="trainer")]
        health.handle(Started(name="trainer", pid=50 + number), now + 0.2)
        health.handle(Seen(roles=(role("trainer", pid=50 + number), role("env"))), now + 0.3)
        assert state(health, "trainer").state == "running"
        now += 1.0
    health.handle(Ended(name="trainer", how="it was ended by SIGKILL", code=-9), now)
    assert health.handle(Tick(), now + core.PAUSES_S[0]) == [Start(name="trainer")]


def test_whoever_kills_roles_from_outside_drives_none_into_a_crash_loop() -> None:
    health = up_core()
    now = 2.0
    for number in range(3 * core.LOOP_FAILURES):
        health.handle(Ended(name="trainer", how="it was ended by SIGKILL", code=-9, outside=True), now)
        assert health.handle(Tick(), now + core.PAUSES_S[0]) == [Start(name="trainer")]
        health.handle(Started(name="trainer", pid=50 + number), now + 0.2)
        health.handle(Seen(roles=(role("trainer", pid=50 + number), role("env"))), now + 0.3)
        now += 1.0
    assert state(health, "trainer").restarts == 3 * core.LOOP_FAILURES


def test_what_health_itself_killed_is_a_failure_although_the_signal_came_from_outside() -> None:
    health = up_core()
    for number in range(core.LOOP_FAILURES):
        lost = Seen(roles=(role("trainer", pid=50 + number, phase="lost"), role("env")))
        health.handle(Started(name="trainer", pid=50 + number), 1000.0 * number)
        health.handle(Seen(roles=(role("trainer", pid=50 + number), role("env"))), 1000.0 * number)
        assert advance(health, 1000.0 * number + core.LOST_S + 2, start=1000.0 * number + 1, seen=lost) != []
        health.handle(Ended(name="trainer", how="x", code=-9, outside=True), 1000.0 * number + core.LOST_S + 2)
    assert state(health, "trainer").state == "crash-loop"


def test_who_exits_in_an_orderly_way_before_it_is_up_is_tried_with_pauses_but_in_no_crash_loop() -> None:
    health = up_core()
    starts = 0
    health.handle(Ended(name="trainer", how="x", code=0), 2.0)
    for now in range(2, 102):
        for _ in health.handle(Seen(roles=(role("env"),)), now):
            starts += 1
            health.handle(Started(name="trainer", pid=50 + now), now)
            health.handle(Ended(name="trainer", how="it exited with code 0", code=0), now)
    assert 10 <= starts <= 100 / core.PAUSES_S[-1] + 1
    assert state(health, "trainer").state == "restarting"


def test_a_wedged_instance_that_was_killed_is_a_failure_whatever_its_exit_code() -> None:
    health = up_core()
    lost = Seen(roles=(role("trainer", phase="lost"), role("env")))
    assert advance(health, 30.0, start=1.0, seen=lost) != []
    health.handle(Ended(name="trainer", how="it exited with code 0", code=0), 30.0)
    for number in range(core.LOOP_FAILURES - 1):
        health.handle(Started(name="trainer", pid=50 + number), 31.0 + number)
        health.handle(Ended(name="trainer", how="x", code=1), 31.5 + number)
    assert state(health, "trainer").state == "crash-loop"


def test_who_says_that_another_start_is_of_no_use_is_shown_with_its_reason_at_once_and_tried_seldom() -> None:
    health = up_core()
    health.handle(Ended(name="master", how="its log ends: the journal is damaged", code=core.NO_USE), 2.0)
    info = state(health, "master")
    assert (info.state, info.reason) == ("crash-loop", "its log ends: the journal is damaged")
    assert advance(health, 2.0 + core.LOOP_PAUSE_S - 1, start=2.0, seen=None) == []
    assert health.handle(Tick(), 2.0 + core.LOOP_PAUSE_S) == [Start(name="master")]


def test_instance_that_the_master_lost_is_killed_after_a_while() -> None:
    health = up_core()
    lost = Seen(roles=(role("trainer", phase="lost"), role("env")))
    commands = advance(health, 1.0 + core.LOST_S - 2, start=1.0, seen=lost)
    assert commands == []
    (kill,) = advance(health, 1.0 + core.LOST_S + 3, start=core.LOST_S - 1, seen=lost)
    assert isinstance(kill, Kill)
    assert kill.name == "trainer"
    health.handle(Ended(name="trainer", how="it was ended by SIGKILL"), 60.0)
    assert "has not heard it" in state(health, "trainer").reason


def test_how_long_silence_is_borne_is_the_operators_choice() -> None:
    health = HealthCore(dict(ROLES), lost_s=3.0, master_silent_s=7.0)
    health.handle(adopted(*PIDS), 0.0)
    health.handle(all_seen(), 1.0)
    lost = Seen(roles=(role("trainer", phase="lost"), role("env")))
    (worker,) = advance(health, 6.0, start=1.0, seen=lost)
    assert isinstance(worker, Kill)
    assert worker.name == "trainer"
    assert advance(health, 12.0, start=6.0, seen=None) == []
    (master,) = advance(health, 14.0, start=12.0, seen=None)
    assert isinstance(master, Kill)
    assert master.name == "master"


def test_nobody_is_blamed_while_the_master_is_away() -> None:
    health = up_core()
    health.handle(Ended(name="master", how="x"), 2.0)
    health.handle(Started(name="master", pid=9), 3.0)
    commands = advance(health, 3.0 + core.MASTER_SILENT_S - 1, start=3.0, seen=None)
    assert commands == []
    health.handle(Seen(roles=()), 33.0)
    commands = advance(health, 33.0 + core.LOST_S - 2, start=33.0, seen=Seen(roles=()))
    assert commands == []
    assert advance(health, 60.0, start=52.0, seen=all_seen()) == []


def test_silent_master_is_killed_and_only_it() -> None:
    health = up_core()
    commands = advance(health, 1.0 + core.MASTER_SILENT_S + 5, start=1.0, seen=None)
    assert [(type(c), c.name) for c in commands] == [(Kill, "master")]


def test_a_large_model_may_load_for_as_long_as_its_own_watchdog_lets_it() -> None:
    startup = Path(joynexus.__file__).parent / "vla" / "startup.py"  # read, not imported: it brings torch
    (loading_s,) = re.findall(r"^LOADING_S = ([\d.]+)$", startup.read_text(), re.MULTILINE)
    assert float(loading_s) < core.REGISTER_S


def test_health_is_more_patient_than_the_longest_round_that_settings_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOYNEXUS_MAKE_S", "300")
    monkeypatch.setenv("JOYNEXUS_STEP_S", "120")
    settings = load_settings(EnvSettings)
    assert longest_silence_s(Deadlines(make_s=settings.make_s, step_s=settings.step_s)) < core.STALL_S
    for name, value in (("JOYNEXUS_MAKE_S", "301"), ("JOYNEXUS_STEP_S", "121")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(ValueError, match=f"{name}='{value}' .*less than or equal"):
                load_settings(EnvSettings)


def test_instance_that_never_registers_is_killed() -> None:
    health = HealthCore(dict(ROLES))
    health.handle(Tick(), 0.0)
    for name, pid in PIDS.items():
        health.handle(Started(name=name, pid=pid), 0.0)
    without = Seen(roles=(role("env"),))
    commands = advance(health, core.REGISTER_S + 5, start=0.0, seen=without)
    assert [(type(c), c.name) for c in commands] == [(Kill, "trainer")]


@pytest.mark.parametrize("phase", ["idle", "quarantined"])
def test_loop_that_works_without_progress_is_killed_and_one_without_work_is_not(phase: str) -> None:
    health = up_core()
    seen = Seen(roles=(role("trainer", progress=7, phase="working"), role("env", progress=7, phase=phase)))
    commands = advance(health, core.STALL_S + 20, start=1.0, seen=seen)
    assert [(type(c), c.name) for c in commands] == [(Kill, "trainer")]


def test_loop_that_advances_is_left_alone() -> None:
    health = up_core()
    now = 1.0
    for step in range(2000):
        now += 1.0
        seen = Seen(roles=(role("trainer", progress=step // 100, phase="working"), role("env")))
        assert health.handle(seen, now) == []


def test_process_of_an_earlier_life_does_not_count_as_registered() -> None:
    health = up_core()
    health.handle(Ended(name="trainer", how="x"), 2.0)
    health.handle(Started(name="trainer", pid=77), 3.0)
    health.handle(all_seen(), 4.0)  # the master still remembers pid 2
    assert state(health, "trainer").state == "starting"
    health.handle(Seen(roles=(role("trainer", pid=77), role("env"))), 5.0)
    assert state(health, "trainer").state == "running"


def test_a_process_is_known_by_its_instance_whatever_its_pid_is() -> None:
    health = HealthCore({"env": "env", "env-2": "env"})
    health.handle(Adopted(running=tuple(Started(name=n, pid=7, instance=f"h/{n}") for n in ("env", "env-2"))), 0.0)
    health.handle(Seen(roles=(role("env", instance="h/env-2"),)), 1.0)
    assert [(i.name, i.state) for i in health.report()] == [("env", "starting"), ("env-2", "running")]


def test_the_life_before_does_not_count_though_its_instance_is_the_same() -> None:
    health = HealthCore({"env": "env"})
    health.handle(Tick(), 0.0)
    health.handle(Started(name="env", pid=1, instance="h/env"), 0.0)
    health.handle(Seen(roles=(role("env", instance="h/env", uptime_s=9.0),)), 10.0)
    assert state(health, "env").state == "running"
    health.handle(Ended(name="env", how="x"), 10.5)
    health.handle(Started(name="env", pid=2, instance="h/env"), 11.0)
    health.handle(Seen(roles=(role("env", instance="h/env", uptime_s=11.0),)), 12.0)
    assert state(health, "env").state == "starting"
    health.handle(Seen(roles=(role("env", instance="h/env", uptime_s=0.5),)), 12.5)
    assert state(health, "env").state == "running"
