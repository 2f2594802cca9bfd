"""`python -m examples.demo`: a cluster in `runs/demo/cluster`, two policies, one table.

In: nothing. Out: `runs/demo` with data sets, curves, a video and `summary.json`; exit code 1 if a policy is not good.
Never: a process left behind.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

import joynexus
from examples.demo import report, stages
from joynexus import launch

GOOD, BAD = 0.9, 0.1


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"))
    parser.add_argument("--episodes", type=int, default=50, help="of the evaluation of each trained policy")
    parser.add_argument("--untrained-episodes", type=int, default=20, help="and of the untrained one")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    warnings.filterwarnings("ignore", module="metaworld")  # its experts ask for more than the arm can do, as always
    console, start = Console(width=None if sys.stdout.isatty() else 140), time.monotonic()

    def say(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - start:6.1f} s[/dim]  {line}", highlight=False)

    folder: Path = arguments.folder
    cluster = folder / "cluster"
    launch.down(cluster)  # one that an earlier demo was kept from ending
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        outcomes = run(folder, cluster, arguments.episodes, arguments.untrained_episodes, say)
    except (ValueError, joynexus.JoyNexusError) as error:
        console.print(f"[red]the demo failed:[/red] {error} (logs: {cluster / 'run'})", highlight=False)
        return 1
    finally:
        launch.down(cluster)
    seconds = time.monotonic() - start
    say("the cluster is down")
    report.print_table(outcomes, console)
    report.draw_curves(outcomes, folder / "curves.png")
    report.write_summary(outcomes, seconds, folder / "summary.json")
    videos = [str(path) for outcome in outcomes for path in outcome.videos]
    console.print(f"{seconds:.0f} s. {folder / 'curves.png'}, {folder / 'summary.json'}, {', '.join(videos)}")
    weak = [o.task.name for o in outcomes if o.trained.success < GOOD or o.untrained.success > BAD]
    if weak:
        console.print(f"[red]not good enough:[/red] {', '.join(weak)} (trained ≥ {GOOD:.0%}, untrained ≤ {BAD:.0%})")
    return int(bool(weak))


def run(folder: Path, cluster: Path, episodes: int, untrained_episodes: int, say: stages.Say) -> list[stages.Outcome]:
    """Record, train and evaluate all tasks; each goes on in the cluster while the next is recorded."""
    options = launch.Options(backbone=stages.BACKBONE, simulator_processes=2)
    with ThreadPoolExecutor(len(stages.TASKS) + 1) as pool:
        starting = pool.submit(launch.up, cluster, options, lambda line: say(f"cluster: {line}"))

        def rest(task: stages.Task, recorded: Path) -> stages.Outcome:
            local = starting.result()
            with joynexus.connect(local.client_file) as client:
                return stages.train_and_evaluate(
                    client, task, recorded, folder / "videos", say,
                    untrained_episodes=untrained_episodes, episodes=episodes,
                )  # fmt: skip

        running: list[Future[stages.Outcome]] = []
        try:
            for task in stages.TASKS:
                recorded = folder / "datasets" / task.name
                stages.record(task, recorded, say)
                running.append(pool.submit(rest, task, recorded))
                waited_for: list[Future[Any]] = [starting, *running]
                if any(future.done() and future.exception() for future in waited_for):
                    break  # no need to record more
            return [future.result() for future in running]
        except BaseException:
            launch.down(cluster)  # so that the threads that wait for it end
            raise


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
