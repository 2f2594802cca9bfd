"""What all tenants share: looked up first, then forwarded once, together.

In: what requests need, as keys, observations and hidden states. Out: a feature for each key, and who caused how many
backbone forwards. Never: a feature of one scope for another (the scope is part of the key), a second forward of what is
stored or was just made, or a request that fails, or pays, because another one's sample made the backbone fail.

A forward that fails is halved until the samples that fail alone are found. One that fails alone a second time, while
the backbone still takes a plain sample, is at fault itself. Whatever else went wrong may pass, and is the service's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from joynexus.vla.backbones.base import Backbone
from joynexus.vla.busy import BusyClock
from joynexus.vla.feature import LAST, Observation, VLAFeature
from joynexus.vla.feature_keys import feature_key
from joynexus.vla.inputs import refuse
from joynexus.vla.numerics import numerics_class

log = logging.getLogger(__name__)

_SHORTAGE = (MemoryError, torch.OutOfMemoryError)
"""What a sample may fail from because others fill the machine."""
_PLAIN = Observation((), "go")
"""What every backbone takes."""


class Store(Protocol):
    """Where features are kept between requests (`FeatureStore`, `FeatureMemory`)."""

    def get(self, key: str, layers: Sequence[int]) -> VLAFeature | None:
        """Return the feature with at least these hidden states, or None."""

    def put(self, key: str, feature: VLAFeature) -> None:
        """Keep it, if the budget allows."""


class ForwardFailed(RuntimeError):  # noqa: N818 - says what happened
    """The backbone failed, and it is not the sample's fault: the same may succeed later."""


@dataclass
class Need:
    """What one request needs.

    Attributes:
        keys: one a sample, in order; equal samples have equal keys.
        layers: hidden states that each feature must have.
        store: keeps its features; None keeps nothing.
        found: features by key.
        missing: observations still to be forwarded, by key.
        poison: keys of observations that made the backbone fail.
        forwards: samples that went through the backbone and that it was the first to want.
        busy_s: its share of the forwards' busy time.
    """

    keys: Sequence[str]
    layers: tuple[int, ...] = (LAST,)
    store: Store | None = None
    found: dict[str, VLAFeature] = field(default_factory=dict)
    missing: dict[str, Observation] = field(default_factory=dict)
    poison: set[str] = field(default_factory=set)
    forwards: int = 0
    busy_s: float = 0.0

    def features(self) -> list[VLAFeature]:
        """Return one feature a sample, in order.

        Raises:
            JoyNexusError: `BAD_DATA` if a sample makes the backbone fail whenever it is tried.
            ForwardFailed: if the backbone failed through no fault of a sample.
        """
        for row, key in enumerate(self.keys):
            if key in self.poison:
                refuse(f"sample {row} makes the backbone fail whenever it is tried: leave it out")
        if self.missing:
            raise ForwardFailed("the backbone failed; the service's log has the reason")
        return [self.found[key] for key in self.keys]


_Wanting = dict[str, list[Need]]
"""By key, the needs that lack it."""


class SharedForward:
    """A backbone with a store in front of it.

    Args:
        backbone: makes features.
        store: keeps them; None keeps nothing.
        clock: measures the forwards.
        max_rows: samples in one forward at most; bounds its memory.
        advance: called after each forward, also one that failed, so that a long group does not look like a hang.

    Attributes:
        own_s: busy time of all forwards so far, without what other devices did of them.
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
        self._numerics_class = numerics_class(backbone.device, backbone.dtype)
        self.own_s = 0.0

    def key(self, scope: str, observation: Observation) -> str:
        """Name the feature of an observation; only requests of the same scope share it."""
        return feature_key(
            observation,
            scope=scope,
            backbone=self._backbone.digest,
            numerics_class=self._numerics_class,
        )

    def feature_bytes(self, observation: Observation, layers: tuple[int, ...]) -> int:
        """Return the bytes of the hidden states that an observation becomes, without making them.

        Raises:
            JoyNexusError: `BAD_DATA` if the backbone cannot take it.
        """
        backbone = self._backbone
        try:
            backbone.check(observation)
        except ValueError as error:
            refuse(f"an observation cannot be used: {error}")
        return backbone.tokens(observation) * backbone.hidden_size * backbone.dtype.itemsize * len(layers)

    def look_up(
        self,
        keys: Sequence[str],
        observe: Callable[[int], Observation],
        layers: tuple[int, ...] = (LAST,),
        store: Store | None = None,
    ) -> Need:
        """Find what is stored, and check what is not.

        Args:
            keys: key of each sample.
            observe: gives the observation of a sample; called only for samples that are not stored.
            layers: hidden states that are needed.
            store: where features are looked for and kept, if not in the usual one.

        Raises:
            JoyNexusError: `BAD_DATA` if the backbone cannot take an observation.
        """
        need = Need(keys, layers, store or self._store)
        for row, key in enumerate(keys):
            if key in need.found or key in need.missing:
                continue
            stored = need.store.get(key, layers) if need.store is not None else None
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
        """Forward all that is missing, together: each sample once, with the hidden states that any of them wants.

        Busy time is divided by tokens, and a sample's part by all who want it. A sample that makes the backbone fail
        stays missing, and `Need.features` says so; the time that this took is charged to those who want it, if the
        sample is at fault.

        Raises:
            Exception: what the backbone raised, if it does not even take a plain sample any more.
        """
        wanting: _Wanting = {}
        for need in needs:
            for key in need.missing:
                wanting.setdefault(key, []).append(need)
        keys = list(wanting)
        for start in range(0, len(keys), self._max_rows):
            self._forward(keys[start : start + self._max_rows], wanting)

    def _forward(self, keys: Sequence[str], wanting: _Wanting, *, again: bool = False) -> Sequence[str]:
        """Forward samples; return the keys of those on which it failed."""
        elapsed = self._clock.start()
        layers = {layer for key in keys for need in wanting[key] for layer in need.layers}
        try:
            made = self._backbone.forward([wanting[key][0].missing[key] for key in keys], tuple(sorted(layers)))
        except torch.AcceleratorError:
            raise  # the device is lost to this process, which must start anew
        except Exception as error:  # whatever it is, one tenant's sample must not take the others down
            wasted = self._taken(elapsed())
            self._advance()
            log.warning("a forward of %d samples failed: %r", len(keys), error, exc_info=again)
            failed = self._seek(keys, wanting, error, again=again)
            guilty = [key for key in failed if key in wanting[key][0].poison]
            for key in guilty:
                _charge(wanting[key], wasted / len(guilty))
            return failed
        busy_s, tokens = self._taken(elapsed()), sum(feature.length for feature in made)
        for key, feature in zip(keys, made, strict=True):
            _hand_out(key, feature, wanting[key])
            _charge(wanting[key], busy_s * feature.length / tokens)
        self._advance()
        return ()

    def _taken(self, own_s: float) -> float:
        """Return what a forward took on all devices."""
        self.own_s += own_s
        return own_s + self._backbone.take_far_busy()

    def _seek(self, keys: Sequence[str], wanting: _Wanting, error: Exception, *, again: bool) -> Sequence[str]:
        """Find the samples at fault in a forward that failed; return all on which it fails."""
        if len(keys) > 1:
            middle = len(keys) // 2
            return [*self._forward(keys[:middle], wanting), *self._forward(keys[middle:], wanting)]
        if not again:
            return self._forward(keys, wanting, again=True)
        if not isinstance(error, _SHORTAGE):
            counted = self._backbone.samples_forwarded
            self._backbone.forward([_PLAIN])  # if even this fails, let it raise: this process must start anew
            self._backbone.samples_forwarded = counted
            for need in wanting[keys[0]]:
                need.poison.add(keys[0])
        return keys


def _hand_out(key: str, feature: VLAFeature, wanting: Sequence[Need]) -> None:
    """Give a feature to all that lack it, and let their stores keep it."""
    wanting[0].forwards += 1
    stores = {id(need.store): need.store for need in wanting if need.store is not None}
    for same, store in stores.items():
        # What others in the group read would fill a budget that is not theirs.
        asked = {layer for need in wanting if id(need.store) == same for layer in need.layers}
        store.put(
            key, VLAFeature({layer: feature.layers[layer] for layer in asked}, feature.token_type, feature.backbone)
        )
    for need in wanting:
        need.found[key] = feature
        del need.missing[key]


def _charge(needs: Sequence[Need], busy_s: float) -> None:
    for need in needs:
        need.busy_s += busy_s / len(needs)


def _on(device: torch.device, feature: VLAFeature) -> VLAFeature:
    """Bring a stored feature, which lies on the CPU, to where the backbone's own are."""
    if device.type == "cpu":
        return feature
    layers = {index: hidden.to(device) for index, hidden in feature.layers.items()}
    return VLAFeature(layers=layers, token_type=feature.token_type.to(device), backbone=feature.backbone)
