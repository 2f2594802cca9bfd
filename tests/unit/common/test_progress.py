from __future__ import annotations

import threading
from collections.abc import Callable

from common.progress import EXIT_WEDGED, Progress, Watchdog


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_idle_process_is_never_overdue() -> None:
    clock = Clock()
    progress = Progress(clock=clock)
    clock.now = 1e6
    assert progress.overdue() == ""
    assert progress.report() == (0, "idle", 0.0)


def test_phase_without_progress_is_overdue_and_says_which() -> None:
    clock = Clock()
    progress = Progress(clock=clock)
    with progress.phase("loading", deadline_s=10):
        clock.now = 9.0
        assert progress.overdue() == ""
        progress.advance()
        clock.now = 18.0
        assert progress.overdue() == ""
        clock.now = 19.5
        assert "loading" in progress.overdue()
    assert progress.overdue() == ""


def test_only_the_innermost_phase_counts() -> None:
    clock = Clock()
    progress = Progress(clock=clock)
    with progress.phase("working", deadline_s=10):
        with progress.phase("loading", deadline_s=100):
            clock.now = 50.0
            assert progress.overdue() == ""
            assert progress.report()[1] == "loading"
        clock.now = 55.0
        assert progress.overdue() == ""
        clock.now = 61.0
        assert "working" in progress.overdue()


def test_busy_time_is_counted_within_phases_only() -> None:
    cpu = Clock()
    progress = Progress(cpu=cpu)
    cpu.now = 5.0
    with progress.phase("working", deadline_s=10):
        cpu.now = 7.0
        progress.advance()
        assert progress.report()[2] == 2.0
        with progress.phase("inner", deadline_s=10):
            cpu.now = 8.0
    cpu.now = 20.0
    progress.advance()
    progress.add_busy(0.5)
    assert progress.report()[2] == 3.5


def test_a_phase_tells_how_busy_its_thread_was_and_what_its_children_took() -> None:
    cpu = [0.0]
    progress = Progress(clock=lambda: 0.0, cpu=lambda: cpu[0])
    with progress.phase("working", deadline_s=10) as busy_s:
        cpu[0] += 1.5
        progress.add_busy(2.0)
        other = threading.Thread(target=progress.add_busy, args=(100.0,))  # is no part of this one's work
        other.start()
        other.join()
        assert busy_s() == 3.5
        cpu[0] += 0.5
        assert busy_s() == 4.0
    with progress.phase("working", deadline_s=10) as busy_s:
        assert busy_s() == 0.0
    assert progress.report()[2] == 104.0


def test_one_threads_progress_does_not_hide_anothers_hang() -> None:
    clock = Clock()
    progress = Progress(clock=clock)
    inside, leave = threading.Event(), threading.Event()

    def hang() -> None:
        with progress.phase("simulating", deadline_s=5):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hang)
    thread.start()
    assert inside.wait(10)
    with progress.phase("working", deadline_s=5):
        clock.now = 6.0
        progress.advance()
        assert "simulating" in progress.overdue()
    leave.set()
    thread.join()


def test_watchdog_ends_a_wedged_process() -> None:
    progress = Progress()
    ended = threading.Event()
    codes = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    watchdog = Watchdog(progress, exit=end, period_s=0.01, native=False)
    watchdog.start()
    with progress.phase("working", deadline_s=0.02):
        assert ended.wait(10)
    watchdog.stop()
    assert codes == [EXIT_WEDGED]


class Waits:
    """In place of a watchdog's event: time passes as it is told, with something done meanwhile; then it is stopped."""

    def __init__(self, clock: Clock, *steps: tuple[float, Callable[[], None]]) -> None:
        self._clock, self._steps = clock, iter(steps)

    def wait(self, _period_s: float) -> bool:
        step = next(self._steps, None)
        if step is not None:
            self._clock.now += step[0]
            step[1]()
        return step is None


def test_a_process_that_stood_still_as_a_whole_is_not_taken_for_wedged() -> None:
    def looks(*steps: tuple[float, Callable[[], None]]) -> list[int]:
        codes: list[int] = []
        watchdog = Watchdog(progress, exit=codes.append, native=False)
        watchdog._stop = Waits(clock, *steps)  # type: ignore[assignment]
        watchdog._run()
        return codes

    clock = Clock()
    progress = Progress(clock=clock)
    with progress.phase("serving", deadline_s=5):
        stopped = (60.0, lambda: None)
        assert looks(stopped, (0.5, progress.advance), (0.5, lambda: None)) == []
        assert looks(stopped, (0.5, lambda: None)) == [EXIT_WEDGED], "but then it has to move on"
