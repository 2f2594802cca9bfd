"""A small memory for what does not change from step to step: the feature of an instruction without pictures.

In: features. Out: those without image tokens, while they are among the latest used. Never: a feature with pictures; the
next one differs, and keeping it would only fill memory.
"""

from __future__ import annotations

from collections import OrderedDict

from joynexus.vla.feature import IMAGE, VLAFeature

_LATEST = 1024


class TextMemory:
    """A `joynexus.vla.shared_forward.Store` of instructions."""

    def __init__(self) -> None:
        self._features: OrderedDict[str, VLAFeature] = OrderedDict()

    def get(self, key: str) -> VLAFeature | None:
        """Return the feature, or None."""
        feature = self._features.get(key)
        if feature is not None:
            self._features.move_to_end(key)
        return feature

    def put(self, key: str, feature: VLAFeature) -> None:
        """Keep it, if it has no image tokens."""
        if bool((feature.token_type == IMAGE).any()):
            return
        self._features[key] = feature
        if len(self._features) > _LATEST:
            self._features.popitem(last=False)
