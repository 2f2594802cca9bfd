"""Promises of private adapters: identity at first, then trained, saved and published with the head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from joynexus.specs import OptimizerSpec, PolicySpec
from joynexus.vla.adapters import Adapted, Bottleneck, BottleneckConfig
from joynexus.vla.feature import LAST, PaddedFeature, VLAFeature, pad_features
from joynexus.vla.heads import build_head
from joynexus.vla.heads.base import ActionModule
from joynexus.vla.learner import Learner
from joynexus.vla.modules import check_modules
from joynexus.vla.noise import Noise
from joynexus.vla.policy import Policy
from joynexus.vla.version_file import read_version, write_version
from tests.unit.vla.samples import DIGEST, HIDDEN, batch, policy_spec


def adapted_spec(**changes: object) -> PolicySpec:
    return policy_spec(**({"adapter": "bottleneck", "adapter_config": {"width": 6}} | changes))


def policy(spec: PolicySpec) -> Policy:
    return Policy(spec, DIGEST, HIDDEN)


@pytest.mark.parametrize("head", ["oft", "groot"])
def test_an_untrained_adapter_changes_no_bit(head: str) -> None:
    data = batch(1)
    with_adapter = policy(adapted_spec(head=head, head_config={})).act(data.features, data.state)
    without = policy(policy_spec(head=head, head_config={})).act(data.features, data.state)
    np.testing.assert_array_equal(with_adapter, without)


def test_the_adapter_is_trained_and_published_with_its_head(tmp_path: Path) -> None:
    learner = Learner(policy(adapted_spec(optimizer=OptimizerSpec(lr=1e-2))))
    before = {name: tensor.clone() for name, tensor in learner.policy.module.state_dict().items()}
    for _ in range(3):
        learner.forward_backward(*batch(0).arguments())
        learner.optim_step()
    changed = {
        name for name, tensor in learner.policy.module.state_dict().items() if not torch.equal(tensor, before[name])
    }
    assert {"adapter.0.up.weight", "adapter.0.down.weight", "adapter.0.norm.weight", "head.out.weight"} <= changed
    digest, _ = write_version(tmp_path / "v", learner.policy, 1)
    data = batch(5)
    np.testing.assert_array_equal(
        read_version(tmp_path / "v", digest).policy.act(data.features, data.state),
        learner.policy.act(data.features, data.state),
    )


def test_the_shared_feature_is_not_changed() -> None:
    learner, data = Learner(policy(adapted_spec())), batch(0)
    before = [feature.last.clone() for feature in data.features]
    for _ in range(2):
        learner.forward_backward(*data.arguments())
        learner.optim_step()
    assert all(torch.equal(old, feature.last) for old, feature in zip(before, data.features, strict=True))
    assert not any(feature.last.requires_grad for feature in data.features)


class TwoLayers(ActionModule):
    """Reads two hidden states and says what it saw."""

    layers = (2, LAST)

    def __init__(self) -> None:
        super().__init__(hidden_size=HIDDEN, state_dim=0, action_dim=1, chunk=1)
        self.seen: PaddedFeature | None = None

    @classmethod
    def from_spec(cls, spec: PolicySpec, hidden_size: int) -> TwoLayers:
        return cls()

    def forward(self, feature: PaddedFeature, state: torch.Tensor, noise: Noise) -> torch.Tensor:
        self.seen = feature
        return feature.last.sum(dim=(1, 2))[:, None, None]

    def loss(
        self,
        feature: PaddedFeature,
        state: torch.Tensor,
        action: torch.Tensor,
        action_mask: torch.Tensor,
        noise: Noise,
    ) -> torch.Tensor:
        return self(feature, state, noise).square().mean()


def test_every_layer_that_the_head_reads_has_an_adapter_of_its_own() -> None:
    random = torch.Generator().manual_seed(0)
    head = TwoLayers()
    module = Adapted(head, [Bottleneck(HIDDEN, BottleneckConfig(width=4), random) for _ in head.layers])
    assert module.layers == (2, LAST)
    torch.nn.init.ones_(module.adapter[0].up.bias)  # type: ignore[union-attr, arg-type]  # a Bottleneck
    features = [
        VLAFeature({2: torch.randn(n, HIDDEN), LAST: torch.randn(n, HIDDEN)}, torch.zeros(n, dtype=torch.uint8), DIGEST)
        for n in (3, 5)
    ]
    padded = pad_features(features, module.layers)
    module(padded, torch.zeros(2, 0), Noise([0, 0]))
    assert head.seen is not None
    assert torch.equal(head.seen.last, padded.last)
    assert torch.equal(head.seen.layers[2][1], padded.layers[2][1] + 1)
    assert torch.equal(head.seen.layers[2][0, 3:], torch.zeros(2, HIDDEN)), "there is still nothing where no token is"


def test_the_heads_own_weights_do_not_depend_on_the_adapter() -> None:
    alone = build_head(policy_spec(), HIDDEN).state_dict()
    inside = policy(adapted_spec()).module.state_dict()
    assert all(torch.equal(tensor, inside[f"head.{name}"]) for name, tensor in alone.items())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"adapter": "lora"}, "there is no adapter 'lora'; known adapters are: none, bottleneck"),
        ({"adapter_config": {"rank": 4}}, "adapter_config of 'bottleneck' .*rank.*known keys: width"),
        ({"adapter_config": {"width": 0}}, "width"),
        ({"adapter": "none"}, "adapter_config is given, but adapter is 'none'"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_sentence(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        check_modules(adapted_spec(**changes), HIDDEN)
    assert "\n" not in str(refused.value)


def test_the_memory_that_a_spec_will_take_is_known_before_it_is_built() -> None:
    for spec in (policy_spec(), adapted_spec(), adapted_spec(head="groot", head_config={"width": 32})):
        assert check_modules(spec, HIDDEN) == policy(spec).memory_bytes
