"""What it brings, and costs, to spread a backbone's rows over several devices: against one, by turns, in one run.

In: devices (`--devices cuda:0,cuda:1`; `cpu,cpu` if none are named) and sizes of groups. Out: the time of a forward on
one device over that on all of them, by rows; what all of them together were busy with, over what one was; whether
the bits were equal. Never: a gain that two processes on two CPU cores cannot have shown as that of two GPUs.
"""

# ruff: noqa: E402 - how torch computes must be chosen before it is loaded

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from joynexus.vla import numerics

numerics.configure(1)

import numpy as np
import torch

from benchmarks import _report
from common.settings import TrainerSettings, load_settings
from joynexus.vla.backbones import Backbone, load_backbone
from joynexus.vla.busy import BusyClock
from joynexus.vla.feature import Observation, VLAFeature
from services.trainer.followers import Followers

ROWS = (1, 2, 3, 4, 8, 16, 32, 64)
QUICK_ROWS = (1, 4, 16)
CACHE = Path(".joynexus/cache")


def main(argv: Sequence[str] | None = None) -> None:
    options = _report.arguments("spread", "One device against several that share a group's rows.", argv, _more)
    os.environ["JOYNEXUS_DEVICES"] = options.devices
    os.environ["JOYNEXUS_BACKBONE"] = options.backbone
    os.environ["JOYNEXUS_DTYPE"] = options.dtype
    os.environ["JOYNEXUS_CACHE_DIR"] = str(CACHE)
    settings = load_settings(TrainerSettings)
    alone = load_backbone(options.backbone, device=settings.places[0], dtype=options.dtype, cache_dir=CACHE)
    with Followers(settings) as followers:
        shared = followers.share(alone)
        numerics.probe(shared)
        shared.calibrate()  # the first device's own too
        title = f"{options.backbone}, {options.dtype}, {options.devices}"
        repeats = 5 if options.quick else 15
        rows = [
            {"table": title, "rows": rows} | measure(alone, shared, rows, repeats)
            for rows in (QUICK_ROWS if options.quick else ROWS)
        ]
    flags = f" --devices {options.devices} --backbone {options.backbone} --dtype {options.dtype}"
    _report.write("spread", options, rows, flags=flags)


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", default="cpu,cpu", help="as JOYNEXUS_DEVICES")
    parser.add_argument("--backbone", default="tiny-qwen3vl")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")


def measure(alone: Backbone, shared: Backbone, rows: int, repeats: int) -> _report.Row:
    """Let both take turns over one group; the first turn of each is not counted."""
    random = np.random.default_rng(rows)
    group = [Observation((random.integers(0, 256, (224, 224, 3), dtype=np.uint8),), "go there") for _ in range(rows)]
    one, all_of_them, busy = list[float](), list[float](), list[float]()
    equal = True
    for repeat in range(1 + repeats):
        first, one_s, one_busy = timed(alone, group)
        second, all_s, all_busy = timed(shared, group)
        equal = equal and all(torch.equal(a.last, b.last) for a, b in zip(first, second, strict=True))
        if repeat:
            one.append(one_s)
            all_of_them.append(all_s)
            busy.append(all_busy / one_busy)
    ratios = [a / b for a, b in zip(one, all_of_them, strict=True)]
    return {
        "one_ms": _report.spread([1000 * seconds for seconds in one], 1),
        "all_ms": _report.spread([1000 * seconds for seconds in all_of_them], 1),
        "times_as_fast": _report.spread(ratios),
        "busy": _report.spread(busy),
        "equal": equal,
    }


def timed(backbone: Backbone, group: Sequence[Observation]) -> tuple[list[VLAFeature], float, float]:
    """Return features, seconds, and busy seconds of all devices."""
    elapsed, began = BusyClock(backbone.device).start(), time.perf_counter()
    features = backbone.forward(group)
    busy = elapsed() + backbone.take_far_busy()
    return features, time.perf_counter() - began, busy


if __name__ == "__main__":
    main()
