"""Numerics: what may change the bits of a result on this host, and whether grouping does.

In: a thread count, before torch is loaded. Out: settings under which a row's result does not depend on the rows beside
it, a name for everything that may change bits, and a verdict from a real trial. Never: torch at import time, because
the matrix library reads its settings once, when it is loaded.

On a CPU the matrix library picks kernels by the number of rows. Intel's MKL stops doing so under `MKL_CBWR=…,STRICT`;
with one thread and at least 4 rows (16 on some hosts) most hosts are exact without it. Nothing of this is assumed: a
backbone is tried at start-up, and where groups change bits an exact backbone runs its samples one by one.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch

    from joynexus.vla.backbones.base import Backbone
    from joynexus.vla.feature import Observation, VLAFeature


BFLOAT16_BOUND = 0.1
"""Most by which grouping may change an element of a feature in bfloat16, in standard deviations of the features.

Held by a test on a CPU for both tiny checkpoints; docs/adr/0007 has what was measured.
"""


class NumericsVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of trying a backbone alone against in groups.

    Attributes:
        exact: every sample had the same bits alone and in every group that was tried.
        detail: one sentence with what was tried and, if bits differed, by how much.
        numerics_class: the class the verdict holds for, see `numerics_class`.
    """

    exact: bool
    detail: str
    numerics_class: str


def configure(threads: int = 1) -> None:
    """Choose reproducible kernels and the number of threads of this process; call it before torch is loaded.

    A value of `MKL_CBWR` that is already set is respected. If torch is loaded already, only the thread count changes
    (the matrix library has read its settings), and `numerics_class` says so.

    Raises:
        ValueError: if `threads` is below 1.
    """
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    if "torch" not in sys.modules:
        os.environ.setdefault("MKL_CBWR", "AVX512,STRICT" if _isa() == "avx512" else "AVX2,STRICT")
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)


def numerics_class(device: str | torch.device = "cpu", dtype: str | torch.dtype = "float32") -> str:
    """Name everything that may change bits: two processes of one class compute the same bits from the same input.

    Returns:
        e.g. `cpu:AuthenticAMD-25-1:avx2:cbwr=AVX2,STRICT:threads=1:float32:torch-2.13.0+cpu:transformers-5.24.0`, or
        `cuda:NVIDIA H100:bfloat16:torch-2.13.0+cu130:transformers-5.24.0`.
    """
    import torch

    kind = torch.device(device)
    suffix = f"{str(dtype).removeprefix('torch.')}:torch-{torch.__version__}:transformers-{_transformers()}"
    if kind.type == "cuda":
        return f"cuda:{torch.cuda.get_device_name(kind)}:{suffix}"
    cbwr = os.environ.get("MKL_CBWR", "unset")
    return f"{kind.type}:{_cpu_model()}:{_isa()}:cbwr={cbwr}:threads={torch.get_num_threads()}:{suffix}"


def probe(backbone: Backbone) -> NumericsVerdict:
    """Run samples alone and in groups of several sizes and positions, and compare bits.

    Sets `backbone.group_exactly` to the verdict: an `exact` backbone that cannot hold groups then runs its samples one
    by one.
    The forwards of the trial do not count in `backbone.samples_forwarded`, nor in what other processes took for it.

    Raises:
        ValueError: if features are not finite, as of weights that do not fit into the type.
    """
    import torch

    observations = _trial_observations()
    counted = backbone.samples_forwarded
    backbone.group_exactly = True  # the trial must really group
    alone = [backbone.forward([observation])[0] for observation in observations]
    if not all(torch.isfinite(feature.last).all() for feature in alone):
        raise ValueError(
            f"backbone '{backbone.name}' gives NaN or infinity in {str(backbone.dtype).removeprefix('torch.')} on this "
            "device: choose float32 or bfloat16, or other weights"
        )
    groups: list[Sequence[int]] = [(0, 1), (1, 0), (2, 0, 3), tuple(range(len(observations))), (3, 3, 3, 3, 2, 1, 0, 0)]
    worst, differing, compared = 0.0, 0, 0
    for group in groups:
        for index, feature in zip(group, backbone.forward([observations[i] for i in group]), strict=True):
            difference = _largest_difference(alone[index], feature)
            compared += 1
            differing += difference > 0
            worst = max(worst, difference)
    backbone.samples_forwarded = counted
    backbone.take_far_busy()  # nobody's
    exact = differing == 0
    backbone.group_exactly = exact
    detail = f"{compared} samples in {len(groups)} groups compared with the same samples alone: " + (
        "all have the same bits" if exact else f"{differing} differ, by at most {worst:.2e}"
    )
    if not exact and backbone.exact:
        detail += "; this backbone runs its samples one by one"
    return NumericsVerdict(exact=exact, detail=detail, numerics_class=numerics_class(backbone.device, backbone.dtype))


def _trial_observations() -> list[Observation]:
    """Short and long, without and with pictures: what most easily picks another kernel."""
    import numpy as np

    from joynexus.vla.feature import Observation

    random = np.random.default_rng(0)
    views = [random.integers(0, 256, (side, side, 3), dtype=np.uint8) for side in (64, 96, 128)]
    return [
        Observation((), "go"),
        Observation((views[0],), "push the button"),
        Observation((views[1], views[0]), "put the red block on the plate and close the drawer"),
        Observation((views[2],), "a"),
    ]


def _largest_difference(a: VLAFeature, b: VLAFeature) -> float:
    import torch

    if torch.equal(a.last, b.last):
        return 0.0
    return max(float((a.last.float() - b.last.float()).abs().max()), sys.float_info.min)


def _transformers() -> str:
    """Version of the library that has the checkpoints' models, without importing it."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return "none"


def _cpu_facts() -> dict[str, str]:
    """First processor's entries of /proc/cpuinfo; empty where there is none."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cpu_model() -> str:
    facts = _cpu_facts()
    if "vendor_id" not in facts:
        return platform.processor() or platform.machine()
    return f"{facts['vendor_id']}-{facts.get('cpu family', '?')}-{facts.get('model', '?')}"


def _isa() -> str:
    flags = _cpu_facts().get("flags", "").split()
    return next((name for flag, name in (("avx512f", "avx512"), ("avx2", "avx2")) if flag in flags), platform.machine())
