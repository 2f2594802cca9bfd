from __future__ import annotations

import pytest
import torch

from joynexus.vla.backbones import Backbone
from joynexus.vla.backbones.tiny import CHECKPOINTS
from joynexus.vla.feature import Observation
from tests.unit.vla.samples import observation

UNIONS: list[tuple[int, ...]] = [(-1,), (2,), (-1, 0, 2), (4, 1, -2), (0, 1, 2, 3, 4, -1)]


def test_both_tiny_checkpoints_are_tried_here() -> None:
    assert set(CHECKPOINTS) == {"tiny-qwen3vl", "tiny-qwen25vl"}


def test_a_layer_has_the_same_bits_whatever_else_is_asked_for(packed: Backbone) -> None:
    samples = [observation(1), Observation((), "go"), observation(2, views=2, side=96)]
    every = packed.forward(samples, layers=range(-5, 5))
    for union in UNIONS:
        for found, whole in zip(packed.forward(samples, layers=union), every, strict=True):
            assert sorted(found.layers) == sorted(union)
            assert all(torch.equal(hidden, whole.layers[layer]) for layer, hidden in found.layers.items())


def test_a_layer_counted_from_the_end_is_the_same_one(packed: Backbone) -> None:
    [feature] = packed.forward([observation(1)], layers=(-1, 4, -5, 0, -2, 3))
    assert torch.equal(feature.layers[-1], feature.layers[4])
    assert torch.equal(feature.layers[-5], feature.layers[0])
    assert torch.equal(feature.layers[-2], feature.layers[3])
    assert not torch.equal(feature.layers[3], feature.layers[4])


def test_several_layers_come_from_one_forward(packed: Backbone) -> None:
    before = packed.samples_forwarded
    packed.forward([observation(1)], layers=(-1, 0, 2))
    assert packed.samples_forwarded == before + 1


@pytest.mark.parametrize("layers", [(99,), (-6,), ()])
def test_a_layer_that_is_not_there_is_refused_with_those_that_are(packed: Backbone, layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="has hidden states -5 to 4, not"):
        packed.check_layers(layers)
    with pytest.raises(ValueError, match="has hidden states -5 to 4, not"):
        packed.forward([observation(1)], layers=layers)


def test_lite_says_that_it_has_only_its_last_layer(lite: Backbone) -> None:
    lite.check_layers([-1])
    with pytest.raises(ValueError, match=r"only its last layer \(-1\), not \[0, 3\]"):
        lite.forward([observation(1)], layers=(0, -1, 3))
