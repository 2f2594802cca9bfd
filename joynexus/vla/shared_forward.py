"""What all tenants share: looked up first, then forwarded once, together.

In: what requests need, as keys and observations. Out: a feature for each key, and who caused how many backbone
forwards. Never: a feature of one scope for another (the scope is part of the key), a second forward of what is stored
or was just made, or a request that fails because another one's sample made the backbone fail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from joynexus.vla.backbones.base import Backbone
from joynexus.vla.busy import BusyClock
from joynexus.vla.feature import Observation, VLAFeature
from joynexus.vla.feature_store import feature_key
from joynexus.vla.inputs import refuse
from joynexus.vla.numerics import numerics_class

log = logging.getLogger(__name__)


class Store(Protocol):
    """Where features are kept between requests (`joynexus.vla.feature_store.FeatureStore`)."""

    def get(self, key: str) -> VLAFeature | None:
        """Return the feature, or None."""

    def put(self, key: str, feature: VLAFeature) -> None:
        """Keep it, if the budget allows."""


class ForwardFailed(RuntimeError):  # noqa: N818 - says what happened
    """The backbone failed on a sample that `Backbone.check` had found good: a fault of the service."""


@dataclass
class Need:
    """What one request needs.

    Attributes:
        keys: one a sample, in order; equal samples have equal keys.
        found: features by key.
        missing: observations still to be forwarded, by key.
        forwards: samples that went through the backbone for this request.
        busy_s: its share of the forwards' busy time.
    """

    keys: Sequence[str]
    found: dict[str, VLAFeature] = field(default_factory=dict)
    missing: dict[str, Observation] = field(default_factory=dict)
    forwards: int = 0
    busy_s: float = 0.0

    def features(self) -> list[VLAFeature]:
        """Return one feature a sample, in order.

        Raises:
            ForwardFailed: if the backbone failed on one.
        """
        for row, key in enumerate(self.keys):
            if key not in self.found:
                raise ForwardFailed(f"the backbone failed on sample {row}")
        return [self.found[key] for key in self.keys]


class SharedForward:
    """A backbone with a store in front of it.

    Args:
        backbone: makes features.
        store: keeps them; None keeps nothing.
        clock: measures the forwards.
        max_rows: samples in one forward at most; bounds its memory.
        advance: called after each forward, so that a long one does not look like a hang.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: Store | None,
        clock: BusyClock,
        *,
        max_rows: int = 64,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self._backbone = backbone
        self._store = store
        self._clock = clock
        self._max_rows = max_rows
        self._advance = advance
        self._dtype = str(backbone.dtype).removeprefix("torch.")
        self._numerics_class = numerics_class(backbone.device, backbone.dtype)

    def key(self, scope: str, observation: Observation) -> str:
        """Name the feature of an observation; only requests of the same scope share it."""
        return feature_key(
            observation,
            scope=scope,
            backbone=self._backbone.digest,
            numerics_class=self._numerics_class,
            dtype=self._dtype,
        )

    def look_up(self, keys: Sequence[str], observe: Callable[[int], Observation]) -> Need:
        """Find what is stored, and check what is not.

        Args:
            keys: key of each sample.
            observe: gives the observation of a sample; called only for samples that are not stored.

        Raises:
            JoyNexusError: `BAD_DATA` if the backbone cannot take an observation.
        """
        need = Need(keys)
        for row, key in enumerate(keys):
            if key in need.found or key in need.missing:
                continue
            stored = self._store.get(key) if self._store is not None else None
            if stored is not None:
                need.found[key] = _on(self._backbone.device, stored)
                continue
            observation = observe(row)
            try:
                self._backbone.check(observation)
            except ValueError as error:
                refuse(f"sample {row} cannot be used: {error}")
            need.missing[key] = observation
        return need

    def complete(self, needs: Sequence[Need]) -> None:
        """Forward all that is missing, together; a need is charged for the samples that it is the first to want.

        A sample that makes the backbone fail stays missing, and `Need.features` says so.
        """
        wanting: dict[str, list[Need]] = {}
        for need in needs:
            for key in need.missing:
                wanting.setdefault(key, []).append(need)
        keys = list(wanting)
        for start in range(0, len(keys), self._max_rows):
            self._forward(keys[start : start + self._max_rows], wanting)

    def _forward(self, keys: Sequence[str], wanting: dict[str, list[Need]]) -> None:
        elapsed = self._clock.start()
        try:
            made = self._backbone.forward([wanting[key][0].missing[key] for key in keys])
        except torch.AcceleratorError:
            raise  # the device is lost to this process, which must start anew
        except Exception as error:  # whatever it is, one tenant's sample must not take the others down: halve
            log.warning("a forward of %d samples failed: %r", len(keys), error, exc_info=len(keys) == 1)
            if len(keys) > 1:
                middle = len(keys) // 2
                self._forward(keys[:middle], wanting)
                self._forward(keys[middle:], wanting)
            return
        share = elapsed() / len(keys)
        for key, feature in zip(keys, made, strict=True):
            if self._store is not None:
                self._store.put(key, feature)
            wanting[key][0].forwards += 1
            wanting[key][0].busy_s += share
            for need in wanting[key]:
                need.found[key] = feature
                del need.missing[key]
        self._advance()


def _on(device: torch.device, feature: VLAFeature) -> VLAFeature:
    """Bring a stored feature, which lies on the CPU, to where the backbone's own are."""
    if device.type == "cpu":
        return feature
    layers = {index: hidden.to(device) for index, hidden in feature.layers.items()}
    return VLAFeature(layers=layers, token_type=feature.token_type.to(device), backbone=feature.backbone)
