"""PPO from scratch on `metaworld/reach-v3`, synchronous and asynchronous, on a real cluster.

In: nothing. Out: for each mode and seed the wall time until the episodes of an update succeed often enough, updates,
the largest staleness seen, trainer and env busy seconds, and success of the last version on 100 fixed seeds. Never: two
runs at the same time; the modes take turns, each run on a policy of its own on the same cluster.

    python -m benchmarks.rl_async [--quick] [--seeds N]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

import joynexus
from benchmarks import _report
from joynexus import launch
from joynexus.specs import ExplorationSpec, OptimizerSpec, PpoSpec, RlPolicy, RlSpec

BACKBONE, ENV, LIMIT = "lite@64", "metaworld/reach-v3", 100
STALENESS = (0, 1)
"""0 is synchronous."""


def spec(policy: str, seed: int, staleness: int, updates: int) -> RlSpec:
    """Return the job: the same but for its seeds and staleness."""
    return RlSpec(
        policy=policy,
        env=ENV,
        updates=updates,
        episodes=32,
        episode_limit=LIMIT,
        reward_scale=0.1,
        stop_at=0.85,
        max_staleness=staleness,
        algorithm=PpoSpec(gamma=0.95, lam=0.95, epochs=8, minibatch=128),
        exploration=ExplorationSpec(std=0.5),
        optimizer=OptimizerSpec(lr=5e-4, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.0, grad_clip=0.5),
        create=RlPolicy(backbone=BACKBONE, head="oft", chunk=4, seed=seed),
        first_seed=1_000_000 + 100_000 * seed,
        seed=seed,
    )


def measure(client: joynexus.Client, seed: int, staleness: int, updates: int, episodes: int) -> _report.Row:
    """Run one job and evaluate what came of it."""
    policy = f"seed{seed}-stale{staleness}"
    before = _busy(client)
    start = time.monotonic()
    done = client.submit(spec(policy, seed, staleness, updates)).wait(progress=False)
    wall = time.monotonic() - start
    after = _busy(client)
    found = client.evaluate(policy=policy, env=ENV, episodes=episodes, episode_limit=LIMIT).wait(progress=False)
    assert found.evaluation is not None
    return {
        "max_staleness": staleness,
        "seed": seed,
        "wall_s": round(wall, 1),
        "updates": len(done.updates),
        "s_an_update": round(wall / len(done.updates), 2),
        "staleness_seen": max(point.staleness for point in done.updates),
        "trainer_busy_s": round(after["trainer"] - before["trainer"], 1),
        "inference_busy_s": round(after["inference"] - before["inference"], 1),
        "env_busy_s": round(after["env"] - before["env"], 1),
        "last_updates_success": round(done.updates[-1].success, 3),
        "evaluated": f"{found.evaluation.successes}/{found.evaluation.episodes}",
    }


def _busy(client: joynexus.Client) -> dict[str, float]:
    return {role.role: role.busy_s for role in client.status().roles}


def main(argv: Sequence[str] | None = None) -> None:
    def more(parser: ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=3, help="runs of each mode")

    options = _report.arguments("rl_async", "PPO on reach-v3, synchronous and asynchronous.", argv, more)
    updates, episodes, seeds = (2, 10, 1) if options.quick else (40, 100, options.seeds)
    rows: list[_report.Row] = []
    with tempfile.TemporaryDirectory(prefix="jnx-bench") as name:
        folder = Path(name)
        try:
            cluster = launch.up(folder, launch.Options(backbone=BACKBONE, simulator_processes=2))
            with joynexus.connect(cluster.client_file) as client:
                for seed in range(seeds):
                    for staleness in STALENESS if seed % 2 == 0 else STALENESS[::-1]:
                        rows.append(measure(client, seed, staleness, updates, episodes))
                        print(rows[-1], flush=True)
        finally:
            launch.down(folder)
    runs = list(rows)
    for column in ("wall_s", "s_an_update"):
        pairs = [
            [float(str(row[column])) for row in runs if row["max_staleness"] == staleness] for staleness in STALENESS
        ]
        ratios = [asynchronous / synchronous for synchronous, asynchronous in zip(*pairs, strict=True)]
        rows.append({"table": f"asynchronous / synchronous, {column}", **_report.spread(ratios)})
        print(f"asynchronous / synchronous, {column}: {statistics.median(ratios):.2f}")
    _report.write("rl_async", options, rows, flags="" if options.quick else f" --seeds {seeds}")


if __name__ == "__main__":
    main()
