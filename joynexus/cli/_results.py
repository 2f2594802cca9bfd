"""What a job found, as text.

In: a `JobInfo`. Out: lines for a terminal. Never: a number that is not in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from joynexus.cli._common import print_json, print_table

if TYPE_CHECKING:
    from joynexus.wire.front import ActionError, EvaluationResult, JobInfo, UpdatePoint

_SHOWN_METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
_SHOWN_UPDATES = 12


def describe_job(info: JobInfo, json: bool) -> None:
    """Print what is known of a job."""
    if json:
        print_json(info)
        return
    typer.echo(f"job {info.job}: {info.state}, {info.done} of {info.total}, {info.seconds:.1f} s")
    if info.stages:
        rows = [(number, stage.kind, stage.job or "-", stage.state) for number, stage in enumerate(info.stages, 1)]
        print_table(("stage", "kind", "job", "state"), rows)
    if info.losses:
        typer.echo(f"loss {info.losses[0]:.4f} → {info.losses[-1]:.4f}, version {info.version or '-'}")
    if info.updates:
        _describe_updates(info.updates)
        typer.echo(f"version {info.version or '-'}")
    if info.samples:
        typer.echo(f"{info.backbone_forwards} backbone forwards for {info.samples} samples")
    if info.evaluation is not None:
        _describe_evaluation(info.evaluation)
    if info.action_error is not None:
        _describe_action_error(info.action_error)
    why = info.error.message if info.error is not None else info.message
    if why:
        typer.echo(f"why: {why}")
    if info.state == "parked":
        typer.echo(f"`joynexus jobs resume {info.job}` has it go on, `joynexus jobs cancel {info.job}` ends it")


def first_difference(first: EvaluationResult, other: EvaluationResult) -> str | None:
    """Compare two evaluations episode by episode; None if they are the same, else what differs first."""
    if first.contract_digest != other.contract_digest:
        return f"the environment's contract was {first.contract_digest}, then {other.contract_digest}"
    for before, after in zip(first.results, other.results, strict=True):
        told = [(e.success, e.steps, e.reward, e.failure) for e in (before, after)]
        if told[0] != told[1]:
            task = f" of {before.env}" if before.env else ""
            return f"seed {before.seed}{task}: (success, steps, reward, failure) was {told[0]}, then {told[1]}"
    return None


def _describe_updates(updates: tuple[UpdatePoint, ...]) -> None:
    """Print the learning curve, thinned out to a screen's height, the last update always."""
    stride = -(-len(updates) // _SHOWN_UPDATES)
    shown = sorted({*range(0, len(updates), stride), len(updates) - 1})
    rows = [
        (
            point.update,
            f"{point.success:.0%}",
            f"{point.reward:.3g}",
            f"{point.length:.0f}",
            point.staleness,
            *(f"{point.metrics[name]:.3g}" if name in point.metrics else "-" for name in _SHOWN_METRICS),
        )
        for point in (updates[index] for index in shown)
    ]
    print_table(("update", "success", "return", "steps", "stale", *_SHOWN_METRICS), rows)


def _describe_evaluation(found: EvaluationResult) -> None:
    typer.echo(
        f"version {found.version}: success {found.successes}/{found.episodes} = {found.success:.0%} "
        f"(95 % interval {found.low:.0%} to {found.high:.0%}), mean {found.mean_steps:.0f} steps"
    )
    if len(found.tasks) > 1:
        rows = [
            (
                task.env,
                f"{task.successes}/{task.episodes}",
                f"{task.low:.0%} to {task.high:.0%}",
                f"{task.mean_steps:.0f}",
                f"{task.mean_reward:.3g}",
                _reasons(task.failures),
            )
            for task in found.tasks
        ]
        print_table(("task", "success", "95 % interval", "steps", "return", "failures"), rows)
    elif found.failures:
        typer.echo(f"failures: {_reasons(found.failures)}")


def _reasons(failures: dict[str, int]) -> str:
    return ", ".join(f"{count}x {reason}" for reason, count in sorted(failures.items(), key=lambda pair: -pair[1]))


def _describe_action_error(error: ActionError) -> None:
    typer.echo(
        f"version {error.version} on {error.samples} samples: action error {error.policy:.4f}; "
        f"mean action {error.mean_action:.4f}, repeated state {error.repeat_state:.4f}"
    )
    for name, values in (("dimension", error.per_dimension), ("step of the chunk", error.per_step)):
        typer.echo(f"by {name}: " + "  ".join(f"{value:.4f}" for value in values))
