"""The demo's results: a table, curves, a summary for machines.

In: outcomes. Out: text on standard output, `curves.png`, `summary.json`. Never: a number that is not in an outcome.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from examples.demo.stages import Outcome
from joynexus.wire.front import EvaluationResult


def print_table(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the figures of all tasks."""
    table = Table(title="Success in the simulator, with 95 % intervals", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("policy", "task", "untrained", "trained", "steps", "train", "evaluate", "forwards/sample", "versions"):
        table.add_column(name, justify="left" if name in ("policy", "task") else "right")
    for outcome in outcomes:
        table.add_row(
            f"{outcome.task.name} ({outcome.head})",
            outcome.task.env,
            _rate(outcome.untrained),
            _rate(outcome.trained),
            str(outcome.task.steps),
            f"{outcome.train_s:.0f} s",
            f"{outcome.evaluate_s:.0f} s",
            f"{outcome.backbone_forwards_per_sample:.2f}",
            f"{outcome.untrained.version} → {outcome.trained.version}",
        )
    console.print(table)


def _rate(result: EvaluationResult) -> str:
    return f"{result.successes}/{result.episodes} ({100 * result.low:.0f} to {100 * result.high:.0f} %)"


def draw_curves(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw loss curves and success rates."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for outcome in outcomes:
        left.plot(range(1, len(outcome.losses) + 1), outcome.losses, linewidth=0.8, label=outcome.task.name)
    left.set(xlabel="optimizer step", ylabel="L1 loss (normalised actions)", yscale="log", title="Training")
    left.legend()
    for index, outcome in enumerate(outcomes):
        for shift, result, color in ((-0.2, outcome.untrained, "0.75"), (0.2, outcome.trained, f"C{index}")):
            errors = [[result.success - result.low], [result.high - result.success]]
            right.bar(index + shift, result.success, 0.36, yerr=errors, capsize=4, color=color)
    right.set_xticks(range(len(outcomes)), [outcome.task.name for outcome in outcomes])
    right.set(ylabel="success", ylim=(0, 1.05), title="Success, untrained and trained (95 %)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write_summary(outcomes: Sequence[Outcome], seconds: float, path: Path) -> None:
    """Write the figures as JSON."""
    policies = [
        {
            "name": outcome.task.name,
            "head": outcome.head,
            "backbone": outcome.backbone,
            "task": outcome.task.env,
            "success": outcome.trained.success,
            "success_low": outcome.trained.low,
            "success_high": outcome.trained.high,
            "success_untrained": outcome.untrained.success,
            "episodes": outcome.trained.episodes,
            "episodes_untrained": outcome.untrained.episodes,
            "version": outcome.trained.version,
            "version_untrained": outcome.untrained.version,
            "steps": outcome.task.steps,
            "demonstrations": outcome.task.demonstrations,
            "dataset_steps": outcome.dataset_steps,
            "samples": outcome.samples,
            "backbone_forwards": outcome.backbone_forwards,
            "backbone_forwards_per_sample": outcome.backbone_forwards_per_sample,
            "final_loss": outcome.losses[-1],
            "train_seconds": outcome.train_s,
            "evaluate_seconds": outcome.evaluate_s,
            "contract": outcome.trained.contract_digest,
            "software": outcome.trained.software,
        }
        for outcome in outcomes
    ]
    path.write_text(json.dumps({"policies": policies, "seconds": seconds}, indent=2) + "\n")
