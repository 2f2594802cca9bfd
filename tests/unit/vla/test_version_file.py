"""Promises of version files: the same bytes again, whole and right, or refused in one sentence."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from joynexus.specs import PolicySpec
from joynexus.vla.learner import Learner
from joynexus.vla.policy import Policy
from joynexus.vla.version_file import read_version, write_version
from tests.unit.vla.samples import (
    DIGEST,
    HIDDEN,
    batch,
    policy_spec,
)


def policy(spec: PolicySpec | None = None) -> Policy:
    return Policy(spec or policy_spec(), DIGEST, HIDDEN)


def test_a_version_acts_as_the_policy_that_was_written(tmp_path: Path) -> None:
    learner = Learner(policy())
    learner.forward_backward(*batch(0).arguments())
    learner.optim_step()
    digest, nbytes = write_version(tmp_path / "v", learner.policy, 7, numerics_class="n")
    loaded = read_version(tmp_path / "v", digest)
    assert (loaded.version, loaded.spec, loaded.digest, loaded.nbytes) == (7, learner.policy.spec, digest, nbytes)
    assert loaded.meta.numerics_class == "n"
    data = batch(5)
    np.testing.assert_array_equal(
        loaded.policy.act(data.features, data.state), learner.policy.act(data.features, data.state)
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "v"]


def test_the_same_version_has_the_same_bytes(tmp_path: Path) -> None:
    one, _ = write_version(tmp_path / "a", policy(), 1)
    two, _ = write_version(tmp_path / "b", policy(), 1)
    other, _ = write_version(tmp_path / "c", policy(), 2)
    assert one == two != other


def test_a_version_with_nan_is_not_written(tmp_path: Path) -> None:
    made = policy()
    with torch.no_grad():
        next(made.module.parameters()).fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN or infinity in 'query'"):
        write_version(tmp_path / "v", made, 1)
    assert not list(tmp_path.iterdir())


def _parts(content: bytes) -> tuple[dict[str, object], bytes]:
    (size,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def _whole(header: dict[str, object], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _with_meta(content: bytes, **changes: object) -> bytes:
    header, data = _parts(content)
    meta = json.loads(header["__metadata__"]["joynexus"]) | changes  # type: ignore[index]  # JSON
    header["__metadata__"] = {"joynexus": json.dumps(meta)}
    return _whole(header, data)


def _renamed(content: bytes) -> bytes:
    header, data = _parts(content)
    header["nonesuch"] = header.pop("gate")
    return _whole(header, data)


def _reshaped(content: bytes) -> bytes:
    header, data = _parts(content)
    header["middle.bias"]["shape"] = [4, 8]  # type: ignore[index]  # JSON
    return _whole(header, data)


def _poisoned(content: bytes) -> bytes:
    header, data = _parts(content)
    start = header["gate"]["data_offsets"][0]  # type: ignore[index]  # JSON
    return _whole(header, data[:start] + struct.pack("<f", float("inf")) + data[start + 4 :])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda c: c[:-10], "damaged"),
        (lambda c: c[:100], "truncated"),
        (lambda c: b"", "not a JoyNexus version file"),
        (lambda c: b"PK\x03\x04" + c, "truncated"),
        (lambda c: _whole({}, b""), "no readable metadata"),
        (lambda c: _whole({"__metadata__": {"joynexus": "\ud800"}}, b""), "no readable metadata"),
        (lambda c: struct.pack("<Q", 100_000) + b"[" * 100_000, "no readable metadata"),
        (lambda c: _with_meta(c, format=9), "format 9"),
        (lambda c: _with_meta(c, surprise=1), "surprise"),
        (lambda c: _with_meta(c, hidden_size=HIDDEN * 2), "does not fit its spec"),
        (_renamed, "missing tensors \\['gate'\\], unknown tensors \\['nonesuch'\\]"),
        (_reshaped, "'middle.bias'"),
        (_poisoned, "NaN or infinity in 'gate'"),
    ],
)
def test_a_version_file_that_is_not_right_is_refused(
    tmp_path: Path, spoil: Callable[[bytes], bytes], says: str
) -> None:
    write_version(tmp_path / "v", policy(), 1)
    with pytest.raises(ValueError, match=says):
        read_version(spoil((tmp_path / "v").read_bytes()))


def test_a_version_file_with_another_digest_or_none_at_all_is_refused(tmp_path: Path) -> None:
    digest, _ = write_version(tmp_path / "v", policy(), 1)
    write_version(tmp_path / "v", policy(policy_spec(seed=9)), 1)
    with pytest.raises(ValueError, match=f"expected {digest}"):
        read_version(tmp_path / "v", digest)
    with pytest.raises(ValueError, match="cannot be read"):
        read_version(tmp_path / "nonesuch")
