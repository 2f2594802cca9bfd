"""THE promise: eight tenants who train together get, bit for bit, the losses and weights of each alone.

On hosts where groups do not keep a sample's bits an exact backbone runs its samples one by one (the probe's verdict is
printed), so the promise is the same there; how far bfloat16 is off is bounded in the tests of the backbones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.blobs import BlobStore
from joynexus.datasets import DatasetManifest
from joynexus.specs import PolicySpec
from joynexus.vla.backbones import Backbone
from tests.unit.trainer.tenants import (
    SMALL_GROOT,
    SMALL_OFT,
    Inline,
    Member,
    Outcome,
    Room,
    contract,
    eight_members,
    statistics,
    train,
)

STEPS = {"lite@64": 100, "tiny-qwen3vl": 100, "tiny-qwen25vl": 10}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # on a busy host each takes minutes


@pytest.fixture(scope="module")
def members(
    lerobot: DatasetManifest, metaworld: DatasetManifest, sets_store: BlobStore, backbone: Backbone
) -> list[Member]:
    return eight_members(lerobot, metaworld, sets_store, STEPS[backbone.name])


@pytest.fixture(scope="module")
def alone(
    members: list[Member], backbone: Backbone, sets_store: BlobStore, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """Each member in a trainer of its own."""
    return {
        member.name: Room(backbone, sets_store, tmp_path_factory.mktemp("alone")).alone(member) for member in members
    }


def test_eight_tenants_together_get_the_losses_and_weights_of_each_alone(
    members: list[Member], alone: dict[str, Outcome], backbone: Backbone, sets_store: BlobStore, tmp_path: Path
) -> None:
    room = Room(backbone, sets_store, tmp_path)
    before = backbone.samples_forwarded
    together = room.together(members, seed=1, page=0.04)
    for member in members:
        assert together[member.name].numbers() == alone[member.name].numbers(), member.name
        assert together[member.name].state == alone[member.name].state, member.name
        assert together[member.name].results[len(member.ops)].step == STEPS[backbone.name]
    reported = sum(done.backbone_forwards for outcome in together.values() for done in outcome.results.values())
    assert reported == backbone.samples_forwarded - before


@st.composite
def mixes(draw: st.DrawFn) -> list[Member]:
    """Some members of any kind; a few steps each."""
    members = []
    for number in range(draw(st.integers(2, 4))):
        groot = draw(st.booleans())
        made_for = contract(draw(st.integers(0, 2)), draw(st.integers(0, 4)), draw(st.integers(1, 3)))
        adapter: dict[str, Any] = {"adapter": "bottleneck", "adapter_config": {"width": 4}}
        spec = PolicySpec(
            backbone="any",
            head="groot" if groot else "oft",
            head_config=SMALL_GROOT if groot else SMALL_OFT,
            chunk=draw(st.integers(1, 5)),
            contract=made_for,
            statistics=statistics(made_for),
            seed=draw(st.integers(0, 99)),
            **(adapter if draw(st.booleans()) else {}),
        )
        source = Inline(made_for, number, spec.chunk, draw(st.sampled_from([["go"], ["turn", "take the blue cup"]])))
        rows, parts = draw(st.integers(1, 5)), draw(st.integers(0, 2))
        members.append(Member(f"m{number}", spec, train(source, rows, 3, parts=parts)))
    return members


@pytest.mark.parametrize("backbone", ["tiny-qwen3vl"], indirect=True)
@given(members=mixes(), order=st.integers(0, 1 << 16), page=st.sampled_from([0.0, 0.5]), keep=st.booleans())
@settings(max_examples=6, deadline=None)
def test_any_mix_in_any_order_gives_everybody_the_numbers_of_training_alone(
    backbone: Backbone,
    sets_store: BlobStore,
    tmp_path_factory: pytest.TempPathFactory,
    members: list[Member],
    order: int,
    page: float,
    keep: bool,
) -> None:
    def room() -> Room:
        return Room(backbone, sets_store, tmp_path_factory.getbasetemp() / "scratch", keep_features=keep)

    together = room().together(members, order, page=page)
    for member in members:
        alone = room().alone(member)
        assert together[member.name].numbers() == alone.numbers()
        assert together[member.name].state == alone.state
