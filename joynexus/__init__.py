"""JoyNexus: multi-tenant post-training of vision-language-action policies; this package is the tenant's side.

    import joynexus

    with joynexus.connect() as client:
        client.datasets.push("reach", "demos/reach")
        job = client.sft(policy="reach", dataset="reach", steps=1000)
        job.wait()

Names are loaded when they are first used, so that `import joynexus` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joynexus.client import AsyncClient as AsyncClient
    from joynexus.client import AsyncJob as AsyncJob
    from joynexus.client import AsyncPolicy as AsyncPolicy
    from joynexus.client import Batch as Batch
    from joynexus.client import Chunk as Chunk
    from joynexus.client import Client as Client
    from joynexus.client import Job as Job
    from joynexus.client import Policy as Policy
    from joynexus.client import connect as connect
    from joynexus.client import connect_async as connect_async
    from joynexus.contract import Camera as Camera
    from joynexus.contract import Contract as Contract
    from joynexus.contract import Statistics as Statistics
    from joynexus.specs import CriticSpec as CriticSpec
    from joynexus.specs import EvaluateDatasetSpec as EvaluateDatasetSpec
    from joynexus.specs import EvaluateSpec as EvaluateSpec
    from joynexus.specs import ExplorationSpec as ExplorationSpec
    from joynexus.specs import GrpoSpec as GrpoSpec
    from joynexus.specs import OptimizerSpec as OptimizerSpec
    from joynexus.specs import PipelineSpec as PipelineSpec
    from joynexus.specs import PolicySpec as PolicySpec
    from joynexus.specs import PpoSpec as PpoSpec
    from joynexus.specs import RlPolicy as RlPolicy
    from joynexus.specs import RlSpec as RlSpec
    from joynexus.specs import SftPolicy as SftPolicy
    from joynexus.specs import SftSpec as SftSpec
    from joynexus.specs import load_job as load_job
    from joynexus.vla.exported import load_policy as load_policy
    from joynexus.wire.errors import ErrorCode as ErrorCode
    from joynexus.wire.errors import JoyNexusError as JoyNexusError

__version__ = "0.1.0"

_HOMES = {
    "joynexus.client": (
        "AsyncClient", "AsyncJob", "AsyncPolicy", "Batch", "Chunk", "Client", "Job", "Policy", "connect",
        "connect_async",
    ),
    "joynexus.contract": ("Camera", "Contract", "Statistics"),
    "joynexus.specs": (
        "CriticSpec", "EvaluateDatasetSpec", "EvaluateSpec", "ExplorationSpec", "GrpoSpec", "OptimizerSpec",
        "PipelineSpec", "PolicySpec", "PpoSpec", "RlPolicy", "RlSpec", "SftPolicy", "SftSpec", "load_job",
    ),
    "joynexus.vla.exported": ("load_policy",),
    "joynexus.wire.errors": ("ErrorCode", "JoyNexusError"),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]  # all strings; ruff cannot see through the table


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'joynexus' has no attribute '{name}'")
    try:
        module = importlib.import_module(home)
    except ImportError as error:
        if home != "joynexus.vla.exported":
            raise
        raise ImportError(f"joynexus.{name} needs torch: pip install 'joynexus[vla]' ({error})") from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return list(__all__)
