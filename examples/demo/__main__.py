"""`python -m examples.demo [--full]`: a cluster in `runs/demo/cluster`, several tenants at once, one table.

In: nothing. Out: `runs/demo` with data sets, curves, a video and `summary.json`; exit code 1 if a result is not as good
as it should be. Never: a process left behind.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from types import FrameType

from rich.console import Console

import joynexus
from examples.demo import report, tenants
from joynexus import launch
from joynexus.keyring import Keyring
from joynexus.local import LocalCluster


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"))
    parser.add_argument("--full", action="store_true", help="also GRPO from a weak clone, and a ManiSkill task")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    warnings.filterwarnings("ignore", module="metaworld")  # its experts ask for more than the arm can do, as always
    console, start = Console(width=None if sys.stdout.isatty() else 150), time.monotonic()

    def say(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - start:6.1f} s[/dim]  {line}", highlight=False)

    folder: Path = arguments.folder
    cluster = folder / "cluster"
    launch.down(cluster)  # one that an earlier demo was kept from ending
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        found = run(folder, cluster, say, full=arguments.full)
    except (ValueError, RuntimeError, joynexus.JoyNexusError) as error:
        console.print(f"[red]the demo failed:[/red] {error} (logs: {cluster / 'run'})", highlight=False)
        return 1
    finally:
        launch.down(cluster)
    seconds = time.monotonic() - start
    say("the cluster is down")
    report.print_table(found, console)
    report.draw_curves(found, folder / "curves.png")
    report.write_summary(found, seconds, folder / "summary.json")
    videos = [str(path) for path in found.videos]
    console.print(f"{seconds:.0f} s. {', '.join([str(folder / 'curves.png'), str(folder / 'summary.json'), *videos])}")
    for sentence in found.short:
        console.print(f"[red]not good enough:[/red] {sentence}")
    return int(bool(found.short))


def run(folder: Path, cluster: Path, say: tenants.Say, *, full: bool) -> tenants.Found:
    """Bring a cluster up, and let all tenants do their work on it at the same time."""
    local = launch.up(
        cluster, launch.Options(backbone=tenants.BACKBONE, simulator_processes=2), lambda line: say(f"cluster: {line}")
    )
    data, given, was_given = folder / "datasets", [], threading.Event()

    def give(exported: Path) -> None:
        given.append(exported)
        was_given.set()

    def judge(client: joynexus.Client) -> tenants.Found:
        was_given.wait()
        return tenants.judge(client, given[0], say) if given else tenants.Found()

    work: dict[str, Callable[[joynexus.Client], tenants.Found]] = {
        "imitation": lambda client: tenants.imitate(client, data, say, give),
        "reinforcement": lambda client: tenants.reinforce(client, say),
        "judgement": judge,
    }
    if full:
        work["improvement"] = lambda client: tenants.improve(client, data, say)
        work["manipulation"] = lambda client: tenants.manipulate(client, data, say)
    with ThreadPoolExecutor(len(work)) as pool:
        running = [pool.submit(as_tenant, local, name, each) for name, each in work.items()]
        done, others = wait(running, return_when=FIRST_EXCEPTION)
        if others:  # one has failed
            was_given.set()
            launch.down(cluster)  # so that the threads of the others end
            for each in done:
                each.result()
        return merge([each.result() for each in running])


def as_tenant(local: LocalCluster, name: str, work: Callable[[joynexus.Client], tenants.Found]) -> tenants.Found:
    """Give a tenant a key, as an operator does, and let it work."""
    with joynexus.connect(Keyring(local.keys).issue(name, tenant=name)) as client:
        return work(client)


def merge(parts: list[tenants.Found]) -> tenants.Found:
    """Put together what the tenants found."""
    whole = tenants.Found()
    for part in parts:
        whole.measured += part.measured
        whole.losses |= part.losses
        whole.updates |= part.updates
        whole.videos += part.videos
        whole.short += part.short
    return whole


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
