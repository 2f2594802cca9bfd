"""Promises of a shared forward: nobody's budget is filled by what others read, and a long search shows progress."""

from __future__ import annotations

from collections.abc import Sequence

from joynexus.vla.busy import BusyClock
from joynexus.vla.feature import LAST, VLAFeature
from joynexus.vla.shared_forward import SharedForward
from tests.unit.vla.samples import observation
from tests.unit.workers import WRECK, NoiseBackbone


class Shelf:
    """Keeps everything that it is given, and says which hidden states that was."""

    def __init__(self) -> None:
        self.held: dict[str, VLAFeature] = {}

    def get(self, key: str, layers: Sequence[int]) -> VLAFeature | None:
        feature = self.held.get(key)
        return feature if feature is not None and feature.layers.keys() >= set(layers) else None

    def put(self, key: str, feature: VLAFeature) -> None:
        self.held[key] = feature


def test_a_store_keeps_only_hidden_states_that_its_own_needs_read() -> None:
    forward = SharedForward(NoiseBackbone(), None, BusyClock())
    sample, other = observation(1), observation(2)
    mine, theirs = Shelf(), Shelf()
    my_key, their_key = forward.key("tenant:ann", sample), forward.key("tenant:bob", other)
    needs = [
        forward.look_up([my_key], lambda _: sample, (LAST,), mine),
        forward.look_up([my_key], lambda _: sample, (2,), mine),
        forward.look_up([their_key], lambda _: other, (0, 1, 2, LAST), theirs),
    ]
    forward.complete(needs)
    assert mine.held[my_key].layers.keys() == {LAST, 2}
    assert theirs.held[their_key].layers.keys() == {0, 1, 2, LAST}
    assert all(need.features()[0].layers.keys() >= set(need.layers) for need in needs)


def test_the_search_for_a_sample_that_wrecks_a_forward_shows_progress_all_the_way() -> None:
    backbone, advanced = NoiseBackbone(), []
    forward = SharedForward(backbone, None, BusyClock(), advance=lambda: advanced.append(len(backbone.groups)))
    samples = [observation(seed, instruction=f"{WRECK} {seed}") for seed in range(4)]
    need = forward.look_up([forward.key("tenant:ann", each) for each in samples], samples.__getitem__)
    forward.complete([need])
    assert need.poison == set(need.keys)
    between = [after - before for before, after in zip([0, *advanced], advanced, strict=False)]
    assert max(between) <= 2, "a try, at most after a plain sample"
