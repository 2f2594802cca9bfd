"""What a shared forward saves: the same steps of several tenants together and one tenant after another.

In: heads, backbones, numbers of tenants and local batches. Out: time of the serial way over that of the grouped one,
for the backbone forward alone and for the whole training step; whether the bits were equal; how the backbone would cut
the group by what it measured at start-up, and how that compares with the better of the two. Never: a ratio of times
from different moments: the ways take turns, and each repeat gives a ratio of its own.

Grouped means forced: all tenants' samples in one packed forward, however slow that is.

The time is shared out: each backbone gets an equal part of what is left, and cells that do not fit are named in the
table with the reason. `--device cuda` runs Qwen3-VL in the shapes of its 2B, 4B and 8B checkpoints.
"""

# ruff: noqa: E402 - how torch computes must be chosen before it is loaded

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from joynexus.vla import numerics

numerics.configure(1)

from benchmarks import _backbone_shapes as shapes
from benchmarks import _report
from benchmarks._group_arms import ARMS, Cell, ForwardTimer, Step, calibrated
from joynexus.vla.backbones import Backbone, load_backbone

TENANTS, BATCHES = (2, 4, 8), (1, 2, 4, 8, 16)
QUICK_TENANTS, QUICK_BATCHES = (2, 8), (1, 4)
CACHE = Path(".joynexus/cache")
SLOWEST = 0.97
"""The chosen way may be slower than the better of the two by this much."""


@dataclass(frozen=True)
class Setting:
    """A backbone of the table: its name here, what loads it, tokens a picture, and the side of its pictures."""

    name: str
    source: str
    visual_tokens: int
    side: int


CPU = (
    Setting("lite", "lite", 16, 128),
    Setting("tiny-qwen3vl", "tiny-qwen3vl@256", 64, 256),
    Setting("tiny-qwen25vl", "tiny-qwen25vl@224", 64, 224),
    Setting("small-qwen3vl", "small", 64, shapes.side_of(64)),
    Setting("small-qwen3vl-256", "small", 256, shapes.side_of(256)),
)
CUDA = tuple(
    Setting(f"{size}-qwen3vl" + ending, size, tokens, shapes.side_of(tokens))
    for size in ("2b", "4b", "8b")
    for tokens, ending in ((64, ""), (256, "-256"))
)


def main(argv: Sequence[str] | None = None) -> None:
    options = _report.arguments("group_batching", "Grouped against serial, by head and backbone.", argv, _more)
    settings = [
        s for s in (CUDA if options.device == "cuda" else CPU) if not options.backbone or s.name in options.backbone
    ]
    if options.quick and not options.backbone:
        settings = settings[:3]
    end = time.monotonic() + (options.seconds or (45 if options.quick else 660))
    rows: list[_report.Row] = []
    for index, setting in enumerate(settings):
        now = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            rows += table(setting, options, now + (end - now) / (len(settings) - index), Path(folder))
    _report.write("group_batching", options, rows, flags=_flags(options))
    for row in summary(rows):
        print(row)


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    names = [setting.name for setting in (*CPU, *CUDA)]
    parser.add_argument("--backbone", action="append", choices=names, help="only this one; may be given several times")
    parser.add_argument("--head", action="append", choices=("oft", "groot"), help="only this one")
    parser.add_argument("--seconds", type=float, help="time for all of it (660, quick 45)")


def _flags(options: argparse.Namespace) -> str:
    """Write the options that were given, for the command in the results."""
    given = [("device", [options.device])] if options.device != "cpu" else []
    given += [("dtype", [options.dtype])] if options.dtype != "float32" else []
    given += [("backbone", options.backbone or []), ("head", options.head or [])]
    given += [("seconds", [f"{options.seconds:g}"])] if options.seconds else []
    return "".join(f" --{name} {value}" for name, values in given for value in values)


def table(setting: Setting, options: argparse.Namespace, end: float, folder: Path) -> Iterator[_report.Row]:
    """Measure one backbone until its time ends."""
    backbone = load(setting, options, folder)
    verdict = numerics.probe(backbone)
    grouping = calibrated(backbone)
    found = f"; {grouping.describe()}" if grouping else ""
    title = f"{setting.name}, {setting.visual_tokens} visual tokens, {backbone.dtype} on {options.device}{found}"
    print(f"{title}; {verdict.detail}", flush=True)
    timer = ForwardTimer(backbone)
    repeats = 3 if options.quick else 5
    cost = 0.0  # seconds of a sample through a cell
    for head, tenants, batch in cells(options):
        row: _report.Row = {"table": title, "head": head, "tenants": tenants, "batch": batch}
        left, needed = end - time.monotonic(), cost * tenants * batch
        if cost and needed > left:
            yield row | {"left out": f"needs {needed:.0f} s"}
            continue
        size = "base" if options.device == "cuda" else "small"
        config = {"size": size} if head == "groot" else {}
        cell = Cell(backbone, timer, head, config, tenants=tenants, batch=batch, side=setting.side)
        began = time.monotonic()
        yield row | measure(cell, repeats)
        cost = (time.monotonic() - began) / (tenants * batch)
        cell.close()
    timer.close()


def load(setting: Setting, options: argparse.Namespace, folder: Path) -> Backbone:
    """Load a backbone that has a name, or make one of a shape."""
    if setting.source in shapes.SHAPES:
        return shapes.make(
            setting.source, setting.visual_tokens, device=options.device, dtype=options.dtype, folder=folder
        )
    return load_backbone(setting.source, device=options.device, dtype=options.dtype, cache_dir=CACHE)


def cells(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """List head, tenants and batch: most tenants with one sample each, then head by head from few samples to many."""
    tenants, batches = (QUICK_TENANTS, QUICK_BATCHES) if options.quick else (TENANTS, BATCHES)
    heads = options.head or ["oft", "groot"]
    return sorted(
        product(heads, tenants, batches),
        key=lambda cell: (cell[1:] != (8, 1), heads.index(cell[0]), cell[1] * cell[2], cell[2]),
    )


def measure(cell: Cell, repeats: int) -> _report.Row:
    """Let the ways take turns; return the ratios of a cell."""
    gc.collect()  # what earlier cells left is not to be collected while the clock runs
    cut = cell.cut
    arms = ARMS if len(cut) > 1 else ARMS[:2]  # a group that is not cut is the grouped way itself
    seen: dict[str, list[Step]] = {arm: [] for arm in arms}
    for repeat in range(1 + repeats):
        turn = repeat % len(arms)
        for arm in (*arms[turn:], *arms[:turn]):
            step = cell.step(arm)
            if repeat:  # the first one pays for what is made once
                seen[arm].append(step)
        cell.next()
    grouped, serial, chosen = (seen[arm] for arm in ("grouped", "serial", "chosen" if len(cut) > 1 else "grouped"))
    triples = list(zip(grouped, serial, chosen, strict=True))

    def to_better(part: Callable[[Step], float]) -> _report.Row:
        better = min((grouped, serial), key=lambda steps: statistics.median(part(step) for step in steps))
        return _report.spread([part(b) / part(c) for b, c in zip(better, chosen, strict=True)])

    return {
        "forward": _report.spread([s.forward_s / g.forward_s for g, s, _ in triples]),
        "step": _report.spread([s.step_s / g.step_s for g, s, _ in triples]),
        "grouped_ms": _report.spread([1000 * g.step_s for g in grouped], 1),
        "serial_ms": _report.spread([1000 * s.step_s for s in serial], 1),
        "equal": all(g.answers == s.answers == c.answers for g, s, c in triples),
        "chosen": "+".join(str(size) for size in cut) if len(set(cut)) > 1 else f"{len(cut)}x{cut[0]}",
        "chosen_forward": to_better(lambda step: step.forward_s),
        "chosen_step": to_better(lambda step: step.step_s),
    }


def summary(rows: Sequence[_report.Row]) -> Iterator[str]:
    """Say what the targets ask for."""
    measured = [row for row in rows if "step" in row]
    equal = sum(bool(row["equal"]) for row in measured)
    yield f"\n{len(measured)} of {len(rows)} cells measured; bits equal in {equal}"
    for title in dict.fromkeys(str(row["table"]) for row in measured):
        mine = [row for row in measured if row["table"] == title]
        eight = [median(row, "forward") for row in mine if (row["tenants"], row["batch"]) == (8, 1)]
        gain = f"{min(eight):.2f}x forward at 8 tenants, batch 1; " if eight else ""
        worst = min(median(row, "chosen_forward") for row in mine)
        verdict = "holds" if worst >= SLOWEST else "MISSED"
        yield f"{title.split(';')[0]}: {gain}chosen at worst {worst:.3f} of the better ({SLOWEST} {verdict})"


def median(row: _report.Row, column: str) -> float:
    """Return the median of a ratio."""
    value = row[column]
    assert isinstance(value, dict)
    return float(value["median"])


if __name__ == "__main__":
    main()
