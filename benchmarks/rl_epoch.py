"""What one pass over an update's experience takes, which nothing interrupts: by head, chunk and size of the update.

In: rollouts of random numbers, without pictures. Out: CPU time of an `rl_epoch` in the trainer's engine, and for each
optimizer step in it. Never: simulators, a real backbone's forward (features are noise, 384 wide), or wall time.

    .venv/bin/python -m benchmarks.rl_epoch [--quick]
"""

from __future__ import annotations

from joynexus.vla import numerics

numerics.configure(1)

# torch may only be imported after `configure`.
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402

from benchmarks import _report  # noqa: E402
from joynexus.contract import Contract  # noqa: E402
from joynexus.simulation.trajectories import pack  # noqa: E402
from joynexus.specs import PolicySpec, PpoSpec  # noqa: E402
from joynexus.vla.feature import Observation  # noqa: E402
from tests.unit.trainer.rollouts import INSTRUCTION, RlLoop, made_up  # noqa: E402
from tests.unit.workers import Bench  # noqa: E402

STATE, ACTION, HIDDEN = 39, 4, 384
GROOT = {"width": 64, "layers": 2, "heads": 2}
SHAPES = [("oft", {}, 1, 16), ("oft", {}, 5, 16), ("oft", {}, 1, 160), ("groot", GROOT, 5, 16)]
DECISIONS = 100
"""Of each episode."""


def main(argv: Sequence[str] | None = None) -> None:
    options = _report.arguments("rl_epoch", "One pass of PPO over an update's experience.", argv)
    _report.write("rl_epoch", options, [row(*shape, 3 if options.quick else 10) for shape in SHAPES])


def row(head: str, config: dict[str, int], chunk: int, episodes: int, runs: int) -> _report.Row:
    """Go over the same experience several times; the first pass, which reads it, is not counted."""
    contract = Contract(robot="bench", cameras=(), state_dim=STATE, action_dim=ACTION)
    spec = PolicySpec(
        backbone="noise", head=head, head_config={**config}, chunk=chunk, contract=contract, normalization="none"
    )
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        bench.backbone.hidden_size = HIDDEN
        loop = RlLoop(bench, spec, PpoSpec(epochs=runs + 1, minibatch=400))
        loop.start()
        dice, rows = np.random.default_rng(0), episodes * DECISIONS
        state = dice.standard_normal((rows, STATE), dtype=np.float32)
        features = bench.backbone.forward([Observation((), INSTRUCTION)])
        sample = loop.acting.explore(features, state[:1], seeds=[0]).sample
        rollout = made_up(
            1,
            lengths=[DECISIONS] * episodes,
            chunk=chunk,
            actions=ACTION,
            values=chunk,
            contract=contract.digest(),
            instruction=INSTRUCTION,
            state=state,
            sample=sample.repeat(rows, axis=0),
        )
        pages = (bench.blobs.put_bytes(pack(rollout)),)
        loop.op("rl_epoch", rl=loop.epoch(0, 0, pages))
        seconds = []
        for epoch in range(1, runs + 1):
            before = time.process_time()
            steps = loop.op("rl_epoch", rl=loop.epoch(0, epoch, pages)).result.metrics["steps"]
            seconds.append(time.process_time() - before)
    measured = _report.spread(seconds)
    return {
        "head": head,
        "chunk": chunk,
        "decisions": rows,
        "steps": int(steps),
        "epoch_cpu_s": measured["median"],
        "max": measured["max"],
        "runs": runs,
        "step_cpu_ms": round(1000 * float(str(measured["median"])) / steps, 1),
    }


if __name__ == "__main__":
    main()
