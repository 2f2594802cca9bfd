"""The demo's results: a table, curves, a summary for machines.

In: what the tenants found. Out: text on standard output, `curves.png`, `summary.json`. Never: a number that is not in
what they found.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from examples.demo.tenants import Found, Measured
from joynexus.wire.front import EvaluationResult


def print_table(found: Found, console: Console) -> None:
    """Print the figures of all tenants."""
    table = Table(title="Success in the simulator, with 95 % intervals", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("tenant", "how", "task", "before", "after", "training", "forwards/samples"):
        left = name in ("tenant", "how", "task")
        table.add_column(name, justify="left" if left else "right", no_wrap=True, overflow="fold")
    for line in found.measured:
        table.add_row(
            line.tenant,
            line.how,
            line.env,
            _rate(line.before),
            _rate(line.after),
            f"{line.seconds:.0f} s" if line.seconds else "-",
            f"{line.forwards}/{line.samples}" if line.samples else "-",
        )
    console.print(table)


def _rate(result: EvaluationResult | None) -> str:
    if result is None:
        return "-"
    return f"{result.successes}/{result.episodes} ({100 * result.low:.0f}-{100 * result.high:.0f} %)"


def draw_curves(found: Found, path: Path) -> None:
    """Draw loss curves, learning curves and success rates."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    for name, losses in found.losses.items():
        left.plot(range(1, len(losses) + 1), losses, linewidth=0.8, label=name)
    left.set(xlabel="optimizer step", ylabel="L1 loss (normalised actions)", yscale="log", title="Imitation")
    left.legend()
    for name, updates in found.updates.items():
        middle.plot([point.update + 1 for point in updates], [point.success for point in updates], label=name)
    middle.set(xlabel="update", ylabel="success of its episodes", ylim=(0, 1.05), title="Reinforcement")
    middle.legend()
    for index, line in enumerate(found.measured):
        for shift, result, color in ((-0.2, line.before, "0.75"), (0.2, line.after, f"C{index}")):
            if result is not None:
                errors = [[result.success - result.low], [result.high - result.success]]
                right.bar(index + shift, result.success, 0.36, yerr=errors, capsize=4, color=color)
    names = [f"{line.tenant}\n{line.env.partition('/')[2]}" for line in found.measured]
    right.set_xticks(range(len(names)), names, fontsize=7)
    right.set(ylabel="success", ylim=(0, 1.05), title="Success, before and after (95 %)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write_summary(found: Found, seconds: float, path: Path) -> None:
    """Write the figures as JSON."""
    summary = {
        "seconds": seconds,
        "policies": [_line(line) for line in found.measured],
        "learning": {name: msgspec.to_builtins(updates) for name, updates in found.updates.items()},
        "final_losses": {name: losses[-1] for name, losses in found.losses.items()},
        "not_good_enough": found.short,
    }
    path.write_text(json.dumps(summary, indent=2) + "\n")


def _line(line: Measured) -> dict[str, object]:
    return {
        "tenant": line.tenant,
        "how": line.how,
        "task": line.env,
        "before": _numbers(line.before),
        "after": _numbers(line.after),
        "training_seconds": line.seconds,
        "backbone_forwards": line.forwards,
        "samples": line.samples,
        "contract": line.after.contract_digest,
        "software": line.after.software,
    }


def _numbers(result: EvaluationResult | None) -> dict[str, object] | None:
    if result is None:
        return None
    names = ("version", "successes", "episodes", "success", "low", "high", "mean_steps", "mean_reward", "failures")
    return {name: getattr(result, name) for name in names}
