"""How a role with a backbone comes up: the model loaded, tried and described, the host's feature store opened.

In: the names that settings hold. Out: what the role works with, and the `Register` that says so. Never: a claim about
grouping that was not tried on this host.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from joynexus.vla.backbones import load_backbone
from joynexus.vla.backbones.base import Backbone
from joynexus.vla.feature_store import FeatureStore
from joynexus.vla.heads import known_heads
from joynexus.vla.numerics import probe
from joynexus.wire.back import Register, Role

LOADING_S = 900.0
"""A backbone must be loaded and tried within this."""


class Settings(Protocol):
    """What of a role's settings names its backbone."""

    @property
    def backbone(self) -> str:
        """Name, hub name or directory."""

    @property
    def image_side(self) -> int:
        """Side of the pictures that it sees; 0 is its own."""

    @property
    def device(self) -> str:
        """Where it computes."""

    @property
    def dtype(self) -> str:
        """Type in which it computes."""

    @property
    def cache_dir(self) -> Path:
        """Folder of converted weights and features."""

    @property
    def feature_budget_bytes(self) -> int:
        """Features kept; 0 keeps none."""

    @property
    def feature_tenant_bytes(self) -> int:
        """Features kept of one tenant; 0 is as many as others leave."""


@dataclass(frozen=True)
class Equipment:
    """What a role with a backbone works with.

    Attributes:
        backbone: loaded and tried.
        features: the host's feature store; None where nothing is to be kept.
        detail: for status: `backbone`, `device`, `dtype`, `numerics` and `grouping` (a sentence each),
            `numerics_class`, `heads` (action modules that are known), `torch`.
    """

    backbone: Backbone
    features: FeatureStore | None
    detail: dict[str, str]

    def register(
        self, role: Role, incarnation: str, credit: dict[str, int], *, max_slots: int = 0, slot_bytes: int = 0
    ) -> Register:
        """Make the role's first message; see `Register`."""
        return Register(
            role=role,
            incarnation=incarnation,
            pid=os.getpid(),
            credit=credit,
            backbone=self.backbone.digest,
            backbone_name=self.backbone.name,
            batch_key=self.backbone.batch_key(),
            heads=known_heads(),
            max_slots=max_slots,
            slot_bytes=slot_bytes,
            detail=self.detail,
        )


def memory_bytes(device: torch.device) -> int:
    """Return the memory of a device; for a CPU that of the host, or of the container if that has less."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        return min(host, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return host


def bring_up(settings: Settings, share: Callable[[Backbone], Backbone] = lambda loaded: loaded) -> Equipment:
    """Load a backbone, find out whether groups keep every sample's bits here and how large they should be.

    Args:
        settings: which backbone, and where.
        share: makes of the loaded backbone the one to work with, before it is tried.

    Raises:
        ValueError: one sentence on why it cannot be loaded.
    """
    backbone = load_backbone(
        settings.backbone,
        device=settings.device,
        dtype=settings.dtype,
        cache_dir=settings.cache_dir,
        image_side=settings.image_side or None,
    )
    backbone = share(backbone)
    verdict = probe(backbone)
    grouping = backbone.calibrate()
    budget = settings.feature_budget_bytes
    features = None
    if budget:
        limit = settings.feature_tenant_bytes or None
        features = FeatureStore(settings.cache_dir / "features", budget, scope_bytes=limit)
    gc.collect()
    gc.freeze()  # what was imported and loaded stays: searching it again costs 200 ms in the middle of a step
    detail = {
        "backbone": backbone.name,
        "device": str(backbone.device),
        "dtype": settings.dtype,
        "numerics": ("exact: " if verdict.exact else "not exact: ") + verdict.detail,
        "numerics_class": verdict.numerics_class,
        "grouping": grouping,
        "heads": ", ".join(known_heads()),
        "torch": str(torch.__version__),  # a subclass of str, which the wire would not take
    }
    return Equipment(backbone, features, detail)
