from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from joynexus.vla.feature import Observation, VLAFeature
from joynexus.vla.feature_store import FeatureStore, feature_key
from tests.unit.vla.samples import DIGEST, feature, observation

BASE: dict[str, Any] = {"scope": "team", "backbone": DIGEST, "numerics_class": "cpu"}


def key(number: int) -> str:
    return feature_key(observation(number), **BASE)


def made(number: int) -> VLAFeature:
    return feature(torch.Generator().manual_seed(number), 20)


def same(a: VLAFeature | None, b: VLAFeature) -> bool:
    return (
        a is not None
        and torch.equal(a.last, b.last)
        and torch.equal(a.token_type, b.token_type)
        and a.backbone == b.backbone
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_feature_comes_back_bit_for_bit_after_a_restart(tmp_path: Path, dtype: torch.dtype) -> None:
    before = made(1)
    before.layers[-1] = before.layers[-1].to(dtype)
    before.layers[2] = before.last * 2
    FeatureStore(tmp_path, 1 << 20).put(key(1), before)
    again = FeatureStore(tmp_path, 1 << 20)
    found = again.get(key(1))
    assert same(found, before)
    assert found is not None
    assert torch.equal(found.layers[2], before.layers[2])
    assert again.get(key(2)) is None
    assert (again.stats.hits, again.stats.misses) == (1, 1)


def test_a_second_read_comes_from_memory(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, 1 << 20)
    store.put(key(1), made(1))
    for folder in tmp_path.iterdir():
        for file in folder.iterdir():
            file.unlink()
    assert same(store.get(key(1)), made(1))
    assert FeatureStore(tmp_path, 1 << 20, memory_bytes=0).get(key(1)) is None


def test_everything_a_feature_depends_on_is_in_its_key() -> None:
    sample = observation(1, views=2)
    keys = {
        feature_key(sample, **BASE),
        feature_key(sample, **(BASE | {"scope": "shared:team"})),
        feature_key(sample, **(BASE | {"backbone": "c" * 32})),
        feature_key(sample, **(BASE | {"numerics_class": "cuda"})),
        feature_key(sample, **BASE, layers=(-1, 3)),
        feature_key(sample, **BASE, dtype="bfloat16"),
        feature_key(Observation(sample.images, "pull"), **BASE),
        feature_key(Observation(sample.images[::-1], sample.instruction), **BASE),
        feature_key(Observation(sample.images[:1], sample.instruction), **BASE),
        feature_key(Observation((sample.images[0].reshape(32, 128, 3), sample.images[1]), "push the button"), **BASE),
    }
    assert len(keys) == 10
    assert feature_key(observation(1, views=2), **BASE) in keys


@pytest.mark.parametrize("damage", [lambda c: c[: len(c) // 2], lambda c: b"", lambda c: c[:-1] + bytes([c[-1] ^ 1])])
def test_a_torn_or_altered_file_is_absent(tmp_path: Path, damage: object) -> None:
    FeatureStore(tmp_path, 1 << 20).put(key(1), made(1))
    [file] = tmp_path.glob("*/*")
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]  # a function from bytes to bytes
    store = FeatureStore(tmp_path, 1 << 20)
    assert store.get(key(1)) is None
    store.put(key(1), made(1))
    assert same(FeatureStore(tmp_path, 1 << 20).get(key(1)), made(1))


def test_the_budget_holds_and_what_was_used_lately_stays(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, 1 << 20, memory_bytes=0)
    store.put(key(0), made(0))
    size = store.stats.bytes
    budget = 10 * size
    store = FeatureStore(tmp_path, budget, memory_bytes=0)
    for number in range(1, 10):
        store.put(key(number), made(number))
    for age, number in enumerate(range(10)):  # file times are coarser than this test is quick
        [file] = tmp_path.glob(f"*/{key(number)}")
        os.utime(file, (1000 + age, 1000 + age))
    assert store.get(key(0)) is not None
    store.put(key(10), made(10))
    assert store.stats.evictions == 2
    assert store.stats.bytes <= budget
    assert sum(file.stat().st_size for file in tmp_path.glob("*/*")) == store.stats.bytes
    assert [number for number in range(11) if store.get(key(number)) is None] == [1, 2]


def test_a_full_disk_forgets_features_and_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Path, _content: bytes) -> int:
        raise OSError(28, "No space left on device")

    store = FeatureStore(tmp_path, 1 << 20)
    monkeypatch.setattr(Path, "write_bytes", full)
    store.put(key(1), made(1))
    assert same(store.get(key(1)), made(1)), "memory still has it"
    assert FeatureStore(tmp_path, 1 << 20).get(key(1)) is None


def test_a_feature_larger_than_the_budget_is_not_written(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, 100)
    store.put(key(1), made(1))
    assert not list(tmp_path.glob("*/*"))
    assert same(store.get(key(1)), made(1))


def test_processes_of_one_host_share_a_directory(tmp_path: Path) -> None:
    one, two = FeatureStore(tmp_path, 1 << 20), FeatureStore(tmp_path, 1 << 20)
    one.put(key(1), made(1))
    two.put(key(2), made(2))
    assert same(two.get(key(1)), made(1))
    assert same(one.get(key(2)), made(2))


def test_a_negative_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="negative"):
        FeatureStore(tmp_path, -1)
