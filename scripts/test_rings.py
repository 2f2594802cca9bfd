"""Run the tests ring by ring, from fast and pure to real processes, and say how long each took.

In: names of rings (default: all but the one of heavy simulators, without thorough tests). Out: pytest's output, then a
line a ring; exit code 1 if any failed. Never: a ring left out because an earlier one failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

RINGS = {
    "unit": "pure cores, file formats, numerics: no other process",
    "wire": "bytes of every message, hostile input, other languages' encoders",
    "process": "real roles, real sockets, kills",
    "chaos": "cases of fault in real processes, with a table of what was found",
    "simulators": "what needs ManiSkill or LIBERO, from the other rings",
}
WORKERS = {"process": 2, "chaos": 2}
"""Processes that run a ring, a file of tests each (others: one a core). A cluster under test has processes enough."""
MOST_WORKERS = 8  # each imports torch
HEAVY = "simulators"  # installed and run on demand: `make test-simulators`
THOROUGH = "thorough"  # left out unless its ring is named
ROOT = Path(__file__).resolve().parents[1]
NO_TESTS = 5


def main(names: list[str]) -> int:
    """Run the named rings; return the exit code."""
    unknown = [name for name in names if name not in RINGS]
    if unknown:
        print(f"there is no ring '{unknown[0]}': they are {', '.join(RINGS)}", file=sys.stderr)
        return 2
    # Threads of mathematics libraries would compete with the processes under test.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    rows: list[tuple[str, str, float]] = []
    for name in names or [name for name in RINGS if name != HEAVY]:
        print(f"== ring {name}: {RINGS[name]}", flush=True)
        start = time.monotonic()
        left_out = f"not {HEAVY}" + ("" if names else f" and not {THOROUGH}")
        chosen = ["tests", "-m", HEAVY] if name == HEAVY else [f"tests/{name}", "-m", left_out]
        workers = WORKERS.get(name, min(MOST_WORKERS, len(os.sched_getaffinity(0))))
        spread = [] if name == HEAVY else ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
        command = [sys.executable, "-m", "pytest", *chosen, *spread, "--durations=20"]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        verdict = {0: "passed", NO_TESTS: "has no tests"}.get(code, "FAILED")
        rows.append((name, verdict, time.monotonic() - start))
    print("\nring      verdict        seconds")
    for name, verdict, seconds in rows:
        print(f"{name:<10}{verdict:<15}{seconds:7.1f}")
    print(f"{'all':<25}{sum(seconds for _, _, seconds in rows):7.1f}")
    return int(any(verdict != "passed" for _, verdict, _ in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
