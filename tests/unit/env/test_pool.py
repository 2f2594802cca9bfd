"""Promises of the pool: deadlines hold, a lost process costs its own rows alone, nothing outlives its parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from joynexus.simulation import nursery, process
from joynexus.simulation import pool as pools
from joynexus.simulation.interface import SimObservation, SimulatorError, StepResult
from joynexus.simulation.pool import Deadlines, Lost, SimulatorPool
from joynexus.simulation.process import DEAD, TIMEOUT, Recycling, WorkerProcess
from joynexus.simulation.protocol import Reply
from services.env.simulators.registry import open_pool
from tests.unit.env import fakes

ONES = np.ones((4, 4), np.float32)
QUICK = Deadlines(make_s=60, reset_s=2.0, step_s=2.0)


@contextmanager
def counting(rows: int, processes: int, recycle_after: int = 0) -> Iterator[SimulatorPool]:
    with SimulatorPool(
        fakes.TASK,
        rows,
        processes=processes,
        deadlines=QUICK,
        recycling=Recycling(episodes=recycle_after),
        make=fakes.make_counting,
    ) as pool:
        yield pool


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_until_gone(pids: tuple[int, ...], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < until, f"{pids} still run"
        time.sleep(0.02)


def test_rows_run_their_own_episodes_and_processes_end_with_the_pool() -> None:
    with counting(rows=3, processes=2) as pool:
        pids = pool.pids
        assert len(set(pids)) == 2
        observations = pool.reset({0: 10, 1: 11, 2: 12})
        assert [o.state[0] for o in observations.values() if isinstance(o, SimObservation)] == [10, 11, 12]
        results = pool.step({2: ONES, 0: ONES[:1]}, record=[2])
        assert list(results) == [2, 0]
        assert isinstance(results[2], StepResult)
        assert results[2].observation.state.tolist() == [12, 4]
        assert results[2].steps == len(results[2].frames) == 4
        assert isinstance(results[0], StepResult)
        assert results[0].observation.state.tolist() == [10, 1]
        assert results[0].frames == ()
        assert pool.reset({0: 10}, render=False)[0].images == ()  # type: ignore[union-attr]  # not lost here
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("seed", "reason"),
    [
        (fakes.HANGS, "took longer than 2 s to step"),
        (fakes.DIES, "died in a step"),
        (fakes.RAISES, "failed to step: ZeroDivisionError: unstable physics"),
        (
            fakes.EXPLODES,
            "failed to step: ValueError: the simulator's state holds NaN or infinities: its physics became unstable",
        ),
        (fakes.OVERPAYS, "failed to step: ValueError: the simulator paid a reward that is NaN or infinite"),
    ],
)
def test_a_lost_row_costs_rows_of_other_processes_nothing(seed: int, reason: str) -> None:
    with counting(rows=2, processes=2) as pool:
        pool.reset({0: seed, 1: 11})
        before, started = pool.pids, time.monotonic()
        results = pool.step({0: ONES, 1: ONES})
        assert time.monotonic() - started < 10
        assert results[0] == Lost(reason)
        assert isinstance(results[1], StepResult)
        assert pool.pids[1] == before[1]
        if seed in (fakes.HANGS, fakes.DIES):
            wait_until_gone(before[:1])
            assert pool.pids[0] != before[0]
        again = pool.step({0: ONES, 1: ONES})
        assert isinstance(again[0], Lost), "a lost row has no episode until it is reset"
        assert isinstance(again[1], StepResult)
        assert again[1].observation.state.tolist() == [11, 8]
        assert isinstance(pool.reset({0: 5})[0], SimObservation)


def test_a_hang_at_reset_is_lost_too() -> None:
    with counting(rows=2, processes=2) as pool:
        observations = pool.reset({0: fakes.HANGS_AT_RESET, 1: 1})
        assert observations[0] == Lost("took longer than 2 s to reset")
        assert isinstance(observations[1], SimObservation)


def test_a_killed_process_is_replaced() -> None:
    with counting(rows=1, processes=1) as pool:
        pool.reset({0: 1})
        os.kill(pool.pids[0], signal.SIGKILL)
        assert isinstance(pool.step({0: ONES})[0], Lost)
        assert isinstance(pool.reset({0: 1})[0], SimObservation)
        assert isinstance(pool.step({0: ONES})[0], StepResult)


def test_a_process_that_does_not_answer_is_killed_and_its_episode_can_be_done_again() -> None:
    """As one wedged in native code is, which does not look at signals either."""
    with counting(rows=2, processes=2) as pool:
        pool.reset({0: 1, 1: 2})
        wedged = pool.pids[0]
        os.kill(wedged, signal.SIGSTOP)
        results = pool.step({0: ONES, 1: ONES})
        assert results[0] == Lost("took longer than 2 s to step")
        assert isinstance(results[1], StepResult)
        wait_until_gone((wedged,))
        assert isinstance(pool.reset({0: 1})[0], SimObservation)
        os.kill(pool.pids[0], signal.SIGSTOP)
        stopped = pool.pids
    assert all(is_gone(pid) for pid in stopped), "nor does it outlive its pool"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_the_process_that_forks_workers_may_die_or_hang_too(end: signal.Signals) -> None:
    preload = (f"nothing_to_import_{end}",)  # a process of its own
    with SimulatorPool(fakes.TASK, 1, make=fakes.make_counting, preload=preload) as pool:
        pool.reset({0: 1})
        worker, parent = pool.pids[0], parent_of(pool.pids[0])
        nursery._nurseries[preload]._channel.settimeout(1.0)
        os.kill(parent, end)
        if end == signal.SIGSTOP:
            os.kill(worker, signal.SIGKILL)
        wait_until_gone((worker,))
        assert isinstance(pool.step({0: ONES})[0], Lost)
        assert isinstance(pool.reset({0: 1})[0], SimObservation)
        assert parent_of(pool.pids[0]) not in (parent, os.getpid())
        wait_until_gone((parent,))


def test_who_forks_workers_may_die_while_they_make_their_simulators(tmp_path: Path) -> None:
    preload = ("nothing_to_import_orphaned",)
    task = f"orphaned/{tmp_path / 'died'}"
    with SimulatorPool(task, 2, make=fakes.make_orphaned, preload=preload, processes=2) as pool:
        seen = pool.reset({0: 1, 1: 2})
        early = [row for row, each in seen.items() if isinstance(each, Lost)]  # made before the other, lost with it
        assert len(early) < 2
        assert all(isinstance(each, SimObservation) for each in pool.reset(dict.fromkeys(early, 3)).values())
    assert (tmp_path / "died").exists()


def test_who_is_made_stays_so_when_another_one_cannot_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def receive(processes: Sequence[WorkerProcess], seconds: float) -> dict[WorkerProcess, Reply | str]:
        return {
            each: DEAD if each.pid == dies else reply for each, reply in process.receive(processes, seconds).items()
        }

    def full(*args: object) -> None:
        raise SimulatorError("no process can be started for a simulator: no memory")

    with counting(rows=2, processes=2) as pool:
        dies = pool.pids[1]
        with monkeypatch.context() as disturbed:
            disturbed.setattr(pools, "receive", receive)
            disturbed.setattr(process, "start_worker", full)
            with pytest.raises(SimulatorError, match="no memory"):
                pool.reset({0: 1, 1: 2})
        monkeypatch.setattr(pools, "receive", lambda waiting, seconds: pytest.fail("it has said what it is"))
        assert pool.instruction == "count"


def test_who_dies_being_made_is_said_to_have_died_though_time_runs_out_on_the_second_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = iter((DEAD, TIMEOUT))
    monkeypatch.setattr(pools, "receive", lambda waiting, seconds: dict.fromkeys(waiting, next(said)))
    with counting(rows=1, processes=1) as pool, pytest.raises(SimulatorError, match="its process died"):
        pool.reset({0: 1})


def test_a_pool_closes_also_when_no_process_can_be_started_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with counting(rows=2, processes=2) as pool:
        pool.reset({0: fakes.DIES, 1: 1})
        pids = pool.pids

        def refuse(*_: object) -> None:
            raise SimulatorError("no process can be started")

        monkeypatch.setattr(process, "start_worker", refuse)
        with pytest.raises(SimulatorError, match="no process can be started"):
            pool.step({0: ONES, 1: ONES})
        with pytest.raises(SimulatorError, match="no process can be started"):
            SimulatorPool(fakes.TASK, 1, make=fakes.make_counting)
        pool.close()
    assert all(is_gone(pid) for pid in pids)


def test_rows_of_pools_that_are_joined_keep_their_processes_and_episodes() -> None:
    with counting(rows=2, processes=1) as one, counting(rows=1, processes=1) as other:
        both = SimulatorPool.joined([one, other])
        assert both.rows == 3
        assert both.pids == (*one.pids, *other.pids)
        both.reset({0: 10, 1: 20, 2: 11})
        results = both.step({0: ONES, 1: ONES[:2], 2: ONES[:1]})
        states = [result.observation.state.tolist() for result in results.values() if isinstance(result, StepResult)]
        assert states == [[10, 4], [20, 2], [11, 1]]
        (again,) = other.step({0: ONES}).values()
        assert isinstance(again, StepResult)
        assert again.observation.state.tolist() == [20, 6]


def test_cpu_time_of_processes_that_were_replaced_is_counted() -> None:
    with SimulatorPool(fakes.TASK, 1, make=fakes.make_counting) as pool:
        pool.reset({0: fakes.WORKS})
        before = pool.cpu_s()
        pool.step({0: ONES})
        worked = pool.cpu_s()
        assert worked - before >= 0.2
        os.kill(pool.pids[0], signal.SIGKILL)
        pool.step({0: ONES})
        assert pool.cpu_s() >= worked


@pytest.mark.parametrize(
    ("leak", "recycling"),
    [("16", Recycling(memory_mib=40)), ("file", Recycling(handles=3)), ("0", Recycling(episodes=4))],
)
def test_a_process_that_grew_is_replaced_between_episodes(leak: str, recycling: Recycling) -> None:
    """What its first episode needs is no growth: from there on three more are too many."""
    with SimulatorPool(f"leak/{leak}", 1, make=fakes.make_leaking, recycling=recycling) as pool:
        first, replaced = pool.pids, []
        for episode in range(12):
            observation = pool.reset({0: episode})[0]
            assert isinstance(observation, SimObservation)
            assert isinstance(pool.step({0: ONES})[0], StepResult)
            if pool.pids != first:
                first = pool.pids
                replaced.append(episode)
        assert replaced == [4, 8]


def test_processes_are_recycled_between_episodes_only() -> None:
    with counting(rows=2, processes=1, recycle_after=3) as pool:
        first = pool.pids
        pool.reset({0: 1, 1: 2})
        pool.step({0: ONES.repeat(3, 0)})  # row 0 is done, row 1 is in the middle
        pool.reset({0: 3})
        pool.step({0: ONES.repeat(3, 0)})
        pool.reset({0: 4})  # due, but row 1 would lose its episode
        assert pool.pids == first
        assert isinstance(pool.step({1: ONES})[1], StepResult)
        pool.reset({0: 5, 1: 6})
        assert pool.pids != first
        wait_until_gone(first)
        assert isinstance(pool.step({0: ONES, 1: ONES})[1], StepResult)


def test_a_simulator_that_cannot_be_made_says_why() -> None:
    with (
        SimulatorPool(fakes.TASK, 1, make=fakes.make_impossible) as pool,
        pytest.raises(SimulatorError, match="reach-v3 cannot be made: no OpenGL library is installed"),
    ):
        pool.reset({0: 1})
    with (
        SimulatorPool(fakes.TASK, 1, make=fakes.make_endless, deadlines=Deadlines(make_s=1.0)) as pool,
        pytest.raises(SimulatorError, match="took longer than 1 s"),
    ):
        pool.reset({0: 1})
    with (
        SimulatorPool(fakes.TASK, 1, make=fakes.make_deadly) as pool,
        pytest.raises(SimulatorError, match="its process died"),
    ):
        pool.reset({0: 1})


def test_what_was_asked_for_wrongly_is_not_the_machines_fault() -> None:
    with SimulatorPool(fakes.TASK, 1, make=fakes.make_wrong) as pool, pytest.raises(ValueError, match="camera 'front'"):
        pool.reset({0: 1})


def test_nobody_is_asked_at_the_terminal() -> None:
    with (
        SimulatorPool(fakes.TASK, 1, make=fakes.make_asking, deadlines=QUICK) as pool,
        pytest.raises(SimulatorError, match="EOFError: EOF when reading a line"),
    ):
        pool.reset({0: 1})


def test_what_makes_a_simulator_must_be_importable_by_name() -> None:
    with pytest.raises(ValueError, match="<lambda> cannot be imported by a worker process"):
        SimulatorPool(fakes.TASK, 1, make=lambda task, options: fakes.make_counting(task, options))


def test_rows_and_sizes_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="both must be 1 or more"):
        SimulatorPool(fakes.TASK, 0, make=fakes.make_counting)
    with pytest.raises(ValueError, match="there is no simulator task"):
        open_pool("metaworld/nothing-v3", 1)
    with counting(rows=2, processes=5) as pool:
        assert len(pool.pids) == 2
        with pytest.raises(ValueError, match="rows 0 to 1"):
            pool.reset({2: 1})


def test_workers_die_with_a_parent_that_is_killed() -> None:
    """Even one that hangs in a step, which would never look at its pipe again."""
    script = (
        "from joynexus.simulation.pool import SimulatorPool\n"
        "from tests.unit.env import fakes\n"
        "import numpy as np\n"
        "pool = SimulatorPool(fakes.TASK, 2, processes=2, make=fakes.make_counting)\n"
        "pool.reset({0: fakes.HANGS, 1: 1})\n"
        "print(*pool.pids, flush=True)\n"
        "pool.step({0: np.ones((1, 4), np.float32)})\n"
    )
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = tuple(int(pid) for pid in parent.stdout.readline().split())
        assert len(pids) == 2
        parent.kill()
    wait_until_gone(pids)
