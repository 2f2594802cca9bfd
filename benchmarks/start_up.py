"""Time from `joynexus up` to the first training step of a tenant's own loop.

In: a checkout whose backbone files are cached. Out: seconds until all roles work, until the client is connected with
its policy made, and until the first `forward_backward` and `optim_step` were answered. Never: a warm process: each run
is a cluster of its own, ended before the next.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import joynexus
from benchmarks import _report
from joynexus import launch
from joynexus.client import Batch
from joynexus.contract import Camera, Contract
from joynexus.specs import PolicySpec

CACHE = Path(".joynexus/cache").absolute()
CONTRACT = Contract(robot="toy", cameras=(Camera(name="front", height=64, width=64),), state_dim=8, action_dim=4)
ROWS, CHUNK = 16, 8


def main(argv: Sequence[str] | None = None) -> None:
    options = _report.arguments("start_up", "Seconds from `joynexus up` to the first training step.", argv)
    runs = [once() for _ in range(2 if options.quick else 5)]
    rows: list[_report.Row] = [
        {"backbone": "lite@64", "until": name, "target_s": 10.0 if name == "first training step" else "", **figures}
        for name, figures in ((name, _report.spread([run[name] for run in runs], 2)) for name in runs[0])
    ]
    _report.write("start_up", options, rows)


def once() -> dict[str, float]:
    """Bring a cluster up, take one training step, take it down; return seconds since the start by what was reached."""
    random = np.random.default_rng(0)
    batch = Batch(
        state=random.normal(size=(ROWS, 8)).astype(np.float32),
        action=random.normal(size=(ROWS, CHUNK, 4)).astype(np.float32),
        images=(random.integers(0, 256, (ROWS, 64, 64, 3), dtype=np.uint8),),
        instructions="reach the goal",
    )
    spec = PolicySpec(backbone="lite@64", chunk=CHUNK, contract=CONTRACT, normalization="none")
    reached: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        try:
            cluster = launch.up(Path(folder), launch.Options(backbone="lite@64", cache_dir=CACHE))
            reached["all roles work"] = time.monotonic() - start
            with joynexus.connect(cluster.client_file) as client:
                policy = client.create_policy("first", spec)
                reached["policy made"] = time.monotonic() - start
                policy.forward_backward(batch)
                policy.optim_step().result(60)
                reached["first training step"] = time.monotonic() - start
        finally:
            launch.down(Path(folder))
    return reached


if __name__ == "__main__":
    main()
