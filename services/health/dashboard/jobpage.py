"""What a job's page shows: its figures, its curves, what it found.

In: a `JobPicture`. Out: facts as pairs of texts, `Chart`s. Never: HTML, or a figure that its kind of job does not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from joynexus.specs import EvaluateDatasetSpec, EvaluateSpec, PipelineSpec, RlSpec, SftSpec
from services.health.dashboard import figures
from services.health.dashboard.chart import Chart, draw

if TYPE_CHECKING:
    from joynexus.wire.back import ClusterView, JobRow
    from joynexus.wire.front import JobInfo
    from services.health.dashboard.curves import JobPicture

_UNITS = {"sft": "steps", "rl": "updates", "evaluate": "episodes", "evaluate_dataset": "pages", "pipeline": "stages"}


def kind(info: JobInfo) -> str:
    """Return a job's kind, as in its spec."""
    tag = type(info.spec).__struct_config__.tag
    return str(tag)


def unit(kind: str) -> str:
    """Return what a job of this kind counts."""
    return _UNITS.get(kind, "steps")


def row(view: ClusterView, picture: JobPicture) -> JobRow | None:
    """Return the picture's row of a job; None if it is too old to be in there."""
    same = (job for job in view.jobs if job.job == picture.name and job.tenant == picture.tenant)
    return next(same, None)


def facts(view: ClusterView, picture: JobPicture) -> tuple[tuple[str, str], ...]:
    """Return the figures of a job, as pairs of name and text."""
    info = picture.info
    if info is None:
        return ()
    spec, found = info.spec, row(view, picture)
    pairs = [
        ("Tenant", picture.tenant),
        ("Kind", kind(info)),
        ("Time", figures.duration(info.seconds)),
        ("Rate", figures.rate(found.rate, unit(kind(info))) if found and found.rate else ""),
        ("Left, about", figures.duration(found.eta_s) if found and found.eta_s else ""),
        ("Data set", spec.dataset if isinstance(spec, SftSpec | EvaluateDatasetSpec) else ""),
        ("Simulator task", spec.env if isinstance(spec, RlSpec) else ""),
        ("Simulator tasks", ", ".join(spec.tasks) if isinstance(spec, EvaluateSpec) else ""),
        ("Published", f"version {info.version}" if info.version else ""),
        ("Samples trained on", figures.count(info.samples) if info.samples else ""),
        ("Backbone forwards", figures.count(info.backbone_forwards) if info.backbone_forwards else ""),
    ]
    return tuple((name, text) for name, text in pairs if text)


def charts(picture: JobPicture) -> tuple[Chart, ...]:
    """Return the curves of a job: loss (SFT), success and return (RL)."""
    info = picture.info
    if info is None:
        return ()
    if isinstance(info.spec, SftSpec):
        points = [(index + 1.0, loss) for index, loss in enumerate(picture.losses)]
        return (draw(points, title="Loss", across="step", up="loss"),)
    if isinstance(info.spec, RlSpec):
        updates = picture.updates
        success = [(update.update + 1.0, update.success) for update in updates]
        reward = [(update.update + 1.0, update.reward) for update in updates]
        return (
            draw(success, title="Success rate", across="update", up="success", text=figures.percent, bounds=(0.0, 1.0)),
            draw(reward, title="Mean return", across="update", up="return"),
        )
    return ()


def spec_text(info: JobInfo) -> str:
    """Return the spec as YAML, without what was left at its default."""
    plain = msgspec.to_builtins(info.spec)
    return msgspec.yaml.encode(_kept(info.spec, plain)).decode()


def _kept(spec: object, plain: dict[str, object]) -> dict[str, object]:
    if isinstance(spec, PipelineSpec):
        return {**plain, "stages": [_kept(stage, msgspec.to_builtins(stage)) for stage in spec.stages]}
    if not isinstance(spec, msgspec.Struct):
        return plain
    fields = {field.name: field for field in msgspec.structs.fields(spec)}
    return {
        name: value
        for name, value in plain.items()
        if name not in fields or getattr(spec, name) != fields[name].default
    }
