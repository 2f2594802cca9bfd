"""Promises of the warm pools: what fits is used again, tasks that take turns stay, no more processes work than may."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from joynexus.simulation import process
from joynexus.simulation.interface import SimObservation, SimulatorOptions
from joynexus.simulation.pool import Deadlines, SimulatorPool
from services.env import warm_pools
from services.env.simulators.metaworld import MetaWorldFamily
from services.env.warm_pools import WarmPools
from tests.unit.env import fakes

BLIND = SimulatorOptions(cameras=())


class Opened:
    """Pools of fakes, in the order in which they were opened."""

    def __init__(self) -> None:
        self.tasks: list[str] = []
        self.pools: list[SimulatorPool] = []

    def __call__(self, task: str, rows: int, *, options: SimulatorOptions, deadlines: Deadlines) -> SimulatorPool:
        self.tasks.append(task)
        self.pools.append(SimulatorPool(task, rows, make=fakes.make_counting, options=options, deadlines=deadlines))
        return self.pools[-1]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    opened = Opened()
    monkeypatch.setattr(warm_pools, "open_pool", opened)
    monkeypatch.setattr(warm_pools, "_short_of_memory", lambda: False)
    return opened


@pytest.fixture
def heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetaWorldFamily, "rows", 1)


def use(pools: WarmPools, task: str, options: SimulatorOptions = BLIND) -> int:
    with pools.lend(f"metaworld/{task}", options) as pool:
        assert isinstance(pool.reset({0: 1})[0], SimObservation)
        return pool.pids[0]


def test_what_fits_is_used_again_and_other_options_are_another_simulator(opened: Opened) -> None:
    pools = WarmPools(2, Deadlines())
    first = use(pools, "reach-v3")
    assert use(pools, "reach-v3") == first
    assert use(pools, "reach-v3", SimulatorOptions(cameras=(), episode_limit=9)) != first
    assert len(opened.pools) == 2
    pools.close()


def test_two_tasks_that_take_turns_are_made_once_each(opened: Opened) -> None:
    pools = WarmPools(1, Deadlines())
    for _ in range(4):
        use(pools, "reach-v3")
        use(pools, "push-v3")
    assert opened.tasks == ["metaworld/reach-v3", "metaworld/push-v3"]
    pools.close()


def test_two_lanes_that_take_turns_with_two_tasks_make_two_simulators_of_each_at_most(opened: Opened) -> None:
    pools = WarmPools(2, Deadlines())
    for _ in range(3):
        for one, other in (("reach-v3", "push-v3"), ("push-v3", "push-v3"), ("reach-v3", "reach-v3")):
            with pools.lend(f"metaworld/{one}", BLIND), pools.lend(f"metaworld/{other}", BLIND):
                pass
    assert sorted(opened.tasks) == ["metaworld/push-v3"] * 2 + ["metaworld/reach-v3"] * 2
    pools.close()


def test_who_was_idle_for_longest_in_times_of_its_making_is_pushed_out(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(warm_pools, "monotonic", lambda: now)
    pools = WarmPools(1, Deadlines())
    monkeypatch.setattr(SimulatorPool, "make_s", property(lambda pool: 60.0 if pool is opened.pools[0] else 1.0))
    with pools.lend("metaworld/reach-v3", BLIND):  # a dear one
        pass
    now = 10.0
    with pools.lend("metaworld/push-v3", BLIND):  # a cheap one, used later
        pass
    now = 12.0
    with pools.lend("metaworld/door-open-v3", BLIND):
        pass
    with pools.lend("metaworld/reach-v3", BLIND):
        pass
    assert opened.tasks == ["metaworld/reach-v3", "metaworld/push-v3", "metaworld/door-open-v3"]
    pools.close()


def test_none_stays_idle_beside_those_at_work_when_memory_is_short(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_pools, "_short_of_memory", lambda: True)
    pools = WarmPools(1, Deadlines())
    use(pools, "reach-v3")
    use(pools, "push-v3")
    use(pools, "reach-v3")
    assert len(opened.tasks) == 3
    pools.close()


@pytest.mark.parametrize(
    ("available", "limit", "used", "cached", "short"),
    [
        (30, "max", 99, 0, False),
        (19, "max", 0, 0, True),
        (90, "1000", 700, 0, False),
        (90, "1000", 900, 50, True),
        (90, "1000", 900, 150, False),
        (90, None, 0, 0, False),
    ],
)
def test_memory_is_short_by_the_machine_or_by_the_containers_limit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    available: int,
    limit: str | None,
    used: int,
    cached: int,
    short: bool,
) -> None:
    monkeypatch.setattr(warm_pools, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(warm_pools, "_CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text(f"MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {cached}\n")
    assert warm_pools._short_of_memory() == short


@pytest.mark.usefixtures("heavy")
def test_rows_of_a_heavy_simulator_are_processes_of_which_the_next_finds_some(opened: Opened) -> None:
    pools = WarmPools(4, Deadlines())
    with pools.lend("metaworld/reach-v3", BLIND, rows=8) as first:
        assert (first.rows, len(set(first.pids))) == (2, 2)
        with pools.lend("metaworld/push-v3", BLIND, rows=8) as second, pools.lend("metaworld/reach-v3", BLIND) as third:
            assert (second.rows, third.rows) == (1, 1)
            assert len({*first.pids, *second.pids, *third.pids}) == 4
        observations = first.reset({0: 5, 1: 6})
        assert [o.state[0] for o in observations.values() if isinstance(o, SimObservation)] == [5, 6]
    with pools.lend("metaworld/reach-v3", BLIND, rows=2) as again:
        assert again.rows == 2
    assert len(opened.pools) == 4
    pools.close()


def test_whoever_comes_when_all_work_waits_and_says_that_it_lives(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_pools, "_LOOK_S", 0.01)
    pools = WarmPools(1, Deadlines())
    lived, entered = threading.Event(), threading.Event()

    def late() -> None:
        with pools.lend("metaworld/reach-v3", BLIND, alive=lived.set):
            entered.set()

    waiter = threading.Thread(target=late)
    with pools.lend("metaworld/reach-v3", BLIND):
        waiter.start()
        assert lived.wait(20)
        assert not entered.is_set()
    assert entered.wait(20)
    waiter.join()
    pools.close()


def test_the_wait_ends_when_the_task_is_not_wanted_any_more(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_pools, "_LOOK_S", 0.0)
    pools = WarmPools(1, Deadlines())

    def unwanted() -> None:
        raise InterruptedError

    with (
        pools.lend("metaworld/reach-v3", BLIND),
        pytest.raises(InterruptedError),
        pools.lend("metaworld/reach-v3", BLIND, alive=unwanted),
    ):
        pass
    use(pools, "reach-v3")
    pools.close()


def test_one_that_failed_in_use_is_thrown_away_and_its_place_is_free_again(opened: Opened) -> None:
    pools = WarmPools(1, Deadlines())
    with pytest.raises(ZeroDivisionError), pools.lend("metaworld/reach-v3", BLIND):
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="no simulator task"), pools.lend("metaworld/nothing-v3", BLIND):
        pass
    use(pools, "reach-v3")
    assert len(opened.pools) == 2
    pools.close()


def test_who_lends_a_pool_is_told_all_that_it_took_however_it_ends(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool has used a second more whenever it is asked, and imports took three seconds, once."""
    seconds: list[float] = []
    imported = iter((0.0, 3.0))
    monkeypatch.setattr(warm_pools, "nurseries_cpu_s", lambda: next(imported))
    used = itertools.count(1)
    monkeypatch.setattr(SimulatorPool, "cpu_s", lambda pool: next(used))
    pools = WarmPools(1, Deadlines())
    with pools.lend("metaworld/reach-v3", BLIND, busy=seconds.append):
        pass
    assert seconds == [3, 1]  # imported, and made
    with pools.lend("metaworld/reach-v3", BLIND, busy=seconds.append):
        pass
    assert seconds == [3, 1, 1]  # from 2 to 3
    with pytest.raises(ZeroDivisionError), pools.lend("metaworld/reach-v3", BLIND, busy=seconds.append):
        raise ZeroDivisionError
    assert seconds == [3, 1, 1, 1]
    pools.close()


def test_who_makes_nothing_pays_for_no_import_that_another_one_caused(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported_s = 0.0
    monkeypatch.setattr(warm_pools, "nurseries_cpu_s", lambda: imported_s)
    monkeypatch.setattr(SimulatorPool, "cpu_s", lambda pool: 0.0)
    pools = WarmPools(2, Deadlines())
    use(pools, "reach-v3")
    mine: list[float] = []
    with pools.lend("metaworld/reach-v3", BLIND, busy=mine.append):
        imported_s = 60.0  # for whoever makes something meanwhile, and is not there yet
    theirs: list[float] = []
    with pools.lend("metaworld/push-v3", BLIND, busy=theirs.append):
        pass
    assert (sum(mine), sum(theirs)) == (0, 60)
    pools.close()


def test_what_a_process_used_is_told_once_though_it_is_still_there_when_it_was_thrown_away(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools, told = WarmPools(1, Deadlines()), list[float]()
    monkeypatch.setattr(process, "cpu_s_of", lambda pid: 7.0)
    with pytest.raises(KeyError), pools.lend("metaworld/reach-v3", BLIND, busy=told.append):
        raise KeyError
    assert told[-1] == 7.0  # before it what was imported
    assert opened.pools[0].cpu_s() == 7.0
    pools.close()
