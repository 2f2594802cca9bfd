"""A small memory for what does not change from step to step: the feature of an instruction without pictures.

In: features. Out: those without image tokens, while they are among the latest used. Never: a feature with pictures (the
next one differs, and keeping it would only fill memory), or more bytes than the budget.
"""

from __future__ import annotations

from collections import OrderedDict

from joynexus.vla.feature import IMAGE, VLAFeature

_BUDGET_BYTES = 64 << 20


class TextMemory:
    """A `joynexus.vla.shared_forward.Store` of instructions, of at most `budget_bytes` in all."""

    def __init__(self, budget_bytes: int = _BUDGET_BYTES) -> None:
        self._budget = budget_bytes
        self._used = 0
        self._features: OrderedDict[str, VLAFeature] = OrderedDict()

    def get(self, key: str) -> VLAFeature | None:
        """Return the feature, or None."""
        feature = self._features.get(key)
        if feature is not None:
            self._features.move_to_end(key)
        return feature

    def put(self, key: str, feature: VLAFeature) -> None:
        """Keep it, if it has no image tokens; those used longest ago make room."""
        if key in self._features or feature.nbytes > self._budget or bool((feature.token_type == IMAGE).any()):
            return
        self._features[key] = feature
        self._used += feature.nbytes
        while self._used > self._budget:
            _, dropped = self._features.popitem(last=False)
            self._used -= dropped.nbytes
