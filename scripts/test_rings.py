"""Run the tests ring by ring, from fast and pure to real processes, and say how long each took.

In: names of rings (default: all but the one of heavy simulators, without thorough tests). Out: pytest's output, then a
line a ring; exit code 1 if any failed. Never: a ring left out because an earlier one failed; a failure not shown.

Tests of real processes share their cores with each other and with whatever else the machine does, and may find it
stalled for longer than their deadlines allow. Where a few of them fail, they run once more, alone; the table says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RINGS = {
    "unit": "pure cores, file formats, numerics: no other process",
    "wire": "bytes of every message, hostile input, other languages' encoders",
    "process": "real roles, real sockets, kills",
    "browser": "the dashboard in a real browser; skipped where there is none (make test-browser installs one)",
    "fuzz": "changed bytes, and whatever comes to a master's ports: two minutes of what `make fuzz` does for an hour",
    "chaos": "cases of fault in real processes, with a table of what was found",
    "simulators": "what needs ManiSkill or LIBERO, from the other rings",
}
WORKERS = {"process": 2, "browser": 2, "fuzz": 2, "chaos": 2}
"""Processes that run a ring, a file of tests each (others: one a core). A cluster under test has processes enough."""
MOST_WORKERS = 8  # each imports torch
HEAVY = "simulators"  # installed and run on demand: `make test-simulators`
THOROUGH = "thorough"  # left out unless its ring is named
SECOND_TRY = {"process", "chaos", HEAVY}
MOST_AGAIN = 2  # more failures than this are no stall
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
        with tempfile.TemporaryDirectory(prefix="rings-") as cache:
            command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}"]
            command += [*chosen, "--durations=20"]
            code = subprocess.run([*command, *spread], cwd=ROOT, env=environment, check=False).returncode
            again = failed(Path(cache)) if code == 1 and name in SECOND_TRY else []
            if 0 < len(again) <= MOST_AGAIN:
                print(f"== ring {name}, once more and alone: {', '.join(again)}", flush=True)
                command += ["--last-failed", "--last-failed-no-failures", "none"]
                code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        verdict = {0: "passed", NO_TESTS: "has no tests"}.get(code, "FAILED")
        if code == 0 and again:
            verdict += f", {len(again)} at the second try"
        rows.append((name, verdict, time.monotonic() - start))
    print(f"\n{'ring':<12}{'verdict':<28}seconds")
    for name, verdict, seconds in rows:
        print(f"{name:<12}{verdict:<28}{seconds:7.1f}")
    print(f"{'all':<40}{sum(seconds for _, _, seconds in rows):7.1f}")
    return int(any(not verdict.startswith("passed") for _, verdict, _ in rows))


def failed(cache: Path) -> list[str]:
    """Names of the tests that failed in the run that left this cache behind."""
    file = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(file.read_text())) if file.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
