"""Features in memory: the latest used of every scope, within a budget.

In: features under their keys. Out: the same features while they are kept. Never: more bytes than the budget, or a
feature that is lost because another scope keeps much: whoever takes most gives up its own oldest.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence

from torch import Tensor

from joynexus.vla.feature import VLAFeature
from joynexus.vla.feature_keys import scope_of


class FeatureMemory:
    """Features by scope and key, those used longest ago first.

    Args:
        budget_bytes: most bytes in all.
        scope_bytes: most bytes of one scope; None: as many as others leave.
    """

    def __init__(self, budget_bytes: int, *, scope_bytes: int | None = None) -> None:
        self._budget = budget_bytes
        self._scope_budget = budget_bytes if scope_bytes is None else min(scope_bytes, budget_bytes)
        self._held: defaultdict[str, OrderedDict[str, VLAFeature]] = defaultdict(OrderedDict)
        self._used: dict[str, int] = {}
        self._total = 0

    def get(self, key: str, layers: Sequence[int]) -> VLAFeature | None:
        """Return a feature with at least these hidden states, on the CPU, or None."""
        held = self._held.get(scope_of(key))
        feature = held.get(key) if held is not None else None
        if held is None or feature is None or not feature.layers.keys() >= set(layers):
            return None
        held.move_to_end(key)
        return feature

    def put(self, key: str, feature: VLAFeature) -> None:
        """Keep a feature, beside hidden states of it that are here already, if it fits into the budget."""
        scope = scope_of(key)
        known = self._held[scope].get(key) if scope in self._held else None
        layers = {layer: _own(hidden) for layer, hidden in feature.layers.items()}
        if known is not None:
            layers = known.layers | layers
        kept = VLAFeature(layers, _own(feature.token_type), feature.backbone)
        if kept.nbytes > self._scope_budget:
            return
        self._account(scope, kept.nbytes - (known.nbytes if known else 0))
        self._held[scope][key] = kept
        self._held[scope].move_to_end(key)
        while self._used[scope] > self._scope_budget:
            self._drop_oldest(scope)
        while self._total > self._budget:
            self._drop_oldest(max(self._used, key=lambda each: self._used[each]))

    def _drop_oldest(self, scope: str) -> None:
        held = self._held[scope]
        _, dropped = held.popitem(last=False)
        self._account(scope, -dropped.nbytes)
        if not held:
            del self._held[scope], self._used[scope]

    def _account(self, scope: str, nbytes: int) -> None:
        self._used[scope] = self._used.get(scope, 0) + nbytes
        self._total += nbytes


def fair_level(used: Iterable[int], budget: int) -> int:
    """Return the most bytes that each may have so that all fit into a budget and the small ones keep what they have.

    Max-min fairness ("water-filling", Bertsekas and Gallager, Data Networks, 1992, section 6.5.2).
    """
    sizes = sorted(used)
    for place, size in enumerate(sizes):
        share = budget // (len(sizes) - place)
        if size > share:
            return share
        budget -= size
    return sizes[-1] if sizes else budget


def _own(tensor: Tensor) -> Tensor:
    """Bring a tensor to the CPU, with no more memory behind it than it shows."""
    on_cpu = tensor.detach().cpu().contiguous()
    return on_cpu if on_cpu.untyped_storage().nbytes() == on_cpu.nbytes else on_cpu.clone()
