"""Promises of a tenant's own weights: checked like a version, taken whole or not at all, with a fresh optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from joynexus.specs import PolicySpec
from joynexus.vla.exported import export_policy
from joynexus.vla.learner import Learner
from joynexus.vla.policy import Policy
from joynexus.vla.version_file import write_version
from tests.unit.vla.samples import DIGEST, HIDDEN, batch, policy_spec

Tensors = dict[str, torch.Tensor]


def trained(spec: PolicySpec | None = None, steps: int = 3) -> Learner:
    learner = Learner(Policy(spec or policy_spec(), DIGEST, HIDDEN))
    for seed in range(steps):
        learner.forward_backward(*batch(seed).arguments())
        learner.optim_step()
    return learner


def exported(learner: Learner, folder: Path) -> Path:
    write_version(folder / "version", learner.policy, 4)
    export_policy(folder / "version", folder / "exported")
    return folder / "exported" / "policy.safetensors"


def version(learner: Learner, folder: Path) -> Path:
    write_version(folder / "version", learner.policy, 4)
    return folder / "version"


def plain(learner: Learner, folder: Path) -> Path:
    save_file(learner.policy.module.state_dict(), folder / "plain")
    return folder / "plain"


@pytest.mark.parametrize("write", [version, exported, plain])
@pytest.mark.parametrize("spec", [policy_spec(), policy_spec(adapter="bottleneck", head="groot", head_config={})])
def test_weights_that_were_loaded_act_as_they_did(
    tmp_path: Path, spec: PolicySpec, write: Callable[[Learner, Path], Path]
) -> None:
    theirs, mine, data = trained(spec), trained(spec, steps=1), batch(9)
    mine.load_weights(write(theirs, tmp_path))
    np.testing.assert_array_equal(
        mine.policy.act(data.features, data.state), theirs.policy.act(data.features, data.state)
    )


def test_the_optimizer_starts_anew_as_if_the_policy_had_been_created_with_the_weights(tmp_path: Path) -> None:
    source = version(trained(), tmp_path)
    used, fresh = trained(steps=5), trained(steps=0)
    used.forward_backward(*batch(1).arguments())
    for learner in (used, fresh):
        learner.load_weights(source)
        assert (learner.step, learner.pending) == (0, 0)
        for seed in range(3):
            learner.forward_backward(*batch(seed).arguments())
            learner.optim_step()
    tensors, meta = fresh.state()
    assert used.state()[1] == meta
    assert all(torch.equal(tensor, used.state()[0][name]) for name, tensor in tensors.items())


def _missing(tensors: Tensors) -> None:
    del tensors["gate"]


def _unknown(tensors: Tensors) -> None:
    tensors["module.gate"] = tensors.pop("gate")


def _reshaped(tensors: Tensors) -> None:
    tensors["middle.bias"] = tensors["middle.bias"].view(4, 8)


def _long_name(tensors: Tensors) -> None:
    tensors["x" * 100_000] = torch.zeros(1)


def _half(tensors: Tensors) -> None:
    tensors["middle.bias"] = tensors["middle.bias"].bfloat16()


def _poisoned(tensors: Tensors) -> None:
    tensors["gate"] = torch.tensor(float("inf"))


@pytest.mark.parametrize(
    ("spoil", "metadata", "says"),
    [
        (_missing, None, "missing tensors \\['gate'\\]"),
        (_unknown, None, "missing tensors \\['gate'\\], unknown tensors \\['module.gate'\\]"),
        (_reshaped, None, "'middle.bias' is \\[4, 8\\], expected \\[32\\]"),
        (_long_name, None, "missing tensors \\[\\], unknown tensors \\['xxxx"),
        (_half, None, "'middle.bias' is torch.bfloat16"),
        (_poisoned, None, "NaN or infinity in 'gate'"),
        (lambda tensors: None, {"backbone_digest": "c" * 32}, "was trained on backbone c+"),
        (lambda tensors: None, {"backbone_digest": "c\n" * 100_000}, "was trained on backbone c c"),
        (lambda tensors: None, {"joynexus": "{"}, "no readable metadata"),
        (lambda tensors: None, {"joynexus": "[" * 100_000}, "no readable metadata"),
        (lambda tensors: None, {"joynexus": '{"format": ' + "1" * 5000 + "}"}, "no readable metadata"),
        (lambda tensors: None, {"joynexus": '{"format": 1, "' + "x" * 100_000 + '": 2}'}, "metadata that is not valid"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_sentence_and_changes_nothing(
    tmp_path: Path, spoil: Callable[[Tensors], None], metadata: dict[str, str] | None, says: str
) -> None:
    tensors = {name: tensor.clone() for name, tensor in trained().policy.module.state_dict().items()}
    spoil(tensors)
    save_file(tensors, tmp_path / "weights", metadata)
    refuses(tmp_path / "weights", says)


def test_a_version_of_another_backbone_is_refused(tmp_path: Path) -> None:
    write_version(tmp_path / "version", Policy(policy_spec(), "d" * 32, HIDDEN), 1)
    refuses(tmp_path / "version", "was trained on backbone d+")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not safetensors", b"\xff" * 64])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "weights").write_bytes(content)
    refuses(tmp_path / "weights", "no safetensors file")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refuses(tmp_path / "nonesuch", "cannot be read")


def refuses(path: Path, says: str) -> None:
    learner = trained()
    learner.forward_backward(*batch(7).arguments())
    with pytest.raises(ValueError, match=says) as refused:
        learner.load_weights(path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500
    assert (learner.step, learner.pending) == (3, 1)
    expected = trained()
    expected.forward_backward(*batch(7).arguments())
    for each in (learner, expected):
        each.optim_step()
    state = expected.state()[0]
    assert all(torch.equal(tensor, state[name]) for name, tensor in learner.state()[0].items())
