"""Whether simulators leak: each is made, run and closed many times in one pool, and runs many episodes in one process.

In: the families of simulators that are installed here. Out: for each, with and without pictures, how much memory and
how many open files the parent, the process that forks workers, and the workers have more after the last round than
after the first ones; and how many processes are left. Exit code 1 if something grew that should not. Never: a simulator
in the measuring process.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import _report
from joynexus.contract import Camera
from joynexus.simulation.interface import SimulatorOptions, StepResult
from joynexus.simulation.pool import Deadlines, SimulatorPool
from joynexus.simulation.process import Recycling, process_size
from services.env.simulators.registry import family_of, make_simulator, prepare_process, survey

TASKS = ("metaworld/reach-v3", "gymnasium/Reacher-v5", "maniskill/PickCube-v1", "libero/libero_object/0")
BLIND = SimulatorOptions(cameras=())
PICTURES = {
    "gymnasium": SimulatorOptions(cameras=(Camera(name="render", height=64, width=64),)),
}
WARM = 2
"""Rounds until caches are full; growth counts from there."""
ALLOWED_MIB, ALLOWED_FILES = 24.0, 2
"""What may differ between two rounds by chance: allocators give memory back when they like."""


class Sizes(NamedTuple):
    """Memory [MiB] and open files after a round."""

    parent: tuple[float, int]
    nursery: tuple[float, int]
    worker: tuple[float, int]


def main(argv: Sequence[str] | None = None) -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=0, help="of each kind; 30, with --quick 4")
        parser.add_argument("--family", default="", help="only this one")

    options = _report.arguments("soak", "Whether simulators leak.", argv, more)
    rounds = options.rounds or (4 if options.quick else 30)
    prepare_process()
    problems = survey()
    rows: list[_report.Row] = []
    for task in TASKS:
        family = task.partition("/")[0]
        if options.family not in ("", family):
            continue
        if problems[family]:
            print(f"{family} is left out: {problems[family]}", flush=True)
            continue
        for pictures in (False, True):
            seen = PICTURES.get(family, SimulatorOptions()) if pictures else BLIND
            for kind, recycling in (
                ("made and closed", Recycling(episodes=1)),
                ("episodes in one process", Recycling()),
            ):
                row = soak(task, seen, rounds, recycling)
                rows.append({"simulator": task, "pictures": pictures, "rounds of": kind, "rounds": rounds, **row})
                print(*rows[-1].values(), flush=True)
    _report.write("soak", options, rows, flags=f" --rounds {rounds}" if options.rounds else "")
    sys.exit(0 if all(row["ok"] for row in rows) else 1)


def soak(task: str, options: SimulatorOptions, rounds: int, recycling: Recycling) -> _report.Row:
    """Run rounds of one episode each; with recycling, each in an environment and a process of its own."""
    sizes: list[Sizes] = []
    started, before = time.monotonic(), process_size(os.getpid())
    with SimulatorPool(
        task,
        1,
        make=make_simulator,
        preload=family_of(task).preload,
        options=options,
        deadlines=Deadlines(make_s=300.0),
        recycling=recycling,
    ) as pool:
        chunk = np.zeros((5, pool.contract.action_dim), np.float32)
        for seed in range(rounds):
            pool.reset({0: seed})
            result = pool.step({0: chunk})[0]
            if not isinstance(result, StepResult):
                raise SystemExit(f"{task}: {result.reason}")
            nursery = parent_of(pool.pids[0])
            sizes.append(Sizes(process_size(os.getpid()), process_size(nursery), process_size(pool.pids[0])))
    seconds = (time.monotonic() - started) / rounds
    left = sum(parent_of(int(path.name)) == nursery for path in Path("/proc").iterdir() if path.name.isdigit())
    first, last = sizes[min(WARM, rounds) - 1], sizes[-1]
    row: _report.Row = {"seconds_each": round(seconds, 2)}
    ok = left == 0
    for who in Sizes._fields:
        (memory, files), (later, later_files) = getattr(first, who), getattr(last, who)
        row |= {f"{who}_mib": round(memory, 1)} if who == "worker" else {}
        row |= {f"{who}_mib_more": round(later - memory, 1), f"{who}_files_more": later_files - files}
        ok = ok and later - memory <= ALLOWED_MIB and later_files - files <= ALLOWED_FILES
    after = process_size(os.getpid())
    row |= {"files_left": after[1] - before[1], "processes_left": left}
    return row | {"ok": ok and after[1] - before[1] <= ALLOWED_FILES}


def parent_of(pid: int) -> int:
    """Return the process that forked this one, 0 if it is gone or only waits to be forgotten (Linux)."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return 0
    return 0 if state == "Z" else int(parent)


if __name__ == "__main__":
    main()
